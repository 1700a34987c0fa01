"""Sums over directions of products of two coefficients 1, to which only common directions contribute."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from hodiff.taylor.series import plus
from hodiff.taylor.sparsity.factors import kinds_of
from hodiff.taylor.sparsity.remembering import remembered
from hodiff.taylor.sparsity.supports import Indices, Support, kept, support


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
