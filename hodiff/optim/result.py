"""Conversion of SciPy's results to the caller's structure."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import scipy

from hodiff.optim.objective import Objective


def describe_end(found: scipy.optimize.OptimizeResult, objective: Objective) -> None:
    """Report failure on non-finite values, which some methods call success, and note if x is still x0."""
    finite = math.isfinite(found.fun) and bool(np.isfinite(found.x).all())
    if not finite:
        found.success = False
        found.message = f"The value at x is {found.fun}, where no step leads on. {found.message}"
        return
    slope = next((each for each in (found.get("grad"), found.get("jac")) if isinstance(each, np.ndarray)), None)
    if slope is not None and np.array_equal(found.x, objective.variables.start):
        found.message = f"x is x0, where the gradient has norm {np.linalg.norm(slope):.1e}. {found.message}"


def in_own_structure(found: scipy.optimize.OptimizeResult, objective: Objective) -> scipy.optimize.OptimizeResult:
    """Convert point and gradient to pytrees, and set the counts."""
    variables, counts = objective.variables, objective.counts
    found.x = variables.tree(found.x)
    for name in ("jac", "grad"):
        # Methods with constraints return the Jacobians of the constraints under "jac".
        if isinstance(slope := found.get(name), np.ndarray) and slope.shape == (variables.space.size,):
            found[name] = variables.tree(slope)
    _count(found, nfev=counts.values, njev=counts.gradients, nhvp=counts.products, nhev=counts.hessians)
    return found


def _count(found: scipy.optimize.OptimizeResult, **counts: Any) -> None:
    for name, count in counts.items():
        found[name] = count
