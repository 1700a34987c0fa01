"""SciPy's result with a table for notebooks, in the caller's structure."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import scipy
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hodiff.common.trees import leaf_label, leaf_names
from hodiff.displays import Html, badge, element, facts, number, numbers, page, table
from hodiff.optimize.objective import Objective


def describe_end(found: scipy.optimize.OptimizeResult, objective: Objective) -> None:
    """Report failure on non-finite values, which some methods call success, and note if x is still x0."""
    finite = math.isfinite(found.fun) and bool(np.isfinite(found.x).all())
    if not finite:
        found.success = False
        found.message = f"The value at x is {found.fun}, where no step leads on. {found.message}"
        return
    if not np.isfinite(found.jac).all():
        found.success = False
        found.message = f"The gradient at x is not finite. {found.message}"
    elif np.array_equal(found.x, objective.variables.start):
        found.message = f"x is x0, where the gradient has norm {np.linalg.norm(found.jac):.1e}. {found.message}"
    elif not found.success and objective.strayed:
        found.message += " Values or derivatives at other points were not finite."


def report_flat_curvature(found: scipy.optimize.OptimizeResult) -> None:
    """Report failure of "newton-cg" if its last step is zero because the curvature is, and the gradient is not."""
    if np.abs(found.jac).max() > _GTOL:
        found.update(success=False, status=3)
        found.message = (
            "The last step has length zero, because the curvature along the gradient is zero, although the gradient "
            f"has norm {np.linalg.norm(found.jac):.1e}; another method, such as 'bfgs', may go on."
        )


# Default of `gtol` for SciPy's methods.
_GTOL = 1e-5


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


MOST = 12  # number of leaves of the point that are listed
COUNTS = {
    "nit": "iterations",
    "nfev": "values",
    "njev": "gradients",
    "nhvp": "products with the Hessian",
    "nhev": "Hessians",
    "naev": "second derivatives",
}


class OptimizeResult(scipy.optimize.OptimizeResult):
    """`scipy.optimize.OptimizeResult` that notebooks show as a table.

    Example:
        >>> import torch, hodiff
        >>> found = hodiff.optimize.minimize(lambda x: (x - 1) ** 2, torch.tensor(3.0))
        >>> isinstance(found, scipy.optimize.OptimizeResult), found.success
        (True, True)
    """

    def _repr_html_(self) -> str:
        several = isinstance(self.get("success"), Tensor)
        ends = _ends_of_all(self) if several else [_end(bool(self.get("success")), str(self.get("message", "")))]
        value = self.get("cost", self.get("fun"))
        known = [("cost" if "cost" in self else "value", _shown(value))]
        slope = self.get("grad") if "cost" in self else self.get("jac")
        if slope is not None and not several:
            known.append(("largest entry of the gradient", _largest(slope)))
        known += [(label, _shown(self[name])) for name, label in COUNTS.items() if self.get(name) is not None]
        return page(*ends, facts(known), _point(self.get("x")))


def _end(success: bool, message: str) -> Html:
    return element("p", badge("success" if success else "no success", "ok" if success else "error"), " ", message)


def _ends_of_all(found: OptimizeResult) -> list[Html]:
    """Show the number of problems that ended with success, and the messages of the failures."""
    done, count = int(found.success.sum()), len(found.success)
    verdict = badge(f"{done:,} of {count:,} problems ended with success", "ok" if done == count else "warning")
    good = found.success.tolist()
    reasons = dict.fromkeys(each for each, ended in zip(found.message, good, strict=True) if not ended)
    return [element("p", verdict), *(element("p", reason) for reason in reasons)]


def _shown(value: Any) -> str:
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value)
    if isinstance(value, Tensor):
        return numbers(value)
    return f"{value:,}" if isinstance(value, int) else number(value)


def _largest(slope: Any) -> str:
    leaves = [torch.as_tensor(leaf, device=getattr(leaf, "device", "cpu")).abs() for leaf in pytree.tree_leaves(slope)]
    return number(max((leaf.max().item() for leaf in leaves if leaf.numel()), default=0.0), 2)


def _point(x: Any) -> Html:
    leaves = pytree.tree_leaves(x)
    if not leaves or not all(isinstance(leaf, Tensor) for leaf in leaves):
        return Html()
    names = [leaf_label(name) or "x" for name in leaf_names(x)]
    return table(("x", "numbers"), [(n, numbers(leaf)) for n, leaf in zip(names, leaves, strict=True)], most=MOST)
