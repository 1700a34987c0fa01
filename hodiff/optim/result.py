"""The results of SciPy in the caller's structure."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import scipy

from hodiff.optim.objective import Objective


def describe_end(found: scipy.optimize.OptimizeResult) -> None:
    """Say where the end is none: a method that meets NaN may call it success."""
    finite = math.isfinite(found.fun) and bool(np.isfinite(found.x).all())
    if not finite:
        found.success = False
        found.message = f"The value at x is {found.fun}, where no step leads on. {found.message}"


def in_own_structure(found: scipy.optimize.OptimizeResult, objective: Objective) -> scipy.optimize.OptimizeResult:
    """Point and gradient as pytrees, and counts."""
    variables, counts = objective.variables, objective.counts
    found.x = variables.tree(found.x)
    for name in ("jac", "grad"):
        # Under "jac" a method with constraints lists their Jacobians.
        if isinstance(slope := found.get(name), np.ndarray) and slope.shape == (variables.space.size,):
            found[name] = variables.tree(slope)
    _count(found, nfev=counts.values, njev=counts.gradients, nhvp=counts.products, nhev=counts.hessians)
    return found


def _count(found: scipy.optimize.OptimizeResult, **counts: Any) -> None:
    for name, count in counts.items():
        found[name] = count
