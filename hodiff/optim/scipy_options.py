"""Options of SciPy's methods of `minimize`. Unknown options raise; SciPy would only warn."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import scipy.optimize

from hodiff.optim.own_options import require_known

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
