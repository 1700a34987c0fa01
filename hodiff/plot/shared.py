"""Helpers that plots share: optional packages, axes, and the one number that a drawn function returns.

Labels of plots: shortened names, and titles that describe operators.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hodiff.common.options import name_of
from hodiff.common.trees import describe
from hodiff.errors import HodiffError, InputError
from hodiff.operators.linear.linear_operator import LinearOperator
from hodiff.operators.linearized.curvature import CurvatureOperator

if TYPE_CHECKING:
    from matplotlib.axes import Axes


LONGEST = 24  # characters of a name on an axis
LISTED = 45  # characters of the names of a point in a title


def shortened(names: Sequence[str], longest: int = LONGEST) -> list[str]:
    """Shorten names by an ellipsis in the middle, so that different names stay different."""
    different = len(set(names))
    for length in range(longest, max(map(len, names), default=0)):
        # Names mostly differ at the end, by the parameter of a layer, but the number of the layer comes before.
        for head in sorted(range(length), key=lambda head: abs(head - length // 3)):
            cut = [_cut(name, head, length) for name in names]
            if len(set(cut)) == different:
                return cut
    return list(names)


def _cut(name: str, head: int, length: int) -> str:
    return (
        name
        if len(name) <= length
        else f"{name[:head].rstrip('._')}…{name[len(name) - (length - 1 - head) :].lstrip('._')}"
    )


def described(of: LinearOperator | str) -> str:
    """Describe an operator for a title: its kind, its functions, its size, and the parameters of its point."""
    if not isinstance(of, LinearOperator):
        return of
    m, n = of.shape
    size = f"{m:,} × {n:,}"
    if not isinstance(of, CurvatureOperator):
        return f"{type(of).__name__}, {size}"
    functions = ", ".join(name_of(getattr(of, each)) for each in of.functions)
    return f"{type(of).__name__} of {functions}, {size}\nat {_listed(of.domain.labels)}"


def titled(function: str, what: str, of: LinearOperator | str | None) -> str:
    """Return a title that names the operator of the eigenvalues, if it is known."""
    if of is not None and not isinstance(of, (LinearOperator, str)):
        raise InputError(f"{function}: of: expected an operator or a title, got {describe(of)}.")
    return what if of is None else f"{what} of {described(of)}"


def _listed(labels: Sequence[str]) -> str:
    """Return the first labels, and the number of further labels."""
    shown: list[str] = []
    for label in shortened(labels):
        if len(", ".join([*shown, label])) > LISTED:
            return f"{', '.join(shown)} and {len(labels) - len(shown):,} more"
        shown.append(label)
    return ", ".join(shown)


def require_package(module: str, function: str, remedy: str) -> Any:
    """Import an optional package, or raise an error with the way to install it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise HodiffError(f"{function}: needs {module.partition('.')[0]}, which is not installed; {remedy}.") from None


def axes_or_new(ax: Axes | None, function: str, size: tuple[float, float] | None = None) -> Axes:
    """Return the user's axes, or axes of a new figure of a size in inches."""
    if ax is not None:
        return ax
    pyplot = require_package("matplotlib.pyplot", function, 'pip install "hodiff[plot]"')
    return pyplot.subplots(figsize=size, layout="constrained")[1]


def one_number(function: str, y: Any) -> Tensor:
    """Return the result of a drawn function as a tensor of shape (); raise unless it is one real number."""
    if isinstance(y, Tensor) and y.numel() == 1 and y.is_floating_point():
        return y.reshape(()) if y.dim() else y
    got = f"shape {tuple(y.shape)} of {y.dtype}" if isinstance(y, Tensor) else type(y).__name__
    raise InputError(f"{function}: f: expected one real floating-point number in a tensor, got {got}.")
