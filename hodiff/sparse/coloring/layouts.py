"""Formats in which a sparse matrix is returned."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import scipy.sparse
import torch
from torch import Tensor

from hodiff.errors import InputError
from hodiff.sparse.coloring.compressed_patterns import Pattern
from hodiff.torch_internals.autograd.differentiation import is_observed
from hodiff.torch_internals.autograd.wrapped_tensors import is_batched_by_any, numbers_in


def _require_one(values: Tensor) -> None:
    if is_batched_by_any(values):
        raise InputError(
            "sparse: format: expected 'values' under torch.func.vmap, which knows no batches of sparse matrices, got "
            "another; make the matrices afterwards, by coloring.matrix(values)."
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
            "sparse: format: expected one of torch's, as the entries have derivatives of their own, which SciPy's "
            "matrices would lose, got 'scipy'; write format='csr', or call it under torch.no_grad()."
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
