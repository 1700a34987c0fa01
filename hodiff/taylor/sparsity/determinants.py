r"""Determinants of matrices whose rows move along few directions, such as particles in orbitals.

Coefficient 1 of $\log |\det A|$ is $\operatorname{tr} W$ and coefficient 2 is $\operatorname{tr}(A_0^{-1} A_2) -
\tfrac{1}{2} \sum_d \operatorname{tr} (W^{(d)} W^{(d)})$ with $W = A_1 A_0^{-1}$. Only pairs of rows with a
common direction contribute to the last sum.
"""

from __future__ import annotations

from typing import Any

import torch

from hodiff.taylor.jets import new_jet
from hodiff.taylor.sparsity.meetings import pairs_of
from hodiff.taylor.sparsity.reductions import summed
from hodiff.taylor.sparsity.slots import Call
from hodiff.taylor.sparsity.supports import Support, support


def slogdet(call: Call) -> Any:
    """Sign and logarithm of the absolute value of the determinant."""
    A: Any = call.jets[0]
    if not call.sparse or any(size != 1 for size in A.support.index.shape[1:-2]):
        return NotImplemented
    if A.support.index.shape[-1] != 1:
        if A.support.index.shape[-2] != 1:
            return NotImplemented
        return torch.linalg.slogdet(A.mT)
    A0, A1, A2 = A.in_slots()
    found = torch.linalg.slogdet(A0)
    inverse = torch.linalg.inv(A0)
    W = A1 @ inverse
    # The trace sums a jet of diagonal entries over the rows.
    diagonal = torch.diagonal(W, dim1=-2, dim2=-1)
    rows = new_jet(A.frame, [torch.zeros_like(diagonal[0]), diagonal, None], _of_rows(A.support))
    trace = summed(rows, (rows.value.ndim - 1,), keepdim=False)
    first = trace.in_slots()[1]
    second = None if A2 is None else (A2 * inverse.mT).sum((-2, -1))
    n = A0.shape[-1]
    pairs = pairs_of(A.support, n, A.support, n)
    assert pairs is not None
    by_row = W.movedim(-2, 1).flatten(0, 1)

    def entries(rows: torch.Tensor, columns: torch.Tensor) -> Any:
        picked = by_row.index_select(0, rows)
        index = columns.reshape(-1, *[1] * (picked.ndim - 1))
        return picked.gather(-1, index.expand(*picked.shape[:-1], 1)).squeeze(-1)

    left, right, _, left_row, right_row = pairs.tensors(A0.device)
    squares = (entries(left, right_row) * entries(right, left_row)).sum(0)
    second = -squares / 2 if second is None else second - squares / 2
    log = new_jet(A.frame, [found.logabsdet, first, second], trace.support)
    return type(found)([found.sign, log])


def _of_rows(given: Support) -> Support:
    return support(given.index.squeeze(-1), given.directions)
