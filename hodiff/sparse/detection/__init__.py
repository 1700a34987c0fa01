"""Detection of the entries of a Hessian or a Jacobian that can be nonzero."""
