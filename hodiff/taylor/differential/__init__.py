"""Differential operators by Taylor mode: Laplacians, and what else sums derivatives of one order."""

from hodiff.taylor.differential.laplacian import laplacian as laplacian
from hodiff.taylor.differential.laplacian import value_grad_laplacian as value_grad_laplacian
