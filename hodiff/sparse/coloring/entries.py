"""Recovery of a sparse matrix's entries from products with its coloring's seeds, by torch's operators.

Products are rows here, (colors, length of a product), as vmap returns them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hodiff.sparse.coloring.gathers import Gather
from hodiff.sparse.coloring.substitution import FEW_DOUBLINGS, Substitution
from hodiff.torch_internals.autograd.wrapped_tensors import is_wrapped
from hodiff.torch_internals.tensors import has_numbers

Entries = Callable[[Mapping[str, Tensor]], Tensor]


def reader(plan: tuple[Gather, ...] | Substitution, shape: tuple[int, int], device: torch.device) -> Entries:
    """Return a function that reads the values of entries, in compressed-row order, from the products by side."""
    if isinstance(plan, Substitution):
        return _by_substitution(plan, shape, device)
    return _by_gathers(plan, shape, device)


def _by_gathers(plan: tuple[Gather, ...], shape: tuple[int, int], device: torch.device) -> Entries:
    places = [_place(each, each.side, shape, device) for each in plan]
    if len(plan) == 1:
        side = plan[0].side
        return lambda products: products[side].reshape(-1).index_select(0, places[0])
    order = torch.cat([_index(each.entries, device) for each in plan]).argsort()

    def read(products: Mapping[str, Tensor]) -> Tensor:
        flat = [products[each.side].reshape(-1) for each in plan]
        parts = [each.index_select(0, place) for each, place in zip(flat, places, strict=True)]
        return torch.cat(parts).index_select(0, order)

    return read


def _by_substitution(plan: Substitution, shape: tuple[int, int], device: torch.device) -> Entries:
    place, unknowns = _place(plan, "columns", shape, device), _index(plan.unknowns, device)
    signs = torch.as_tensor(plan.signs, device=device)
    doubled, cumulated = _doubling(plan, device), _cumulation(plan, device)

    def read(products: Mapping[str, Tensor]) -> Tensor:
        found = products["columns"].reshape(-1).index_select(0, place)
        if plan.doublings:
            signed = found * signs.to(found.dtype)
            # A cumulative sum would carry infinities and NaN into trees that have none.
            few = (
                plan.doublings <= FEW_DOUBLINGS
                or is_wrapped(found)
                or not has_numbers(found)
                or not bool(found.isfinite().all())
            )
            found = (doubled if few else cumulated)(signed) * signs.to(found.dtype)
        return found.index_select(0, unknowns)

    return read


def _doubling(plan: Substitution, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Return a function that sums over descendants at distance less than 1, 2, 4, ..."""
    count, steps = len(plan.rows), []
    above = np.append(plan.parents, count)
    for _ in range(plan.doublings):
        below = np.flatnonzero(above[:-1] < count)
        steps.append((_index(below, device), _index(above[below], device)))
        above = above[above]

    def summed(signed: Tensor) -> Tensor:
        for below, target in steps:
            signed = signed.index_add(0, target, signed.index_select(0, below))
        return signed

    return summed


def _cumulation(plan: Substitution, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Return a function that uses one cumulative sum in float64, as `Substitution.by_cumulative_sum` does."""
    tops = np.flatnonzero(plan.parents == len(plan.rows))
    tree = np.zeros(len(plan.rows), np.int64)
    tree[tops[1:]] = 1
    roots, trees, last = _index(tops, device), _index(np.cumsum(tree), device), _index(plan.ends - 1, device)

    def summed(signed: Tensor) -> Tensor:
        exact = signed.to(torch.promote_types(signed.dtype, torch.float64))
        totals = torch.zeros_like(exact[: len(roots)]).index_add(0, trees, exact)
        walk = exact.index_add(0, roots[1:], totals[:-1], alpha=-1).cumsum(0)
        before = torch.nn.functional.pad(walk[:-1], (1, 0))
        below = (walk.index_select(0, last) - before).index_copy(0, roots, totals)
        return below.to(signed.dtype)

    return summed


def _place(read: Gather | Substitution, side: str, shape: tuple[int, int], device: torch.device) -> Tensor:
    """Positions in the flattened products of the elements that are read."""
    return _index(read.colors, device) * shape[0 if side == "columns" else 1] + _index(read.rows, device)


def _index(numbers: Any, device: torch.device) -> Tensor:
    return torch.as_tensor(numbers, device=device).to(torch.int64)
