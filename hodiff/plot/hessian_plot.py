"""Plot of a Hessian, with the parameters of its rows."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from scipy.optimize import isotonic_regression
from torch import Tensor
from torch.utils import _pytree as pytree

from hodiff.common.options import require_choice
from hodiff.common.trees import PyTree, describe, leaf_label, leaf_names
from hodiff.errors import InputError
from hodiff.operators.linear.linear_operator import LinearOperator
from hodiff.plot.shared import axes_or_new, described, shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def spread(wanted: Sequence[float], gaps: Sequence[float], within: tuple[float, float] | None = None) -> list[float]:
    r"""Solve $\min_x \sum_i (x_i - w_i)^2$ under $x_{i+1} - x_i \ge g_i$ and, if they have room, between two ends."""
    offsets = np.concatenate([[0.0], np.cumsum(gaps)])
    if within is not None:
        room = within[1] - within[0]
        offsets *= room / max(offsets[-1], room) if room else 0.0
    # Without the gaps it is a monotone fit; with bounds, the clipped fit solves it.
    fitted = isotonic_regression(np.asarray(wanted, dtype=float) - offsets).x
    if within is not None:
        fitted = fitted.clip(within[0], within[1] - offsets[-1])
    return [float(each) for each in fitted + offsets]


MOST = 20_000  # rows: a picture has not more points, and the matrix takes 3 GB
LINE, LETTER = 0.17, 0.08  # inches: the height of a name, and the width of its letters
SHORTEST, LONGEST = 4.8, 16.0  # inches of the matrix
LEAD = 0.03  # of the matrix: the length of the lines that lead to names


def hessian(
    A: LinearOperator | Tensor,
    parameters: PyTree | Sequence[str] | None = None,
    ax: Axes | None = None,
    *,
    scale: str = "linear",
) -> Axes:
    r"""Draw a Hessian, zero in white, positive entries in red and negative entries in blue.

    Any operator that maps a space to itself is drawn likewise, by its `to_dense`. Rows and columns are labelled by its
    parameters, whose names `A.block` takes, too; long names have an ellipsis in the middle.

    Args:
        A: An operator, or a matrix (n, n) such as that of `hodiff.hessian_matrix`.
        parameters: Parameters of the rows: the pytree that was differentiated, whose leaves are named and separated by
            lines, or n names. An operator knows its parameters.
        ax: The matplotlib axes to draw in; new ones by default, large enough for the names.
        scale: "linear", or "root": colours follow $\sqrt{|a_{ij}|}$, so that a few large entries do not leave the rest
            white. The colour bar shows the entries in both cases.

    Returns:
        The axes.

    Raises:
        InputError: If the matrix is not square and finite or larger than 20,000 rows, the parameters do not have n
            numbers, or the scale is unknown.

    Example:
        >>> import matplotlib as mpl, hodiff, torch
        >>> mpl.use("Agg")
        >>> def loss(x):
        ...     return (x["weight"] ** 2).sum() * x["bias"]
        >>> ax = hessian(hodiff.HessianOperator(loss, {"weight": torch.ones(2), "bias": torch.tensor(1.0)}))
        >>> [text.get_text() for text in ax.get_xticklabels()]
        ['weight', 'bias']
        >>> print(ax.get_title())
        HessianOperator of loss, 3 × 3
        at weight, bias
    """
    require_choice("hessian", "scale", scale, ("linear", "root"))
    values = _entries(A).detach()
    if values.is_complex():
        raise InputError("hessian: A: expected real numbers, got complex ones; plot A.real, A.imag or A.abs().")
    values = values.to("cpu", torch.float64)
    if not bool(torch.isfinite(values).all()):
        raise InputError("hessian: A: expected finite numbers, got inf or nan among them.")
    n = len(values)
    if parameters is None and isinstance(A, LinearOperator) and A.domain.names != ("",):
        names, sizes = A.domain.labels, list(A.domain.sizes)
    else:
        names, sizes = _blocks(parameters, n) if parameters is not None else ([], [])
    shown = shortened(names)
    side = min(max(LINE * len(names), SHORTEST), LONGEST)
    margin = LETTER * max(map(len, shown), default=0)
    inches = side if ax is None else _side(ax)
    ax = axes_or_new(ax, "hessian", (side + margin + 1.9, side + margin + 1.2))
    limit = values.abs().max().item() or 1.0
    colours = importlib.import_module("matplotlib.colors")
    norm = colours.Normalize(-limit, limit)
    if scale == "root":
        norm = colours.FuncNorm((_signed_root, _signed_square), -limit, limit)
    image = ax.imshow(values.numpy(), cmap="bwr", norm=norm, interpolation="nearest")
    bar = ax.figure.colorbar(image, ax=ax, label="entry in row i, column j")
    if scale == "root":
        ticks = [-limit, -limit / 4, 0.0, limit / 4, limit]
        bar.set_ticks(ticks, labels=[f"{tick:.2g}" for tick in ticks])
    ax.set_title(described(A) if isinstance(A, LinearOperator) else f"matrix, {n:,} × {n:,}", fontsize="medium")
    ax.set_xlabel("column j")
    ax.set_ylabel("row i")
    if names:
        _name_blocks(ax, shown, sizes, inches)
    return ax


def _entries(A: Any) -> Tensor:
    """Return the matrix, which must be square."""
    if not isinstance(A, (LinearOperator, Tensor)):
        raise InputError(f"hessian: A: expected an operator or a tensor (n, n), got {describe(A)}.")
    if len(A.shape) != 2 or A.shape[0] != A.shape[1] or not A.shape[0]:
        got = str(A) if isinstance(A, LinearOperator) else describe(A)
        raise InputError(f"hessian: A: expected an operator or a tensor (n, n), got {got}.")
    if A.shape[0] > MOST:
        raise InputError(f"hessian: A: expected at most {MOST:,} rows, got {A.shape[0]:,}; plot A.block(names).")
    return A.to_dense() if isinstance(A, LinearOperator) else A


def _side(ax: Axes) -> float:
    """Return the approximate size of the matrix in the user's axes, in inches."""
    box = ax.get_window_extent()
    return float(min(box.width, box.height) / ax.figure.dpi)


def _name_blocks(ax: Axes, names: list[str], sizes: list[int], inches: float) -> None:
    """Label blocks at their middle, with labels moved apart where they overlap, and draw lines between blocks."""
    n = sum(sizes)
    edges = torch.tensor([0, *sizes]).cumsum(0).tolist()
    centres = [(low + high - 1) / 2 for low, high in pairwise(edges)]
    line = min(LINE, inches / len(names))
    places = spread(centres, [n * line / inches] * (len(names) - 1), (0.0, n - 1.0))
    ax.set_xticks(places, names, rotation=90, parse_math=False)
    ax.set_yticks(places, names, parse_math=False)
    ax.tick_params(axis="both", length=0, labelsize=min(9.0, 72 * line * 0.8))
    if any(abs(place - centre) > 0.5 for place, centre in zip(places, centres, strict=True)):
        ax.tick_params(axis="both", pad=72 * LEAD * inches)
        _lead(ax, centres, places, n)
    if len(names) < n:
        for edge in edges[1:-1]:
            ax.axhline(edge - 0.5, color="black", linewidth=0.5)
            ax.axvline(edge - 0.5, color="black", linewidth=0.5)


def _lead(ax: Axes, centres: list[float], places: list[float], n: int) -> None:
    """Draw lines in the margin, from the matrix to labels that are not beside their blocks."""
    lines = importlib.import_module("matplotlib.collections").LineCollection
    left, bottom, pairs = -0.5, n - 0.5, list(zip(centres, places, strict=True))
    beside = [[(left, centre), (left - LEAD * n, place)] for centre, place in pairs]
    below = [[(centre, bottom), (place, bottom + LEAD * n)] for centre, place in pairs]
    ax.add_collection(lines(beside + below, colors="gray", linewidths=0.5, clip_on=False), autolim=False)


def _blocks(parameters: Any, n: int) -> tuple[list[str], list[int]]:
    leaves = pytree.tree_leaves(parameters)
    if leaves and all(isinstance(leaf, str) for leaf in leaves):
        names, sizes = list(leaves), [1] * len(leaves)
    elif leaves and all(isinstance(leaf, Tensor) for leaf in leaves):
        names = [leaf_label(name) for name in leaf_names(parameters)]
        sizes = [leaf.numel() for leaf in leaves]
    else:
        raise InputError(
            f"hessian: parameters: expected a pytree of tensors or a list of names, got {describe(parameters)}."
        )
    if sum(sizes) != n:
        raise InputError(
            f"hessian: parameters: expected {n} rows in all, got {sum(sizes)}; pass the parameters that "
            "f was called with."
        )
    return names, sizes


def _signed_root(values: np.ndarray) -> np.ndarray:
    return np.sign(values) * np.sqrt(np.abs(values))


def _signed_square(values: np.ndarray) -> np.ndarray:
    return values * np.abs(values)
