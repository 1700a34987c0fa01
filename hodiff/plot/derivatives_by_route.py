"""Plot of an elementwise function's derivatives by every composition of reverse and forward passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from hodiff.common.options import require_bool, require_callable, require_int
from hodiff.corrections import corrected
from hodiff.errors import InputError
from hodiff.plot.derivatives import DOTS, prime, require_interval
from hodiff.plot.scalar_differences import (
    from_values,
    height_of,
    jumps,
    keep_rounding_small,
    mark_missing,
    settled,
    without_derivative,
)
from hodiff.plot.shared import require_package

if TYPE_CHECKING:
    from matplotlib.axes import Axes

AGREE_TO = 1e-3  # of the largest derivative: the accuracy of differences of third order
WORST = 4  # orders

Map = Callable[[Tensor], Tensor]


def routes(
    f: Map,
    low: float,
    high: float,
    *,
    order: int = 2,
    points: int = 200,
    correct: bool = True,
    axes: Sequence[Axes] | None = None,
) -> list[Axes]:
    r"""Draw an elementwise function and its derivatives, each by all compositions of reverse and forward passes.

    One panel per order shows $f^{(k)}$ by its $2^k$ routes, with one curve for routes that agree. Dots are differences
    of the values of f, which do not depend on its rules. The title says how many routes the differences confirm. Dotted
    lines mark points without a derivative: there differences confirm nothing.

    Args:
        f: Maps a float64 tensor to one of its shape, element by element: `torch.tanh`, or `Function.apply`.
        low: Left end of the interval.
        high: Right end of the interval.
        order: The highest order k, 0 to 4.
        points: Points of each curve, 2 or more.
        correct: Whether to differentiate within `hodiff.corrected()`, or by torch alone.
        axes: The matplotlib axes to draw in, one per order; axes of a new figure by default.

    Returns:
        The axes; `axes[0].figure` is the figure.

    Raises:
        InputError: If the interval or a count is out of range, or f is not elementwise.

    Example:
        >>> import matplotlib as mpl, torch
        >>> mpl.use("Agg")
        >>> [ax.get_title() for ax in routes(torch.tanh, -3, 3)]
        ['$f$', "$f'$: differences confirm all 2 routes", "$f''$: differences confirm all 4 routes"]
    """
    require_callable("routes", f=f)
    require_interval("routes", low, high)
    require_int("routes", "order", order, 0, WORST)
    require_int("routes", "points", points, 2)
    require_bool("routes", "correct", correct)
    grid = torch.linspace(low, high, points, dtype=torch.float64)
    _require_elementwise(f, grid)
    step = (high - low) / (2 * DOTS)
    dots = low + step * np.arange(1, 2 * DOTS, 2)
    truths, doubts = from_values(lambda x: _values(f, x), dots, order, step)
    jumping = jumps(lambda x: _values(f, x), grid.numpy())
    whole = np.isfinite(_values(f, dots)) & (np.abs(dots[:, None] - jumping) > step / 2).all(1)
    length = (high - low) / 2
    within = corrected() if correct else nullcontext()
    panels = _panels(axes, order)
    for k, ax in enumerate(panels):
        with within:
            # Routes are named by letters, the last pass first: "fr" is forward over reverse.
            found = {"".join(way): _derivative(f, way, grid, torch.from_numpy(dots)) for way in product("rf", repeat=k)}
        truth, doubt = truths[k], doubts[k]
        # Typical size of a derivative of a function of this height on this interval.
        typical = np.abs(truth[np.isfinite(truth)])
        scale = max(np.median(typical) if typical.size else 0.0, height_of(truths[0]) / length**k)
        known = settled(truth, doubt, scale) & whole
        tolerance = AGREE_TO * (np.abs(truth) + scale) + 2 * doubt
        confirmed = _draw(ax, grid.numpy(), dots, found, truth, known, tolerance)
        keep_rounding_small(ax, scale)
        missing = without_derivative(dots[~known], jumping, step)
        mark_missing(ax, missing)
        verdict = _verdict(confirmed, found, missing) if known.any() else ": differences know it nowhere"
        ax.set_title(f"{prime(k)}{verdict if k else ''}", fontsize="medium")
        ax.set_xlabel("$x$")
        ax.legend(fontsize="small")
    return panels


def _draw(
    ax: Axes,
    grid: np.ndarray,
    dots: np.ndarray,
    found: dict[str, Any],
    truth: np.ndarray,
    known: np.ndarray,
    tolerance: np.ndarray,
) -> list[str]:
    """Draw a curve for each group of routes that agree, and the differences; return the routes that they confirm."""
    groups: list[tuple[list[str], Any]] = []
    for name, each in found.items():
        if isinstance(each, Exception):
            continue
        names = next((names for names, other in groups if _agree(each[1], other[1], tolerance)), None)
        if names is None:
            groups.append(([name], each))
        else:
            names.append(name)
    confirmed = []
    for names, (curve, at_dots) in groups:
        right = _agree(at_dots[known], truth[known], tolerance[known])
        confirmed += names if right else []
        together = "all routes" if len(names) == len(found) > 1 else ", ".join(names)
        label = "value" if names == [""] else together if right else f"{together}: wrong"
        ax.plot(grid, curve, "-" if right else "--", label=label)
    ax.plot(dots[known], truth[known], ".", color="black", markersize=4, label="differences of values")
    return confirmed


def _agree(a: np.ndarray, b: np.ndarray, tolerance: np.ndarray) -> bool:
    # Infinities of one sign, and NaN in one of the arrays, do not count as differences.
    with np.errstate(invalid="ignore"):
        return bool((~(np.abs(a - b) > tolerance)).all())


def _derivative(f: Map, way: Sequence[str], *points: Tensor) -> Any:
    """Return a derivative at several sets of points, by passes from the last to the first; or the error it raises."""
    taken = f
    for each in reversed(way):
        taken = PASSES[each](taken)
    try:
        return tuple(taken(each).detach().clone().numpy() for each in points)
    except (RuntimeError, TypeError, ValueError, InputError) as error:
        return error


def _reverse(f: Map) -> Map:
    return torch.func.grad(lambda x: f(x).sum())


def _forward(f: Map) -> Map:
    return lambda x: torch.func.jvp(f, (x,), (torch.ones_like(x),))[1]


PASSES: dict[str, Callable[[Map], Map]] = {"r": _reverse, "f": _forward}


def _verdict(confirmed: list[str], found: dict[str, Any], missing: np.ndarray) -> str:
    if len(confirmed) == len(found):
        return (
            f": differences confirm all {len(found)} routes{chr(10) + 'away from dotted lines' if len(missing) else ''}"
        )
    raising = [name for name, each in found.items() if isinstance(each, Exception)]
    wrong = [name for name in found if name not in {*confirmed, *raising}]
    parts = [f"{what} by {', '.join(names)}" for what, names in (("wrong", wrong), ("raises", raising)) if names]
    return f": {'; '.join(parts)}"


def _values(f: Map, x: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return f(torch.from_numpy(x)).numpy()


def _panels(axes: Sequence[Axes] | None, order: int) -> list[Axes]:
    count = order + 1
    if axes is None:
        pyplot = require_package("matplotlib.pyplot", "routes", 'pip install "hodiff[plot]"')
        rows = 1 if count <= 3 else 2
        columns = -(-count // rows)
        _, grid = pyplot.subplots(
            rows, columns, figsize=(4.2 * columns, 3.2 * rows), layout="constrained", squeeze=False
        )
        for spare in grid.flat[count:]:
            spare.remove()
        return list(grid.flat[:count])
    if len(axes) != count:
        raise InputError(f"routes: axes: expected {count}, one for each order, got {len(axes)}.")
    return list(axes)


def _require_elementwise(f: Map, grid: Tensor) -> None:
    """Raise if f is not elementwise: at every second point alone, its values must be the same."""
    with torch.no_grad():
        whole, part = f(grid), f(grid[::2])
    fits = isinstance(whole, Tensor) and whole.shape == grid.shape and whole.is_floating_point()
    if not fits or not torch.allclose(whole[::2], part, equal_nan=True):
        raise InputError(
            "routes: f: expected an elementwise function of a floating-point tensor, got another function; "
            "hodiff.plot.derivatives plots functions of one number."
        )
