"""Higher-order differentiation in PyTorch: right, fast and easy to check."""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from hodiff.corrections import corrected as corrected
from hodiff.derivatives import ROUTES as ROUTES
from hodiff.derivatives import grad_and_hvp as grad_and_hvp
from hodiff.derivatives import hessian as hessian
from hodiff.derivatives import hessian_diagonal as hessian_diagonal
from hodiff.derivatives import hessian_matrix as hessian_matrix
from hodiff.derivatives import hvp as hvp
from hodiff.derivatives import hvp_function as hvp_function
from hodiff.derivatives import jacobian as jacobian
from hodiff.derivatives import value_grad_hvp as value_grad_hvp
from hodiff.errors import CheckError as CheckError
from hodiff.errors import ConvergenceError as ConvergenceError
from hodiff.errors import HodiffError as HodiffError
from hodiff.errors import HodiffWarning as HodiffWarning
from hodiff.errors import InputError as InputError
from hodiff.errors import RankError as RankError
from hodiff.errors import RouteError as RouteError
from hodiff.functions import straight_through as straight_through

# Imported at once, because it intercepts torch's transforms, which must not change while a compiler reads them.
from hodiff.taylor import bilaplacian as bilaplacian
from hodiff.taylor import directional_derivatives as directional_derivatives
from hodiff.taylor import laplacian as laplacian
from hodiff.taylor import partial as partial

if _TYPE_CHECKING:
    from hodiff import atoms as atoms
    from hodiff import audit as audit
    from hodiff import authoring as authoring
    from hodiff import checks as checks
    from hodiff import doors as doors
    from hodiff import estimators as estimators
    from hodiff import functions as functions
    from hodiff import implicit as implicit
    from hodiff import meta as meta
    from hodiff import nn as nn
    from hodiff import operators as operators
    from hodiff import optim as optim
    from hodiff import optimize as optimize
    from hodiff import per_sample as per_sample
    from hodiff import plot as plot
    from hodiff import sparse as sparse
    from hodiff.authoring import custom_jvp as custom_jvp
    from hodiff.authoring import custom_vjp as custom_vjp
    from hodiff.authoring import elementwise as elementwise
    from hodiff.checks import Finding as Finding
    from hodiff.checks import Report as Report
    from hodiff.checks import assert_differentiable as assert_differentiable
    from hodiff.checks import check as check
    from hodiff.checks.preflight.preflight import preflight as preflight
    from hodiff.derivatives.compiled_calls import compile_gradient as compile_gradient
    from hodiff.implicit import odeint as odeint
    from hodiff.operators import EKFACOperator as EKFACOperator
    from hodiff.operators import EmpiricalFisherOperator as EmpiricalFisherOperator
    from hodiff.operators import FisherOperator as FisherOperator
    from hodiff.operators import GaussNewtonOperator as GaussNewtonOperator
    from hodiff.operators import GramOperator as GramOperator
    from hodiff.operators import HessianOperator as HessianOperator
    from hodiff.operators import JacobianOperator as JacobianOperator
    from hodiff.operators import KFACOperator as KFACOperator
    from hodiff.operators import LinearOperator as LinearOperator

__version__ = "0.1.0"

# Imported on first use: authoring registers rules with dynamo, which takes a second to import; operators need SciPy;
# checks are rarely used.
_LATE = {
    "Finding": "hodiff.checks",
    "Report": "hodiff.checks",
    "assert_differentiable": "hodiff.checks",
    "check": "hodiff.checks",
    "preflight": "hodiff.checks.preflight.preflight",
    "custom_jvp": "hodiff.authoring",
    "custom_vjp": "hodiff.authoring",
    "elementwise": "hodiff.authoring",
    "compile_gradient": "hodiff.derivatives.compiled_calls",
    "odeint": "hodiff.implicit",
    "EKFACOperator": "hodiff.operators",
    "EmpiricalFisherOperator": "hodiff.operators",
    "FisherOperator": "hodiff.operators",
    "GaussNewtonOperator": "hodiff.operators",
    "GramOperator": "hodiff.operators",
    "HessianOperator": "hodiff.operators",
    "JacobianOperator": "hodiff.operators",
    "KFACOperator": "hodiff.operators",
    "LinearOperator": "hodiff.operators",
}
_PACKAGES = {
    *(
        "atoms",
        "audit",
        "authoring",
        "checks",
        "doors",
        "estimators",
        "functions",
        "implicit",
        "meta",
        "nn",
        "operators",
        "optim",
        "optimize",
    ),
    *("per_sample", "plot", "sparse"),
}


def __getattr__(name: str) -> _Any:
    if name in _LATE:
        return getattr(_import_module(_LATE[name]), name)
    if name in _PACKAGES:
        return _import_module(f"hodiff.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATE, *_PACKAGES})
