"""Operators that a function's linearization at a point gives: Hessian, Gauss-Newton, Fisher and Jacobian."""
