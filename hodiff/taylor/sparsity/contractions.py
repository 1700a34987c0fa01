r"""Products of two matrices that both move.

With $C = A B$, coefficient 1 of C is $A_1 B_0 + A_0 B_1$, whose directions are those of a row of A and of a column of B,
and coefficient 2 takes $\sum_d A_1^{(d)} B_1^{(d)}$, where the few directions count that both have.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from hodiff.taylor.jets import Jet
from hodiff.taylor.series import minus, plus, times
from hodiff.taylor.sparsity.levels import times_constant
from hodiff.taylor.sparsity.quotients import Quotient
from hodiff.taylor.sparsity.slots import Call, moves
from hodiff.taylor.sparsity.supports import Places, Support, levelled, support
from hodiff.torch_internals.wrapped_tensors import is_wrapped


def matmul(call: Call) -> Any:
    """The product of two arguments, one of which may be a constant."""
    (a, b, *_), _ = call.arguments
    if call.entry.name == "rmatmul":
        a, b = b, a
    if isinstance(a, Quotient) and a.waits and a.denominator.value.shape[-1] == 1:
        return over(lambda numerator: torch.matmul(numerator, b), a)
    if isinstance(b, Quotient) and b.waits and b.denominator.value.shape[-2] == 1:
        return over(lambda numerator: torch.matmul(a, numerator), b)
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


def _with_vectors(a: Any, b: Any) -> Any:
    """By matrices of one row, or one column."""
    left = a.unsqueeze(0) if a.value.ndim == 1 else a
    right = b.unsqueeze(1) if b.value.ndim == 1 else b
    found = torch.matmul(left, right)
    found = found.squeeze(-1) if b.value.ndim == 1 else found
    return found.squeeze(-1 if b.value.ndim == 1 else -2) if a.value.ndim == 1 else found


def over(function: Callable[[Any], Any], waiting: Quotient) -> Any:
    """A linear function of a quotient n / s that waits, to order 2."""
    # With σ = s / s0, n / s0 goes through the function, and what comes out over 1 + σ1 + σ2.
    n0, n1, n2 = waiting.numerator.in_slots()
    s0, s1, s2 = waiting.denominator.in_slots()
    inverse = 1 / s0
    scaled = Jet(waiting.frame, [n0 * inverse, *(times(each, inverse) for each in (n1, n2))], waiting.numerator.support)
    found = function(scaled)
    value, first, second = found.coefficients
    rate = s1 * inverse
    first = torch.addcmul(first, value, rate, value=-1)
    second = minus(second, (first * rate).sum(0))
    return Jet(waiting.frame, [value, first, second if s2 is None else minus(second, value * (s2 * inverse))])


def _of_rank(jet: Any, rank: int) -> Any:
    missing = rank - jet.value.ndim
    return jet.reshape(*[1] * missing, *jet.value.shape) if missing else jet


def product(a: Jet, b: Jet) -> Any:
    """A B of jets of one rank, at least one of them in slots, to order 2."""
    a0, a1, a2 = a.in_slots()
    b0, b1, b2 = b.in_slots()
    frame, value = a.frame, a0 @ b0
    second = None if a2 is None else a2 @ b0
    second = plus(second, None if b2 is None else a0 @ b2)
    second = plus(second, _shared(a1, a.support, b1, b.support))
    by_row, by_column = _Factor(a1, a.support, b0, -1), _Factor(b1, b.support, a0, -2)
    if by_row.level is None or by_column.level is None:
        total = _Total()
        by_row.add_to(total)
        by_column.add_to(total)
        return Jet(frame, [value, total.held, second])
    first: Any = Jet(frame, [value, by_row.levelled(), second], by_row.level[0])
    return first + Jet(frame, [torch.zeros_like(value), by_column.levelled(), None], by_column.level[0])


class _Total:
    """A coefficient with all directions, made here, to which is added in place."""

    def __init__(self) -> None:
        self.held: Any = None

    def add(self, each: Any) -> None:
        self.held = each if self.held is None else self.held.add_(each)

    def add_slots(self, places: Places, each: Any) -> None:
        self.held = places.onto(self.held, each)

    def add_products(self, places: Places, x: Any, y: Any) -> None:
        """Products of elements, of which each direction has one row, (places, slots, ...)."""
        if not places.stay:
            self.add_slots(places, (x * y).flatten(0, 1))
        elif self.held is None:
            self.held = (x * y).flatten(0, 1)
        else:
            rows = self.held.unflatten(0, (len(x), -1))
            # vmap has no rule for the form in place.
            self.held = (torch.addcmul(rows, x, y) if is_wrapped(rows) else rows.addcmul_(x, y)).flatten(0, 1)


class _Factor:
    """Coefficient 1 of one factor times the value of the other, which are summed over an axis, -1 of A or -2 of B."""

    def __init__(self, coefficient: Any, given: Support | None, other: Any, axis: int):
        self.coefficient = coefficient
        self.given = given
        self.other = other
        self.axis = axis
        self.level = None if given is None else levelled(given, (given.ndim + axis,))

    def times(self, coefficient: Any) -> Any:
        return coefficient @ self.other if self.axis == -1 else self.other @ coefficient

    def levelled(self) -> Any:
        """In slots that are the same along the sum."""
        assert self.level is not None
        return self.times(self.level[1](self.coefficient))

    def add_to(self, total: _Total) -> None:
        """With all directions."""
        if self.given is None:
            total.add(self.times(self.coefficient))
            return
        if self.level is not None:
            total.add_slots(self.level[0].all_places, self.levelled())
            return
        kinds = _kinds(self.given, self.axis)
        for kind in sorted(kinds):
            slots, places = kinds[kind]
            part = self.coefficient[list(slots)] if len(slots) < self.given.slots else self.coefficient
            if kind == "inner":
                # Each direction of an element along the sum is met once there: no sum is left.
                own, other = part.movedim(self.axis, 0), self.other.movedim(-3 - self.axis, 0).unsqueeze(1)
                total.add_products(places, own.unsqueeze(self.axis), other.unsqueeze(-3 - self.axis))
            elif kind == "rows":
                total.add_slots(places, self.times(part))
            else:
                total.add(self.times(places(part)))


@lru_cache(maxsize=4096)
def _kinds(given: Support, axis: int) -> dict[str, tuple[tuple[int, ...], Places]]:
    """Slots by where their directions change: along an axis alone, on others or nowhere, or both; and where they go."""
    found: dict[str, list[int]] = {}
    holes = (given.index < 0).reshape(given.slots, -1).any(1)
    for slot, varies in enumerate(given.varies):
        # Of an inner slot one direction is read for each place, which must stand there.
        alone = varies.sum() == 1 and not holes[slot]
        kind = "rows" if not varies[axis] else "inner" if alone else "whole"
        found.setdefault(kind, []).append(slot)
    return {kind: (tuple(slots), _places_of_kind(given, axis, kind, slots)) for kind, slots in found.items()}


def _places_of_kind(given: Support, axis: int, kind: str, slots: list[int]) -> Places:
    index = given.index[slots]
    if kind == "rows":
        # An empty slot has the direction that others have along the axis, or none.
        index = index.max(axis, keepdims=True)
    elif kind == "inner":
        # By place and slot, as the products come.
        index = np.moveaxis(index, axis, 0).reshape(index.shape[axis], len(slots), -1)[..., 0].reshape(-1)
    return Places(np.maximum(index, 0), given.directions)


def _turned(given: Support | None) -> Support | None:
    """Of the transposed matrix."""
    return None if given is None else support(given.index.swapaxes(-1, -2), given.directions)


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
    kinds = _kinds(a, -1)
    if "whole" in kinds or any(size != 1 for size in a.index.shape[1:-2]):
        return None
    whole = b1 if b is None else b.dense(b1)
    total = None
    for kind, (slots, _) in kinds.items():
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
