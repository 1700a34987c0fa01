"""Methods of `minimize`, SciPy's and hodiff's own: what each supports, and the choice of one."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import scipy.optimize

from hodiff.common.options import require_choice
from hodiff.errors import InputError
from hodiff.optimize.batched.batched_methods import DEFAULT
from hodiff.optimize.batched.batched_methods import METHODS as BATCHED
from hodiff.optimize.method_options import require_known
from hodiff.optimize.newton import NewtonOptions, newton_method
from hodiff.optimize.newton_krylov import NewtonKrylovOptions, newton_krylov_method
from hodiff.optimize.quasi_newton import QuasiNewtonOptions, ssbfgs_method, ssbroyden_method
from hodiff.optimize.sparse_derivatives import require_sparse

_DIFFERENCES = ("eps", "finite_diff_rel_step", "workers")
_TRUST_REGION = ("gtol", "maxiter", "initial_trust_radius", "max_trust_radius", "eta", "disp", "return_all", "workers")

OPTIONS: Mapping[str, tuple[str, ...]] = {
    "bfgs": ("gtol", "maxiter", "norm", "xrtol", "c1", "c2", "hess_inv0", "disp", "return_all", *_DIFFERENCES),
    "cg": ("gtol", "maxiter", "norm", "c1", "c2", "disp", "return_all", *_DIFFERENCES),
    "dogleg": _TRUST_REGION,
    "l-bfgs-b": ("ftol", "gtol", "maxiter", "maxfun", "maxcor", "maxls", "disp", "iprint", *_DIFFERENCES),
    "newton-cg": ("xtol", "maxiter", "c1", "c2", "disp", "return_all", "eps", "workers"),
    "slsqp": ("ftol", "maxiter", "disp", "iprint", *_DIFFERENCES),
    "tnc": (
        *("ftol", "xtol", "gtol", "maxfun", "maxCGit", "eta", "stepmx", "accuracy", "minfev", "scale", "offset"),
        *("rescale", "disp", "mesg_num", *_DIFFERENCES),
    ),
    "trust-constr": (
        *("xtol", "gtol", "barrier_tol", "maxiter", "initial_tr_radius", "initial_constr_penalty", "disp", "verbose"),
        *("initial_barrier_parameter", "initial_barrier_tolerance", "factorization_method", "sparse_jacobian"),
        *("finite_diff_rel_step", "workers"),
    ),
    "trust-exact": (*_TRUST_REGION, "subproblem_maxiter"),
    "trust-krylov": (*_TRUST_REGION, "inexact"),
    "trust-ncg": _TRUST_REGION,
}


def require_options_of_scipy(method: str, options: Mapping[str, Any]) -> None:
    """Raise on an option that neither the table nor the documentation of the installed SciPy lists."""
    unknown = [name for name in options if name not in OPTIONS[method]]
    # The installed SciPy may be newer than the table.
    known = OPTIONS[method] + (_documented(method) if unknown else ())
    for name in unknown:
        require_known(method, name, known)


def _documented(method: str) -> tuple[str, ...]:
    """Return the names before a colon in SciPy's explanation of the options."""
    text = scipy.optimize.show_options("minimize", method, disp=False) or ""
    entries = re.findall(r"^ *(\w+(?:, \w+)*) :", text.partition("Returns\n")[0], re.MULTILINE)
    return tuple(name for each in entries for name in each.split(", "))


# Takes the objective, the options and a callback for each iteration; returns SciPy's result.
Solver = Callable[[Any, Any, Callable[[Any], None]], Any]


@dataclass(frozen=True)
class Method:
    """Capabilities of a method.

    Attributes:
        curvature: "" for none, "products" with the Hessian, or the "hessian" itself.
        bounds: Whether the method supports bounds.
        constraints: Whether the method supports constraints.
        sparse: Whether the method supports a sparse Hessian.
        trust_region: Whether SciPy compares decreases of the value with those of a model in a region.
        solver: Function that minimises; None for SciPy.
        options: Dataclass of the options.
    """

    curvature: str = ""
    bounds: bool = False
    constraints: bool = False
    sparse: bool = False
    trust_region: bool = False
    solver: Solver | None = None
    options: type = dict


METHODS = {
    "bfgs": Method(),
    "cg": Method(),
    "dogleg": Method("hessian", trust_region=True),
    "l-bfgs-b": Method(bounds=True),
    "newton": Method("hessian", sparse=True, solver=newton_method, options=NewtonOptions),
    "newton-cg": Method("products", sparse=True),
    "newton-krylov": Method("products", solver=newton_krylov_method, options=NewtonKrylovOptions),
    "slsqp": Method(bounds=True, constraints=True),
    "ssbfgs": Method(solver=ssbfgs_method, options=QuasiNewtonOptions),
    "ssbroyden": Method(solver=ssbroyden_method, options=QuasiNewtonOptions),
    "tnc": Method(bounds=True),
    "trust-constr": Method("products", bounds=True, constraints=True, sparse=True, trust_region=True),
    "trust-exact": Method("hessian", trust_region=True),
    "trust-krylov": Method("products", sparse=True, trust_region=True),
    "trust-ncg": Method("products", sparse=True, trust_region=True),
}


def require_method(method: Any, bounds: Any, constraints: Any, *, batched: bool) -> str:
    """Return the name of the method, or of the default; raise if it does not support the bounds or constraints."""
    methods: Mapping[str, Any] = BATCHED if batched else METHODS
    if method is None:
        method = "trust-ncg" if not batched else DEFAULT if bounds is None else "l-bfgs-b"
    name = method.lower() if isinstance(method, str) else method
    require_choice("minimize", "method", name, methods)
    asked = {"bounds": bounds is not None, "constraints": not is_empty(constraints)}
    for argument, wanted in asked.items():
        if wanted and not getattr(methods[name], argument):
            able = " or ".join(repr(each) for each, method in methods.items() if getattr(method, argument))
            remedy = f"pass method={able}" if able else "minimise the problems one by one"
            raise InputError(
                f"minimize: {argument}: expected None, because method={name!r} does not support it; {remedy}."
            )
    return str(name)


def require_takes_sparse(name: str, sparse: Any, *, batched: bool) -> None:
    """Raise if a sparse Hessian is requested and the method does not support it."""
    require_sparse("minimize", sparse)
    if sparse is False:
        return
    if batched:
        raise InputError("minimize: sparse: expected False with batched=True, whose Hessians are dense.")
    if not METHODS[name].sparse:
        able = " or ".join(repr(each) for each, method in METHODS.items() if method.sparse)
        raise InputError(
            f"minimize: sparse: expected False, because method={name!r} supports no sparse Hessian, got {sparse!r}; "
            f"pass method={able}."
        )


def is_empty(constraints: Any) -> bool:
    """Return whether there are no constraints."""
    return isinstance(constraints, (tuple, list)) and not constraints
