r"""Products and determinants of matrices that both move, by the directions that their elements have in common.

Coefficient 1 of $\log |\det A|$ is $\operatorname{tr} W$ and coefficient 2 is $\operatorname{tr}(A_0^{-1} A_2) -
\tfrac{1}{2} \sum_d \operatorname{tr} (W^{(d)} W^{(d)})$ with $W = A_1 A_0^{-1}$. If rows move along few directions,
such as particles in orbitals, only pairs of rows with a common direction contribute to the last sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from hodiff.taylor.jets import Jet, new_jet
from hodiff.taylor.series import minus, plus, times
from hodiff.taylor.sparsity.factors import Factor, Total, kinds_of
from hodiff.taylor.sparsity.moving_directions import Indices, Support, kept, support
from hodiff.taylor.sparsity.quotients import Quotient
from hodiff.taylor.sparsity.reductions import summed, times_constant
from hodiff.taylor.sparsity.remembering import remembered
from hodiff.taylor.sparsity.slots import Call, moves


def met(a1: Any, a: Support | None, b1: Any, b: Support | None) -> Any:
    """Sum over directions of matrix products A_1 B_1, at least one factor in slots; None for zero."""
    if a is not None and b is not None:
        pairs = pairs_of(a, a1.shape[-2], turned(b), b1.shape[-1])
        if pairs is not None:
            return pairs.products(a1, b1) if pairs.any else None
    found = None
    if a is not None:
        found = _by_kinds(a1, a, b1, b)
    elif b is not None:
        found = _by_kinds(b1.mT, turned(b), a1.mT, None)
        found = None if found is None else found.mT
    if found is not None:
        return found
    whole_a = a1 if a is None else a.dense(a1)
    whole_b = b1 if b is None else b.dense(b1)
    return torch.matmul(whole_a, whole_b).sum(0)


def turned(given: Support) -> Support:
    """Support of the transposed matrix."""
    return support(given.index.swapaxes(-1, -2), given.directions)


class Pairs:
    """Slots and rows of two matrices that have a direction in common.

    Args:
        left: Slot and row of the first matrix, (2, pairs).
        right: Slot and row of the second matrix, whose columns are taken as rows.
        rows: Numbers of rows of both matrices.
    """

    def __init__(self, left: Indices, right: Indices, rows: tuple[int, int]):
        self.any = left.size > 0
        self.left, self.right = left, right
        self.rows = rows
        # Nine integers for each pair: `left` and `right` hold two each, the tensors five.
        self.nbytes = 9 * left.nbytes // 2
        self._tensors: dict[torch.device, tuple[torch.Tensor, ...]] = {}

    def tensors(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Positions of the pairs among slots and rows, and positions of their products, as tensors."""
        found = self._tensors.get(device)
        if found is None:
            (s, n), (t, m), (rows, columns) = self.left, self.right, self.rows
            made = (s * rows + n, t * columns + m, n * columns + m, n, m)
            found = self._tensors[device] = tuple(kept(each, device) for each in made)
        return found

    def products(self, a1: Any, b1: Any) -> Any:
        """Inner products of rows of the first and columns of the second matrix, added at their positions."""
        left, right, places, *_ = self.tensors(a1.device)
        own = a1.movedim(-2, 1).flatten(0, 1).index_select(0, left)
        other = b1.movedim(-1, 1).flatten(0, 1).index_select(0, right)
        inner = (own * other).sum(-1)
        rows, columns = self.rows
        zeros = inner.new_zeros((rows * columns, *inner.shape[1:]))
        return zeros.index_add(0, places, inner).unflatten(0, (rows, columns)).movedim((0, 1), (-2, -1))


@remembered
def pairs_of(a: Support, a_rows: int, b: Support, b_rows: int) -> Pairs | None:
    """Pairs for supports that change only from row to row; None for other supports."""
    if any(size != 1 for each in (a, b) for size in (*each.index.shape[1:-2], each.index.shape[-1])):
        return None
    own = np.broadcast_to(a.index.reshape(a.slots, -1), (a.slots, a_rows))
    other = np.broadcast_to(b.index.reshape(b.slots, -1), (b.slots, b_rows))
    left, right = np.argwhere(own >= 0), np.argwhere(other >= 0)
    # Join on directions: match each element on the left with the elements on the right of equal direction.
    of_left, of_right = own[own >= 0], other[other >= 0]
    order = np.argsort(of_right, kind="stable")
    start, stop = (np.searchsorted(of_right[order], of_left, side=side) for side in ("left", "right"))
    counts = stop - start
    each = np.repeat(np.arange(len(left)), counts)
    place = np.arange(len(each)) - np.repeat(np.cumsum(counts) - counts, counts)
    return Pairs(left[each].T, right[order[start[each] + place]].T, (a_rows, b_rows))


def _by_kinds(a1: Any, a: Support, b1: Any, b: Support | None) -> Any:
    """Multiply each kind of A's slots by the matching directions of B; None if slots change both ways."""
    kinds = kinds_of(a, -1)
    if "whole" in kinds or any(size != 1 for size in a.index.shape[1:-2]):
        return None
    whole = b1 if b is None else b.dense(b1)
    total = None
    for kind, (slots, _) in kinds.items():
        part = a1[list(slots)] if len(slots) < a.slots else a1
        directions = _directions(a, kind, slots, a1.device)
        if kind == "inner":
            # Pick the row of B at each place along the sum by its direction: one product over slots and places.
            inner = torch.arange(part.shape[-1], device=a1.device)
            picked = whole.movedim(-2, 1)[directions, inner]
            left = part.movedim(-1, 1).flatten(0, 1).movedim(0, -1)
            each = torch.matmul(left, picked.flatten(0, 1).movedim(0, -2))
        elif directions.shape[1] == 1:
            each = torch.matmul(part, whole[directions[:, 0]]).sum(0)
        else:
            # Pick the matrices of B by the direction of each row: (slots, rows, ..., inner, columns).
            left = part.movedim(-2, 1).unsqueeze(-2)
            each = torch.matmul(left, whole[directions]).sum(0).squeeze(-2).movedim(0, -2)
        total = plus(total, each)
    return total


@remembered
def _directions(a: Support, kind: str, slots: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Direction of each slot at each place along the sum, or at each row; arbitrary for an empty slot."""
    own = a.index[list(slots)].reshape(len(slots), *a.index.shape[-2:])
    return kept(np.maximum(own.max(-2 if kind == "inner" else -1), 0), device)


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


def matmul(call: Call) -> Any:
    """Product of two arguments, one of which may be a constant."""
    (a, b, *_), _ = call.arguments
    if call.entry.name == "rmatmul":
        a, b = b, a
    if isinstance(a, Quotient) and a.waits and a.denominator.value.shape[-1] == 1:
        return over(lambda numerator: torch.matmul(numerator, b), a)
    if isinstance(b, Quotient) and b.waits and b.denominator.value.shape[-2] == 1:
        return over(lambda numerator: torch.matmul(a, numerator), b)
    if len(call.jets) == 1 or min(a.ndim, b.ndim) < 2:
        return times_constant(call, a, b)
    if not all(isinstance(each, Jet) and moves(each) for each in (a, b)):
        return NotImplemented
    if a.support is None and b.support is None:
        return NotImplemented
    rank = max(a.value.ndim, b.value.ndim)
    return product(_of_rank(a, rank), _of_rank(b, rank))


def over(function: Callable[[Any], Any], waiting: Quotient) -> Any:
    """Apply a linear function to a waiting quotient n / s, to order 2."""
    # With σ = s / s0, apply the function to n / s0 and divide the result by 1 + σ1 + σ2.
    n0, n1, n2 = waiting.numerator.in_slots()
    s0, s1, s2 = waiting.denominator.in_slots()
    inverse = 1 / s0
    scaled = new_jet(
        waiting.frame, [n0 * inverse, *(times(each, inverse) for each in (n1, n2))], waiting.numerator.support
    )
    found = function(scaled)
    value, first, second = found.coefficients
    rate = s1 * inverse
    first = torch.addcmul(first, value, rate, value=-1)
    second = minus(second, (first * rate).sum(0))
    return new_jet(waiting.frame, [value, first, second if s2 is None else minus(second, value * (s2 * inverse))])


def _of_rank(jet: Any, rank: int) -> Any:
    missing = rank - jet.value.ndim
    return jet.reshape(*[1] * missing, *jet.value.shape) if missing else jet


def product(a: Jet, b: Jet) -> Any:
    """Product A B of two jets of equal rank, at least one of them in slots, to order 2."""
    a0, a1, a2 = a.in_slots()
    b0, b1, b2 = b.in_slots()
    frame, value = a.frame, a0 @ b0
    second = None if a2 is None else a2 @ b0
    second = plus(second, None if b2 is None else a0 @ b2)
    second = plus(second, met(a1, a.support, b1, b.support))
    by_row, by_column = Factor(a1, a.support, b0, -1), Factor(b1, b.support, a0, -2)
    if by_row.level is None or by_column.level is None:
        total = Total()
        by_row.add_to(total)
        by_column.add_to(total)
        return new_jet(frame, [value, total.held, second])
    first: Any = new_jet(frame, [value, by_row.levelled(), second], by_row.level[0])
    return first + new_jet(frame, [torch.zeros_like(value), by_column.levelled(), None], by_column.level[0])
