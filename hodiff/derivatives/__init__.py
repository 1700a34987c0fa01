"""Derivatives of plain functions: products, dense Hessians, Jacobians, diagonals."""

from hodiff.derivatives.dense import hessian as hessian
from hodiff.derivatives.dense import hessian_diagonal as hessian_diagonal
from hodiff.derivatives.dense import hessian_matrix as hessian_matrix
from hodiff.derivatives.hvp import hvp as hvp
from hodiff.derivatives.hvp_function import hvp_function as hvp_function
from hodiff.derivatives.jacobian import jacobian as jacobian
from hodiff.derivatives.value_grad_hvp import grad_and_hvp as grad_and_hvp
from hodiff.derivatives.value_grad_hvp import value_grad_hvp as value_grad_hvp
from hodiff.routes import ROUTES as ROUTES
