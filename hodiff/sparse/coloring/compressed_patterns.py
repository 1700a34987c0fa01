"""Sparsity patterns as compressed rows, from sparse or boolean matrices.

Formats in which a sparse matrix is returned.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import scipy.sparse
import torch
from torch import Tensor

from hodiff.common.trees import describe
from hodiff.errors import InputError
from hodiff.torch_internals.autograd.differentiation import is_observed
from hodiff.torch_internals.autograd.wrapped_tensors import is_batched_by_any, numbers_in

Array = np.ndarray[Any, np.dtype[Any]]

# The loops count entries in 32 bits, and the graph of both rows and columns has two copies of the entries.
_MOST = 2**30


@dataclass(frozen=True, eq=False)
class Pattern:
    """Compressed rows: the entries of a row begin at `starts[row]`, with increasing columns."""

    shape: tuple[int, int]
    starts: Array
    columns: Array

    @property
    def entries(self) -> int:
        """Number of entries."""
        return len(self.columns)

    @cached_property
    def rows(self) -> Array:
        """The row of each entry."""
        return np.repeat(np.arange(self.shape[0], dtype=np.int32), np.diff(self.starts))

    @cached_property
    def turned(self) -> Array:
        """Numbers of the entries in row order, sorted by columns."""
        numbers = np.arange(self.entries, dtype=np.int32)
        return scipy.sparse.csr_array((numbers, self.columns, self.starts), shape=self.shape).tocsc().data

    @cached_property
    def transposed(self) -> Pattern:
        """Compressed columns, as rows of the transpose."""
        starts = np.zeros(self.shape[1] + 1, np.int32)
        np.cumsum(np.bincount(self.columns, minlength=self.shape[1]), out=starts[1:])
        return Pattern(self.shape[::-1], starts, self.rows[self.turned])

    def some_of(self, chosen: Array) -> Pattern:
        """The pattern of some entries, of the same shape."""
        starts = np.zeros_like(self.starts)
        np.cumsum(np.bincount(self.rows[chosen], minlength=self.shape[0]), out=starts[1:])
        return Pattern(self.shape, starts, self.columns[chosen])

    @cached_property
    def is_symmetric(self) -> bool:
        """Whether each entry has its mirror image."""
        other = self.transposed
        return np.array_equal(self.starts, other.starts) and np.array_equal(self.columns, other.columns)


def pattern_of(caller: str, given: Any) -> Pattern:
    """Return the pattern of a sparse matrix of SciPy or torch, or of a dense boolean one of NumPy or torch."""
    if isinstance(given, Pattern):
        return given
    if not (scipy.sparse.issparse(given) or isinstance(given, (np.ndarray, torch.Tensor))):
        raise InputError(
            f"{caller}: pattern: expected a sparse matrix of SciPy or torch or a boolean array, got "
            f"{type(given).__name__}; scipy.sparse.csr_array or numpy.asarray(..., dtype=bool) makes one."
        )
    if given.ndim != 2:
        raise InputError(
            f"{caller}: pattern: expected a matrix with rows and columns, got the shape {tuple(given.shape)}; "
            f"reshape it to two dimensions."
        )
    if isinstance(given, np.ndarray):
        _require_boolean(caller, given.dtype == bool, f"{given.shape} {given.dtype}")
        matrix = scipy.sparse.csr_array(given)
    elif isinstance(given, torch.Tensor):
        matrix = _of_tensor(caller, given)
    else:
        matrix = _of_scipy(given)
    if matrix.nnz > _MOST:
        raise InputError(
            f"{caller}: pattern: expected at most {_MOST:,} entries, got {matrix.nnz:,}; color blocks of the matrix."
        )
    height, width = (int(each) for each in matrix.shape)
    starts, columns = matrix.indptr.astype(np.int32), matrix.indices.astype(np.int32)
    return Pattern((height, width), starts, columns)


def _of_scipy(given: Any) -> Any:
    if given.format == "dia":
        # Conversion from this format drops stored zeros.
        given = scipy.sparse.dia_array((np.ones(given.data.shape, bool), given.offsets), shape=given.shape)
    coordinates = given.tocoo() if given.format != "csr" else None
    if coordinates is None:
        matrix = scipy.sparse.csr_array((np.ones(len(given.indices), bool), given.indices, given.indptr), given.shape)
        if not matrix.has_canonical_format:
            matrix = matrix.copy()
            matrix.sum_duplicates()
        return matrix
    return _of_coordinates(coordinates.row, coordinates.col, given.shape)


def _of_tensor(caller: str, given: torch.Tensor) -> Any:
    given = given.detach()
    if given.layout is torch.strided:
        _require_boolean(caller, given.dtype == torch.bool, describe(given))
        return scipy.sparse.csr_array(given.cpu().numpy())
    if given.dense_dim():
        raise InputError(
            f"{caller}: pattern: expected a sparse tensor whose entries are numbers, got {describe(given)} with "
            f"{given.dense_dim()} dense dimensions; pass one of its matrices."
        )
    rows, columns = given.cpu().to_sparse_coo().coalesce().indices().numpy()
    return _of_coordinates(rows, columns, tuple(given.shape))


def _of_coordinates(rows: Array, columns: Array, shape: tuple[int, ...]) -> Any:
    """Convert coordinates to compressed rows, and merge duplicates."""
    matrix = scipy.sparse.coo_array((np.ones(len(rows), bool), (rows, columns)), shape=shape).tocsr()
    matrix.sum_duplicates()
    return matrix


def _require_boolean(caller: str, is_boolean: bool, got: str) -> None:
    if not is_boolean:
        raise InputError(
            f"{caller}: pattern: expected booleans in a dense matrix, got {got}; `pattern != 0` converts it."
        )


def require_symmetric(caller: str, method: str, pattern: Pattern) -> None:
    """Raise an error if an entry of the pattern has no mirror image."""
    if pattern.shape[0] != pattern.shape[1]:
        raise InputError(
            f"{caller}: pattern: expected a square matrix for method={method!r}, got the shape {pattern.shape}; "
            f'"columns", "rows" and "bidirectional" color the patterns of Jacobians.'
        )
    if not pattern.is_symmetric:
        matrix = scipy.sparse.csr_array((np.ones(pattern.entries), pattern.columns, pattern.starts), pattern.shape)
        rows, columns = (matrix - matrix.T).tocoo().coords
        changed = (matrix - matrix.T).tocoo().data > 0
        row, column = int(rows[changed][0]), int(columns[changed][0])
        raise InputError(
            f"{caller}: pattern: expected a symmetric one for method={method!r}, got ({row}, {column}) without "
            f'({column}, {row}); `pattern + pattern.T` is symmetric, and color(pattern, "columns") colors a Jacobian.'
        )


def _require_one(values: Tensor) -> None:
    if is_batched_by_any(values):
        raise InputError(
            "sparse: format: expected 'values' under torch.func.vmap, which does not support batches of sparse "
            "matrices, got another format; create the matrices afterwards, by coloring.matrix(values)."
        )


def _csr(pattern: Pattern, values: Tensor) -> Tensor:
    _require_one(values)
    starts, columns = (torch.as_tensor(each, device=values.device) for each in (pattern.starts, pattern.columns))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta state")
        return torch.sparse_csr_tensor(
            starts, columns, values, pattern.shape, device=values.device, check_invariants=False
        )


def _coo(pattern: Pattern, values: Tensor) -> Tensor:
    _require_one(values)
    rows, columns = (torch.as_tensor(each, device=values.device).long() for each in (pattern.rows, pattern.columns))
    indices = torch.stack([rows, columns])
    # Entries in the order of compressed rows have no duplicates.
    return torch.sparse_coo_tensor(
        indices, values, pattern.shape, device=values.device, check_invariants=False, is_coalesced=True
    )


def _scipy(pattern: Pattern, values: Tensor) -> scipy.sparse.csr_array:
    if values.requires_grad or is_observed(values):
        raise InputError(
            "sparse: format: expected a format of torch, because the entries are differentiable and SciPy's matrices "
            "are not, got 'scipy'; pass format='csr', or call the function under torch.no_grad()."
        )
    # SciPy does not support 16-bit floats.
    numbers = numbers_in(values.float() if values.dtype.itemsize < 4 else values)
    return scipy.sparse.csr_array((numbers, pattern.columns, pattern.starts), shape=pattern.shape)


def _values(pattern: Pattern, values: Tensor) -> Tensor:
    del pattern
    return values


FORMATS: dict[str, Callable[[Pattern, Tensor], Any]] = {
    "csr": _csr,
    "coo": _coo,
    "scipy": _scipy,
    "values": _values,
}
