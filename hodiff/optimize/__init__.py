"""Minimisation and least squares with exact derivatives: SciPy's methods, and methods on the device of the unknowns."""

from hodiff.optimize.least_squares import least_squares as least_squares
from hodiff.optimize.minimize import minimize as minimize
