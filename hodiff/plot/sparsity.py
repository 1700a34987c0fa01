"""Plot of the entries of a sparse matrix, with the colours of a coloring."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import numpy as np

from hodiff.common.options import require_int
from hodiff.common.trees import describe
from hodiff.errors import InputError
from hodiff.plot.shared import axes_or_new
from hodiff.sparse import Coloring
from hodiff.sparse.coloring.compressed_patterns import Pattern, pattern_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# With more rows or columns than this, entries are smaller than a screen shows.
CELLS = 500
# A palette of distinct colours, which repeat for colorings with more colors.
WHEEL = "tab20"
SIDE, BAR, SMALLEST = 4.8, 1.3, 1.2  # inches of the longer side, of a bar beside it, and of the shorter side


def sparsity(
    A: Any,
    ax: Axes | None = None,
    *,
    cells: int = CELLS,
) -> Axes:
    r"""Draw the entries of a sparse matrix; with a coloring, in the colours of their columns or rows.

    Columns of one colour are summed in one product. With a "bidirectional" coloring, entries have the colour of their
    column if it is in a product, else that of their row. A matrix with more rows or columns than `cells` is shown
    by the density of its entries, $\text{entries} / \text{places}$ in each cell of a grid.

    Args:
        A: A coloring of `hodiff.sparse.color`; a pattern or matrix of SciPy or a sparse tensor, whose stored entries
            count; or a dense boolean array or tensor.
        ax: The matplotlib axes to draw in; new ones by default.
        cells: Largest number of rows and columns of which single entries are drawn, and of cells along a side.

    Returns:
        The axes.

    Raises:
        InputError: If A is none of these, has no rows or columns, or `cells` is no positive int.

    Example:
        >>> import matplotlib as mpl, hodiff, torch
        >>> mpl.use("Agg")
        >>> f = lambda x: (x[1:] - x[:-1] ** 2).square().sum()
        >>> pattern = hodiff.sparse.hessian_pattern(f, torch.ones(12))
        >>> ax = sparsity(hodiff.sparse.color(pattern))
        >>> print(ax.get_title())
        12 × 12, 34 entries, 3 colors

    Source: A. Gebremedhin, F. Manne & A. Pothen, "What color is your Jacobian?", SIAM Review 47, 2005, figure 2.1, for
    entries in colours.
    """
    require_int("sparsity", "cells", cells, 1)
    coloring = A if isinstance(A, Coloring) else None
    pattern = _pattern(A)
    height, width = pattern.shape
    title = f"{height:,} × {width:,}, {_counted(pattern.entries, 'entry', 'entries')}"
    longest = max(height, width)
    is_binned = longest > cells
    inches = [max(SIDE * each / longest, SMALLEST) for each in (width, height)]
    ax = axes_or_new(ax, "sparsity", (inches[0] + BAR * is_binned + 0.8, inches[1] + 1.0))
    if is_binned:
        _draw_densities(ax, pattern, cells)
    else:
        _draw_entries(ax, pattern, coloring)
    if coloring is not None:
        title += f", {_counted(coloring.num_colors, 'color', 'colors')}"
    ax.set_title(title, fontsize="medium")
    ax.set_xlabel("column j")
    ax.set_ylabel("row i")
    return ax


def _pattern(A: Any) -> Pattern:
    if isinstance(A, Coloring):
        pattern = A.pattern
    else:
        try:
            pattern = pattern_of("sparsity", A)
        except InputError as error:
            raise InputError(str(error).replace("sparsity: pattern:", "sparsity: A:", 1)) from None
    if not all(pattern.shape):
        raise InputError(f"sparsity: A: expected a matrix with rows and columns, got {describe(A)} {pattern.shape}.")
    return pattern


def _draw_entries(ax: Axes, pattern: Pattern, coloring: Coloring | None) -> None:
    colours = importlib.import_module("matplotlib.colors")
    maps = importlib.import_module("matplotlib").colormaps
    if coloring is None:
        numbers, palette = np.zeros(pattern.entries, int), ["black"]
    else:
        numbers, palette = _colors_of_entries(coloring), maps[WHEEL].colors
    image = np.ma.masked_all(pattern.shape, int)
    image[pattern.rows, pattern.columns] = numbers % len(palette)
    ax.imshow(image, cmap=colours.ListedColormap(palette), vmin=-0.5, vmax=len(palette) - 0.5, interpolation="nearest")


def _colors_of_entries(coloring: Coloring) -> np.ndarray:
    """Return the color of each entry's column; if it has none, that of its row, numbered after the columns' colors."""
    pattern = coloring.pattern
    columns, rows = coloring.column_colors, coloring.row_colors
    by_rows = np.full(pattern.entries, -1) if rows is None else rows[pattern.rows] + coloring.count("columns")
    by_columns = np.full(pattern.entries, -1) if columns is None else columns[pattern.columns]
    return np.where(by_columns >= 0, by_columns, by_rows)


def _draw_densities(ax: Axes, pattern: Pattern, cells: int) -> None:
    """Draw a pixel for each cell of a grid, coloured by its density."""
    height, width = pattern.shape
    edges = [np.linspace(0, each, min(each, cells) + 1).round() for each in (height, width)]
    counts, _, _ = np.histogram2d(pattern.rows, pattern.columns, bins=edges)
    densities = counts / np.outer(*map(np.diff, edges))
    image = ax.imshow(
        np.ma.masked_equal(densities, 0),
        cmap="viridis_r",
        norm=_norm(densities),
        extent=(-0.5, width - 0.5, height - 0.5, -0.5),
        interpolation="nearest",
    )
    ax.figure.colorbar(image, ax=ax, label="entries by places of a cell")


def _norm(densities: np.ndarray) -> Any:
    """Return a logarithmic norm of colours, so that low densities are visible."""
    colours = importlib.import_module("matplotlib.colors")
    found = densities[densities > 0]
    low, high = (found.min(), found.max()) if len(found) else (1.0, 1.0)
    return colours.LogNorm(low, high) if low < high else colours.Normalize(0, high)


def _counted(count: int, one: str, many: str) -> str:
    return f"{count:,} {one if count == 1 else many}"
