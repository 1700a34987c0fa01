r"""Products and determinants of matrices whose elements move along few directions.

Coefficient 1 of $\log |\det A|$ is $\operatorname{tr} W$ and coefficient 2 is $\operatorname{tr}(A_0^{-1} A_2) -
\tfrac{1}{2} \sum_d \operatorname{tr} (W^{(d)} W^{(d)})$ with $W = A_1 A_0^{-1}$. If rows move along few directions,
such as particles in orbitals, only pairs of rows with a common direction contribute to the last sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hodiff.taylor.jets import Jet, new_jet
from hodiff.taylor.series import minus, plus, times
from hodiff.taylor.sparsity.factors import Factor, Total
from hodiff.taylor.sparsity.levels import times_constant
from hodiff.taylor.sparsity.meetings import met, pairs_of
from hodiff.taylor.sparsity.quotients import Quotient
from hodiff.taylor.sparsity.reductions import summed
from hodiff.taylor.sparsity.slots import Call, moves
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
