"""Matrix or diagonal of an operator, by products with all unit vectors.

Operators for SciPy's algorithms: vectors on the host, in the working dtype or in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NoReturn

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator as ScipyOperator
from torch import Tensor

from hodiff.common.chunks import spans
from hodiff.errors import InputError
from hodiff.estimators.results import precise
from hodiff.estimators.view import View
from hodiff.torch_internals.autograd.wrapped_tensors import numbers_in

Apply = Callable[[Tensor], Tensor]


def host_operator(view: View, matmat: Apply, dtype: torch.dtype, rmatmat: Apply | None = None) -> ScipyOperator:
    """Return a SciPy operator of `dtype` for products of the view's vectors."""

    def through(apply: Apply) -> Callable[[np.ndarray], np.ndarray]:
        def run(columns: np.ndarray) -> np.ndarray:
            block = torch.tensor(columns.reshape(len(columns), -1), dtype=view.dtype, device=view.device)
            return numbers_in(apply(block).to("cpu", dtype)).reshape(-1, *columns.shape[1:])

        return run

    back = None if rmatmat is None else through(rmatmat)
    forward = through(matmat)
    return ScipyOperator(
        view.shape, matvec=forward, matmat=forward, rmatvec=back, rmatmat=back, dtype=str(dtype).removeprefix("torch.")
    )


def columns(view: View) -> Iterator[tuple[int, int, Tensor]]:
    """Iterate over groups (start, stop, columns `start` to `stop`) of the matrix, with n products in all."""
    size = view.group_size(view.total, sum(view.shape) * view.dtype.itemsize)
    for start, stop in spans(view.total, size):
        yield start, stop, view.matmat(view.units(start, stop))


def diagonal_of(view: View) -> Tensor:
    """Compute the diagonal (n,) by n products."""
    if view.shards is None:
        return torch.cat([precise(block)[start:stop].diagonal() for start, stop, block in columns(view)])
    parts = [(view.units(start, stop) * precise(block)).sum(1) for start, stop, block in columns(view)]
    return torch.stack(parts).sum(0)


def matrix_of(view: View) -> Tensor:
    """Compute the matrix (m, n) by n products."""
    return torch.cat([view.whole(block) for _, _, block in columns(view)], 1)


def symmetric_matrix_of(view: View) -> Tensor:
    """Compute the matrix in float64 on the CPU by n products; symmetrize it, or raise if the gap exceeds rounding."""
    matrix = matrix_of(view).to("cpu", torch.float64)
    gap = (matrix - matrix.T).abs().max()
    size = matrix.abs().max()
    if gap > view.rounding**0.5 * size and not (view.finds_coarser() and gap <= view.rounding**0.5 * size):
        refuse_asymmetry(view)
    return (matrix + matrix.T) / 2


def refuse_asymmetry(view: View) -> NoReturn:
    """Raise for an operator whose products show that it is not symmetric."""
    raise InputError(
        f"{view.caller}: A: expected a symmetric operator, got one whose products differ from those of its transpose "
        "(or from each other: does it use dropout, or a new batch in each call?); pass A.T @ A or (A + A.T) / 2."
    )
