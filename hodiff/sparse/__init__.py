"""Sparse Hessians and Jacobians: detection of patterns, coloring and recovery."""

from hodiff.sparse.coloring import Coloring as Coloring
from hodiff.sparse.coloring import color as color
from hodiff.sparse.detection.patterns import hessian_pattern as hessian_pattern
from hodiff.sparse.detection.patterns import jacobian_pattern as jacobian_pattern
from hodiff.sparse.hessian import hessian as hessian
from hodiff.sparse.hessian import lagrangian_hessian as lagrangian_hessian
from hodiff.sparse.hessian import value_and_hessian as value_and_hessian
from hodiff.sparse.jacobian import jacobian as jacobian
from hodiff.sparse.pattern_checks import check_pattern as check_pattern
