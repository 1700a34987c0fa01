"""Operators defined by a function's linearization at a point: Hessian, Gauss-Newton, Fisher and Jacobian."""
