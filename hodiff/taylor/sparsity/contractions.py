r"""Products of two matrices that both move.

With $C = A B$, coefficient 1 of C is $A_1 B_0 + A_0 B_1$, whose directions are those of a row of A and of a column of B,
and coefficient 2 takes $\sum_d A_1^{(d)} B_1^{(d)}$, where the few directions count that both have.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch

from hodiff.taylor.jets import Jet
from hodiff.taylor.series import plus
from hodiff.taylor.sparsity.levels import times_constant
from hodiff.taylor.sparsity.quotients import Quotient
from hodiff.taylor.sparsity.slots import Call, moves
from hodiff.taylor.sparsity.supports import Places, Support, levelled, support


def matmul(call: Call) -> Any:
    """The product of two arguments, one of which may be a constant."""
    (a, b, *_), _ = call.arguments
    if call.entry.name == "rmatmul":
        a, b = b, a
    if isinstance(a, Quotient) and a.waits and a.denominator.value.shape[-1] == 1:
        return torch.matmul(_any(a.numerator), b) / a.denominator
    if isinstance(b, Quotient) and b.waits and b.denominator.value.shape[-2] == 1:
        return torch.matmul(a, _any(b.numerator)) / b.denominator
    if len(call.jets) == 1:
        return times_constant(call, a, b)
    if a is b or not all(isinstance(each, Jet) and moves(each) for each in (a, b)):
        return NotImplemented
    if min(a.value.ndim, b.value.ndim) < 2:
        return _with_vectors(a, b)
    if a.support is None and b.support is None:
        return NotImplemented
    rank = max(a.value.ndim, b.value.ndim)
    return product(_of_rank(a, rank), _of_rank(b, rank))


def _any(jet: Jet) -> Any:
    """A jet as torch's functions take it."""
    return jet


def _with_vectors(a: Any, b: Any) -> Any:
    """By matrices of one row, or one column."""
    left = a.unsqueeze(0) if a.value.ndim == 1 else a
    right = b.unsqueeze(1) if b.value.ndim == 1 else b
    found = torch.matmul(left, right)
    found = found.squeeze(-1) if b.value.ndim == 1 else found
    return found.squeeze(-1 if b.value.ndim == 1 else -2) if a.value.ndim == 1 else found


def _of_rank(jet: Any, rank: int) -> Any:
    missing = rank - jet.value.ndim
    return jet.reshape(*[1] * missing, *jet.value.shape) if missing else jet


def product(a: Jet, b: Jet) -> Any:
    """A B of jets of one rank, at least one of them in slots, to order 2."""
    a0, a1, a2 = a.in_slots()
    b0, b1, b2 = b.in_slots()
    frame, value = a.frame, a0 @ b0
    left, left_support = _slopes(a1, a.support, b0)
    right, right_support = _slopes(b1.mT, _turned(b.support), a0.mT)
    second = None if a2 is None else a2 @ b0
    second = plus(second, None if b2 is None else a0 @ b2)
    second = plus(second, _shared(a1, a.support, b1, b.support))
    first: Any = Jet(frame, [value, left, second], left_support)
    other: Any = Jet(frame, [torch.zeros_like(value), right.mT, None], _turned(right_support))
    return first + other


def _turned(given: Support | None) -> Support | None:
    """Of the transposed matrix."""
    return None if given is None else support(given.index.swapaxes(-1, -2), given.directions)


def _slopes(a1: Any, given: Support | None, b0: Any) -> tuple[Any, Support | None]:
    """A_1 B_0 and its support."""
    if given is None:
        return a1 @ b0, None
    found = levelled(given, (given.ndim - 1,))
    if found is not None:
        level, places = found
        return places(a1) @ b0, level
    # Each direction of an element along the sum is met once there: no sum is left.
    total = None
    for kind, slots in _kinds(given).items():
        part = a1[list(slots)] if len(slots) < given.slots else a1
        own = given.index[list(slots)]
        if kind == "rows":
            each = Places(np.maximum(own, 0), given.directions)(part @ b0)
        elif kind == "inner":
            outer = part.movedim(-1, 1).unsqueeze(-1) * b0.movedim(-2, 0).unsqueeze(-2)
            target = np.maximum(own.reshape(len(own), -1, own.shape[-1])[:, 0], 0)
            each = Places(target.reshape(-1), given.directions)(outer.flatten(0, 1))
        else:
            each = Places(np.maximum(own, 0), given.directions)(part) @ b0
        total = plus(total, each)
    return total, None


@lru_cache(maxsize=4096)
def _kinds(given: Support) -> dict[str, tuple[int, ...]]:
    """Slots by where their directions change: by row or nowhere, along the sum alone, or both."""
    found: dict[str, tuple[int, ...]] = {}
    holes = (given.index < 0).reshape(given.slots, -1).any(1)
    for slot, varies in enumerate(given.varies):
        if not varies[-1]:
            kind = "rows"
        else:
            # Of an inner slot one direction is read for each place, which must stand there.
            kind = "both" if varies[:-1].any() or holes[slot] else "inner"
        found[kind] = (*found.get(kind, ()), slot)
    return found


def _shared(a1: Any, a: Support | None, b1: Any, b: Support | None) -> Any:
    """The sum over directions of products of coefficients 1."""
    if a is not None and b is not None:
        pairs = _pairs(a, b)
        if pairs is not None:
            return _by_pairs(a1, b1, pairs)
    if a is not None:
        found = _by_rows(a1, a, b1, b)
    else:
        assert b is not None
        found = _by_rows(b1.mT, _turned(b), a1.mT, _turned(a))
        found = None if found is None else found.mT
    if found is not None:
        return found
    whole_a = a1 if a is None else a.dense(a1)
    whole_b = b1 if b is None else b.dense(b1)
    return torch.matmul(whole_a, whole_b).sum(0)


class _Pairs:
    """Slots and rows of A, slots and columns of B, that have one direction."""

    def __init__(self, rows: Any, columns: Any):
        self.rows = rows
        self.columns = columns


@lru_cache(maxsize=4096)
def _pairs(a: Support, b: Support) -> _Pairs | None:
    """Those of two supports that do not change along the sum, nor from matrix to matrix; None for others."""
    if a.index.shape[-1] != 1 or b.index.shape[-2] != 1:
        return None
    if any(size != 1 for size in (*a.index.shape[1:-2], *b.index.shape[1:-2])):
        return None
    rows = a.index.reshape(a.slots, -1)
    columns = b.index.reshape(b.slots, -1)
    found = []
    for slot in range(b.slots):
        for column in range(columns.shape[1]):
            direction = columns[slot, column]
            if direction >= 0:
                found += [(s, n, slot, column) for s, n in zip(*np.nonzero(rows == direction), strict=True)]
    if not found:
        return _Pairs(None, None)
    table = np.array(found)
    return _Pairs(table[:, :2], table[:, 2:])


def _by_pairs(a1: Any, b1: Any, pairs: _Pairs) -> Any:
    """Inner products of those rows and columns, at their places."""
    if pairs.rows is None:
        return None
    rows, columns = a1.shape[-2], b1.shape[-1]
    n_rows, n_columns = pairs.rows[:, 1], pairs.columns[:, 1]
    device = a1.device

    def tensor(x: Any) -> torch.Tensor:
        return torch.as_tensor(np.ascontiguousarray(x), device=device)

    left = a1.movedim(-2, 1).flatten(0, 1).index_select(0, tensor(pairs.rows[:, 0] * rows + n_rows))
    right = b1.movedim(-1, 1).flatten(0, 1).index_select(0, tensor(pairs.columns[:, 0] * columns + n_columns))
    products = (left * right).sum(-1)
    zeros = products.new_zeros((rows * columns, *products.shape[1:]))
    found = zeros.index_add(0, tensor(n_rows * columns + n_columns), products)
    return found.unflatten(0, (rows, columns)).movedim((0, 1), (-2, -1))


def _by_rows(a1: Any, a: Support, b1: Any, b: Support | None) -> Any:
    """Slots of A one kind after another, with the directions of B that they have; None where slots change both ways."""
    kinds = _kinds(a)
    if "both" in kinds or any(size != 1 for size in a.index.shape[1:-2]):
        return None
    whole = b1 if b is None else b.dense(b1)
    total = None
    for kind, slots in kinds.items():
        part = a1[list(slots)] if len(slots) < a.slots else a1
        own = a.index[list(slots)]
        own = own.reshape(len(own), *own.shape[-2:])
        if kind == "rows":
            # (slots, rows, ..., inner, columns): the matrices of B by the direction of each row.
            directions = torch.as_tensor(np.maximum(own[..., 0], 0), device=a1.device)
            picked = whole[directions.expand(len(own), own.shape[1])]
            left = part.movedim(-2, 1).unsqueeze(-2)
            if own.shape[1] == 1 and part.shape[-2] > 1:
                each = torch.matmul(part, picked.squeeze(1)).sum(0)
            else:
                each = torch.matmul(left, picked).sum(0).squeeze(-2).movedim(0, -2)
        else:
            # The row of B at each place along the sum, by the direction there: one product over slots and places.
            directions = torch.as_tensor(np.maximum(own[:, 0], 0), device=a1.device)
            inner = torch.arange(own.shape[-1], device=a1.device)
            picked = whole.movedim(-2, 1)[directions, inner]
            left = part.movedim(-1, 1).flatten(0, 1).movedim(0, -1)
            each = torch.matmul(left, picked.flatten(0, 1).movedim(0, -2))
        total = plus(total, each)
    return total
