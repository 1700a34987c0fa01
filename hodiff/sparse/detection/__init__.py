"""Which entries of a Hessian or a Jacobian can be other than zero."""
