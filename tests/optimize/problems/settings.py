"""Tolerances of each method on the test problems, as tight as float64 and the running time of tests allow."""

from __future__ import annotations

from typing import Any

_TRUST = {"gtol": 1e-8, "maxiter": 1000}
_SQUARES = {"ftol": 1e-15, "xtol": 1e-15, "gtol": 1e-15, "x_scale": 1.0, "max_nfev": 2000}
LEAST_SQUARES = {"trf": _SQUARES, "dogbox": _SQUARES, "lm": _SQUARES}
# hodiff's own methods, which SciPy does not have.
OWN_LEAST_SQUARES = {"lm-geodesic": {**_SQUARES, "ftol": 1e-12, "xtol": 1e-12, "x_scale": "jac"}}
OWN_MINIMIZE: dict[str, dict[str, Any]] = {
    "newton-krylov": {"gtol": 1e-8, "maxiter": 300},
    "ssbfgs": {"gtol": 1e-8, "maxiter": 300},
    "ssbroyden": {"gtol": 1e-8, "maxiter": 300},
}
# Settings for many problems at once, where all problems take as many steps as the slowest.
BATCHED_LEAST_SQUARES = {"lm": {"ftol": 1e-12, "xtol": 1e-12, "gtol": 1e-15, "max_nfev": 500}}
BATCHED_MINIMIZE: dict[str, dict[str, Any]] = {
    "bfgs": {"gtol": 1e-8, "maxiter": 300},
    "l-bfgs-b": {"ftol": 1e-16, "gtol": 1e-9, "maxiter": 300},
    "trust-exact": {"gtol": 1e-8, "maxiter": 300},
}
# SciPy's methods; with derivatives by hand they are the reference.
MINIMIZE: dict[str, dict[str, Any]] = {
    "bfgs": {"gtol": 1e-8, "maxiter": 2000},
    "cg": {"gtol": 1e-8, "maxiter": 2000},
    "dogleg": _TRUST,
    "l-bfgs-b": {"ftol": 1e-16, "gtol": 1e-9, "maxiter": 5000, "maxfun": 10000},
    "newton-cg": {"xtol": 1e-10, "maxiter": 500},
    "slsqp": {"ftol": 1e-16, "maxiter": 1000},
    "tnc": {"ftol": 0.0, "gtol": 1e-10, "xtol": 0.0, "maxfun": 5000},
    "trust-constr": {"gtol": 1e-8, "xtol": 1e-12, "maxiter": 1000},
    "trust-exact": _TRUST,
    "trust-krylov": _TRUST,
    "trust-ncg": _TRUST,
}
