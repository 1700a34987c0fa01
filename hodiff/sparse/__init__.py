"""Sparse Hessians and Jacobians: found, coloured, recovered."""

from hodiff.sparse.detection.patterns import hessian_pattern as hessian_pattern
from hodiff.sparse.detection.patterns import jacobian_pattern as jacobian_pattern
