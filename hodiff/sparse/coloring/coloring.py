"""Colorings of columns, of rows or of both, and recovery of entries from products."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hodiff.common.options import require_choice
from hodiff.errors import InputError
from hodiff.sparse.coloring.compressed_patterns import FORMATS, Array, Pattern
from hodiff.sparse.coloring.entries import Entries, Gather, by_both, by_columns, by_rows, by_stars, reader
from hodiff.sparse.coloring.substitution import Substitution, by_trees
from hodiff.torch_internals.tensors import in_trace

# Products of each method: with the matrix, of sums of its columns, or with its transpose, of sums of its rows.
SIDES: dict[str, tuple[str, ...]] = {
    "star": ("columns",),
    "acyclic": ("columns",),
    "columns": ("columns",),
    "rows": ("rows",),
    "bidirectional": ("columns", "rows"),
}
_FORMAT = 1


@dataclass(frozen=True, eq=False, repr=False)
class Coloring:
    r"""Coloring of a sparse matrix: one product for each color gives all of its entries.

    One product adds up the columns of a color, $B = A S$ with $S_{jc} = 1$ where column j has the color c; for rows,
    $A^\top S$ does. `hodiff.sparse.color` makes colorings.

    Attributes:
        method: The method's name.
        order: Origin of the colors: the name of an order; "cyclic", for colors 0, 1, ... repeated along a band; or
            "distance-2", for a star coloring by columns that share no row.
        pattern: The entries, compressed rows with increasing columns.
        column_colors: The color of each column, -1 for a column that is in no product; None where no columns are added.
        row_colors: The color of each row, with -1 and None in the same sense.

    Example:
        >>> import numpy as np
        >>> from hodiff.sparse.coloring import color
        >>> A = np.array([[4.0, 1.0, 0.0], [1.0, 5.0, 2.0], [0.0, 2.0, 6.0]])
        >>> coloring = color(A != 0)
        >>> coloring
        Coloring('star', 3 x 3, 7 entries, 2 colors)
        >>> coloring.decompress(A @ coloring.seeds())
        array([4., 1., 1., 5., 2., 2., 6.])
    """

    method: str
    order: str
    pattern: Pattern
    column_colors: Array | None = None
    row_colors: Array | None = None

    def __repr__(self) -> str:
        height, width = self.shape
        if self.method == "bidirectional":
            numbers = f"{self.count('columns'):,} + {self.count('rows'):,}"
        else:
            numbers = f"{self.num_colors:,}"
        return f"Coloring({self.method!r}, {height:,} x {width:,}, {self.nnz:,} entries, {numbers} colors)"

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the matrix."""
        return self.pattern.shape

    @property
    def nnz(self) -> int:
        """Number of entries in the pattern."""
        return self.pattern.entries

    @property
    def sides(self) -> tuple[str, ...]:
        """Sides that are added up: "columns", "rows" or both."""
        return SIDES[self.method]

    @property
    def colors(self) -> Array:
        """Colors of the coloring's only side."""
        return self._colors(self._side("Coloring.colors", None))

    @cached_property
    def num_colors(self) -> int:
        """Number of products that are needed."""
        return sum(self.count(side) for side in self.sides)

    def count(self, side: str) -> int:
        """Number of colors, and so of products, of a side: "columns" or "rows"."""
        return int(self._colors(side).max(initial=-1)) + 1 if side in self.sides else 0

    def seeds(self, dtype: Any = np.float64, *, colors: slice | None = None, side: str | None = None) -> Array:
        """Vectors to multiply by: ones where a column, or row, has the color.

        Args:
            dtype: Dtype of the vectors.
            colors: Slice of the colors, so that products can be computed in groups; all colors if None.
            side: "columns", for products with the matrix, or "rows", for products with its transpose; None for the only
                side of the coloring.

        Returns:
            A vector for each color as the columns of an array: (columns, colors) or (rows, colors).

        Raises:
            InputError: If the coloring has no such side, or `side` is missing where there are two.
        """
        side = self._side("Coloring.seeds", side)
        if not (colors is None or isinstance(colors, slice)):
            raise InputError(f"Coloring.seeds: colors: expected a slice or None, got {colors!r}; write slice(0, 8).")
        given = self._colors(side)
        chosen = np.arange(self.count(side))[colors or slice(None)]
        places = np.full(self.count(side) + 1, -1)
        places[chosen] = np.arange(len(chosen))
        place = places[given]
        seeds = np.zeros((len(given), len(chosen)), dtype)
        rows = np.flatnonzero(place >= 0)
        seeds[rows, place[rows]] = 1
        return seeds

    @cached_property
    def plan(self) -> tuple[Gather, ...] | Substitution:
        """Plan of the recovery: gathers, or a substitution for "acyclic"; integer arrays."""
        return _PLANS[self.method](self)

    def decompress(self, products: Any) -> Array:
        r"""Recover the matrix's entries from the products with the seeds.

        Args:
            products: $A S$ as an array (rows, colors); for "rows" $A^\top S$, (columns, colors); for "bidirectional"
                the pair of both.

        Returns:
            The values of the entries, (nnz,), by rows and within a row by columns.

        Raises:
            InputError: If the products have other shapes.
        """
        blocks = self._blocks(products)
        if isinstance(self.plan, Substitution):
            return self.plan.read(blocks["columns"])
        values = np.empty(self.nnz, np.result_type(*blocks.values()))
        for gather in self.plan:
            values[gather.entries] = gather.read(blocks[gather.side])
        return values

    def vectors(self, side: str, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Seeds of a side as the rows of a tensor, (colors, columns or rows); the tensor is cached."""
        key = side, dtype, device
        cache = {} if in_trace() else self._vectors  # other calls cannot use the tensors of a trace
        if key not in cache:
            ones = torch.as_tensor(self.seeds(bool, side=side), device=device)
            cache[key] = ones.mT.to(dtype).contiguous()
        return cache[key]

    def entries(self, products: Mapping[str, Tensor]) -> Tensor:
        """Recover the entries as `decompress` does, by torch's operators: differentiable, and under vmap.

        Args:
            products: By side, the products with the rows of `vectors`, again as rows: (colors, rows) of $A S$ for
                "columns", (colors, columns) of $A^T S$ for "rows".

        Returns:
            The values of the entries, (nnz,), by rows and within a row by columns.
        """
        device = next(iter(products.values())).device
        cache = {} if in_trace() else self._readers
        if device not in cache:
            cache[device] = reader(self.plan, self.shape, device)
        return cache[device](products)

    def matrix(self, values: Tensor, format: str = "csr") -> Any:
        """Build the matrix from the values of its entries.

        Args:
            values: The values of the entries, as `entries` gives them.
            format: "csr" or "coo", a sparse tensor; "scipy", a `csr_array`; or "values", the values themselves.

        Returns:
            The matrix.

        Raises:
            InputError: If the format is unknown, or SciPy's would lose derivatives of the values.
        """
        require_choice("Coloring.matrix", "format", format, FORMATS)
        return FORMATS[format](self.pattern, values)

    @cached_property
    def _vectors(self) -> dict[Any, Tensor]:
        return {}

    @cached_property
    def _readers(self) -> dict[torch.device, Entries]:
        return {}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the coloring to a NumPy file, for `load`.

        Args:
            path: Path of the file; the name should end in ".npz".
        """
        sides = {"column_colors": self.column_colors, "row_colors": self.row_colors}
        held: dict[str, Any] = {name: each for name, each in sides.items() if each is not None}
        with open(path, "wb") as file:
            np.savez_compressed(
                file,
                format=np.array(_FORMAT),
                method=np.array(self.method),
                order=np.array(self.order),
                shape=np.array(self.shape),
                starts=self.pattern.starts,
                columns=self.pattern.columns,
                **held,
            )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Coloring:
        """Read a coloring from a file that `save` wrote.

        Args:
            path: The file.

        Returns:
            The coloring.

        Raises:
            InputError: If the file holds something else.
            FileNotFoundError: If the file does not exist.
        """
        try:
            with np.load(path, allow_pickle=False) as file:
                found = dict(file)
            return _restored(found)
        except FileNotFoundError:
            raise
        except (KeyError, ValueError, TypeError, AttributeError, EOFError, OSError) as error:
            raise InputError(
                f"Coloring.load: path: expected a file that Coloring.save wrote, got {os.fspath(path)!r} ({error}); "
                "color the pattern again."
            ) from error

    def _colors(self, side: str) -> Array:
        found = self.column_colors if side == "columns" else self.row_colors
        assert found is not None
        return found

    def _side(self, caller: str, side: str | None) -> str:
        if side is None and len(self.sides) == 1:
            return self.sides[0]
        if side is None:
            raise InputError(
                f'{caller}: expected one side, got "bidirectional", which has two; '
                f'use column_colors and row_colors, or pass side="columns" or side="rows".'
            )
        require_choice(caller, "side", side, self.sides)
        return side

    def _blocks(self, products: Any) -> dict[str, Array]:
        pair = products if len(self.sides) == 2 else (products,)
        if not isinstance(pair, Sequence) or len(pair) != len(self.sides):
            raise InputError(
                "Coloring.decompress: products: expected the pair of products with the matrix and with its transpose, "
                f"got {type(products).__name__}; write (A @ seeds, A.T @ other_seeds)."
            )
        blocks = {side: np.asarray(each) for side, each in zip(self.sides, pair, strict=True)}
        heights: Mapping[str, int] = {"columns": self.shape[0], "rows": self.shape[1]}
        for side, each in blocks.items():
            expected = (heights[side], self.count(side))
            if each.shape != expected:
                raise InputError(
                    f"Coloring.decompress: products: expected {expected} for the sums of {side}, got "
                    f"{each.shape}; multiply with seeds(side={side!r})."
                )
        return blocks


_PLANS: dict[str, Any] = {
    "star": lambda it: (by_stars(it.pattern, it.column_colors),),
    "acyclic": lambda it: by_trees(it.pattern, it.column_colors),
    "columns": lambda it: (by_columns(it.pattern, it.column_colors),),
    "rows": lambda it: (by_rows(it.pattern, it.row_colors),),
    "bidirectional": lambda it: by_both(it.pattern, it.row_colors, it.column_colors),
}


def _restored(found: Mapping[str, Array]) -> Coloring:
    """Build the coloring from a file's arrays; raise an error if they are inconsistent."""
    if int(found["format"]) != _FORMAT:
        raise ValueError(f"format {found['format']}, not {_FORMAT}")
    height, width = (int(each) for each in found["shape"])
    pattern = Pattern((height, width), found["starts"].astype(np.int32), found["columns"].astype(np.int32))
    coloring = Coloring(
        str(found["method"]), str(found["order"]), pattern, found.get("column_colors"), found.get("row_colors")
    )
    steps = np.diff(pattern.starts)
    sizes = {"columns": width, "rows": height}
    given = {side: found[f"{side[:-1]}_colors"] for side in coloring.sides}
    sound = (
        len(pattern.starts) == height + 1
        and pattern.starts[0] == 0
        and pattern.starts[-1] == pattern.entries
        and bool((steps >= 0).all())
        and bool(((pattern.columns >= 0) & (pattern.columns < width)).all())
        and all(given[side].shape == (sizes[side],) for side in coloring.sides)
        and all(int(given[side].min(initial=0)) >= -1 for side in coloring.sides)
    )
    if not sound:
        raise ValueError("its arrays do not match")
    return coloring


# A node without leaves lets a coloring pass through transforms and compiled code among a function's arguments.
pytree.register_pytree_node(
    Coloring,
    lambda coloring: ([], coloring),
    lambda _, coloring: coloring,
    serialized_type_name="hodiff.sparse.Coloring",
)
