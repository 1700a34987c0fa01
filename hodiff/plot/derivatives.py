"""Plot of a function of one number with its derivatives and SciPy's finite differences."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from scipy.differentiate import derivative
from torch import Tensor

from hodiff.common.options import is_number, name_of, require_callable, require_int
from hodiff.errors import InputError
from hodiff.plot.scalar_differences import (
    UNSETTLED,
    height_of,
    jumps,
    keep_rounding_small,
    mark_missing,
    span_of,
    without_derivative,
)
from hodiff.plot.shared import axes_or_new, one_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DOTS = 25  # SciPy's points along the axis


def derivatives(
    f: Callable[[Tensor], Tensor],
    low: float,
    high: float,
    *,
    order: int = 2,
    points: int = 400,
    ax: Axes | None = None,
) -> Axes:
    r"""Draw a function of one number and its derivatives, with finite differences as dots.

    The curves are $f, f', \dots, f^{(k)}$ by nested reverse mode. The dots over $f^{(j)}$ are SciPy's differences of
    $f^{(j-1)}$, the curve before, which was checked itself. Dots beside their curve mean that the derivative is wrong.
    A dotted line replaces a dot where differences do not settle, such as at a kink, and marks each jump.

    Args:
        f: Maps a float64 tensor of shape () to a tensor with one element.
        low: Left end of the interval.
        high: Right end of the interval.
        order: The highest order k, 0 or more.
        points: Points of each curve, 2 or more.
        ax: The matplotlib axes to draw in; new ones by default.

    Returns:
        The axes; `ax.figure` is the figure.

    Raises:
        InputError: If the interval or a count is out of range, or f does not return one number.

    Example:
        >>> import matplotlib as mpl, torch
        >>> mpl.use("Agg")
        >>> ax = derivatives(torch.tanh, -3, 3)
        >>> [text.get_text() for text in ax.get_legend().get_texts()]
        ['$f$', "$f'$", "$f''$", 'differences by SciPy']

    Source: `scipy.differentiate.derivative`, eighth-order central differences with shrinking steps.
    """
    require_callable("derivatives", f=f)
    require_interval("derivatives", low, high)
    require_int("derivatives", "order", order, 0)
    require_int("derivatives", "points", points, 2)
    grid = torch.linspace(low, high, points, dtype=torch.float64)
    curves = _tower(f, grid, order)
    step = (high - low) / (2 * DOTS)
    dots = low + step * np.arange(1, 2 * DOTS, 2)

    ax = axes_or_new(ax, "derivatives")
    span, missing = span_of([curve.numpy() for curve in curves]), list[float]()
    jumping = [jumps(_curve(f, k), grid.numpy()) for k in range(order)]
    for k, curve in enumerate(curves):
        (line,) = ax.plot(grid.numpy(), curve.numpy(), label=prime(k))
        if k > 0:
            slopes, doubt = _differences(f, k, dots, step)
            known = ~(doubt > UNSETTLED * span)
            ax.plot(dots[known], slopes[known], ".", color=line.get_color(), label="_differences")
            missing += dots[~known].tolist()
    mark_missing(ax, without_derivative(np.array(missing), np.concatenate([*jumping, np.empty(0)]), step))
    keep_rounding_small(ax, height_of(curves[0].numpy()))
    _add_legend(ax, with_dots=order > 0)
    ax.set_xlabel("$x$")
    ax.set_ylabel("value")
    ax.set_title(f"{name_of(f)} and its derivatives" if order else name_of(f), fontsize="medium")
    return ax


def _tower(f: Callable[[Tensor], Tensor], points: Tensor, order: int) -> list[Tensor]:
    """Compute f at each point by itself, and its derivatives, so that f needs nothing but double backward."""
    x = points.detach().requires_grad_()
    with torch.enable_grad():
        rows = [torch.stack([one_number("derivatives", f(each)) for each in x.unbind()])]
        for _ in range(order):
            rows.append(_slope(rows[-1], x))
    return [row.detach().double() for row in rows]


def _slope(y: Tensor, x: Tensor) -> Tensor:
    if not y.requires_grad:
        return torch.zeros_like(x)
    return torch.autograd.grad(y.sum(), x, create_graph=True, materialize_grads=True)[0]


def _curve(f: Callable[[Tensor], Tensor], order: int) -> Callable[[np.ndarray], np.ndarray]:
    def values(x: np.ndarray) -> np.ndarray:
        return _tower(f, torch.from_numpy(x.reshape(-1)), order)[-1].numpy().reshape(x.shape)

    return values


def _differences(
    f: Callable[[Tensor], Tensor], order: int, dots: np.ndarray, step: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return SciPy's derivative of the curve before, and its error, from points at most a step away."""
    with np.errstate(all="ignore"):  # at a pole the dot is missing, which is enough
        found = derivative(_curve(f, order - 1), dots, initial_step=step)
    return np.asarray(found.df), np.asarray(found.error)


def prime(order: int) -> str:
    """Return the name of a derivative."""
    return f"$f{chr(39) * order}$" if order < 4 else f"$f^{{({order})}}$"


def _add_legend(ax: Axes, *, with_dots: bool) -> None:
    handles = ax.get_legend_handles_labels()[0]
    if with_dots:
        lines = importlib.import_module("matplotlib.lines")
        handles.append(lines.Line2D([], [], color="gray", marker=".", linestyle="", label="differences by SciPy"))
    ax.legend(handles=handles)


def require_interval(caller: str, low: float, high: float) -> None:
    """Raise unless the ends of an interval are finite and in order."""
    if not all(is_number(end) and math.isfinite(end) for end in (low, high)) or not low < high:
        raise InputError(f"{caller}: low, high: expected finite numbers with low < high, got {low!r} and {high!r}.")
