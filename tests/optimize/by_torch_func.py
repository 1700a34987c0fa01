"""SciPy with derivatives by `torch.func` instead of hodiff, for functions of elementary operators."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.optimize as so
import torch
from torch import Tensor

from hodiff.optimize.methods import METHODS


def _of_arrays(function: Callable[..., Tensor]) -> Callable[..., Any]:
    def call(*arrays: np.ndarray) -> Any:
        found = function(*(torch.from_numpy(np.array(each, float)) for each in arrays)).numpy()
        return found if found.ndim else float(found)

    return call


def minimize(f: Callable[[Tensor], Tensor], x0: Tensor, method: str, options: dict[str, Any]) -> so.OptimizeResult:
    """Minimize with gradients in reverse mode, and products and Hessians by forward over reverse."""
    slope = torch.func.grad(f)
    of_curvature = {
        "": {},
        "hessian": {"hess": _of_arrays(torch.func.hessian(f))},
        "products": {"hessp": _of_arrays(lambda x, v: torch.func.jvp(slope, (x,), (v,))[1])},
    }
    given = of_curvature[METHODS[method].curvature]
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return so.minimize(_of_arrays(f), x0.numpy(), jac=_of_arrays(slope), method=method, options=options, **given)


def least_squares(f: Callable[[Tensor], Tensor], x0: Tensor, method: str, options: dict[str, Any]) -> so.OptimizeResult:
    """Solve least squares with Jacobians in forward mode."""
    with np.errstate(all="ignore"):
        slopes = _of_arrays(torch.func.jacfwd(f))
        return so.least_squares(_of_arrays(f), x0.numpy(), slopes, method=method, **options)
