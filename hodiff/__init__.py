"""Higher-order differentiation in PyTorch: right, fast and easy to check."""

from hodiff.checks import Finding as Finding
from hodiff.checks import Report as Report
from hodiff.checks import check as check
from hodiff.derivatives import ROUTES as ROUTES
from hodiff.derivatives import directional_derivatives as directional_derivatives
from hodiff.derivatives import hessian as hessian
from hodiff.derivatives import hessian_diagonal as hessian_diagonal
from hodiff.derivatives import hessian_matrix as hessian_matrix
from hodiff.derivatives import hvp as hvp
from hodiff.derivatives import jacobian as jacobian
from hodiff.errors import CheckError as CheckError
from hodiff.errors import HodiffError as HodiffError
from hodiff.errors import HodiffWarning as HodiffWarning
from hodiff.errors import InputError as InputError
from hodiff.errors import RouteError as RouteError

__version__ = "0.1.0"
