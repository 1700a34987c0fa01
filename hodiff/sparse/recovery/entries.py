"""The entries of a sparse matrix from products with its coloring's seeds, by torch's operators.

Products are rows here, (colors, numbers of a product), as vmap makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from hodiff.sparse.coloring import Coloring, Gather, Substitution
from hodiff.sparse.recovery.agreement import probe

Entries = Callable[[Mapping[str, Tensor]], Tensor]

# Rounds of sums over descendants that are faster, and round less, than one cumulative sum.
_FEW_DOUBLINGS = 4
# Colorings are few, and what is kept of each is as large as its matrix.
_KEPT = 8


@lru_cache(_KEPT)
def seeds(
    coloring: Coloring, side: str, dtype: torch.dtype, device: torch.device, *, with_probe: bool = False
) -> Tensor:
    """The vectors that "columns" or "rows" of one color add up to, (colors, numbers); the random one after them."""
    ones = torch.as_tensor(coloring.seeds(bool, side=side), device=device).mT.to(dtype)
    return torch.cat([ones, probe(ones.shape[1], dtype, device)]) if with_probe else ones.contiguous()


@lru_cache(_KEPT)
def reader(coloring: Coloring, device: torch.device) -> Entries:
    """Function of the products by side that gives the values of the entries, in the order of compressed rows."""
    plan = coloring.plan
    if isinstance(plan, Substitution):
        return _substitution(coloring, plan, device)
    return _gathers(coloring, plan, device)


def _gathers(coloring: Coloring, plan: tuple[Gather, ...], device: torch.device) -> Entries:
    places = [_place(each.colors, each.rows, coloring, each.side, device) for each in plan]
    if len(plan) == 1:
        (side,) = (each.side for each in plan)
        return lambda products: products[side].reshape(-1).index_select(0, places[0])
    order = torch.cat([_index(each.entries, device) for each in plan]).argsort()

    def read(products: Mapping[str, Tensor]) -> Tensor:
        parts = [
            products[each.side].reshape(-1).index_select(0, place) for each, place in zip(plan, places, strict=True)
        ]
        return torch.cat(parts).index_select(0, order)

    return read


def _substitution(coloring: Coloring, plan: Substitution, device: torch.device) -> Entries:
    place = _place(plan.colors, plan.rows, coloring, "columns", device)
    unknowns, parents, ends = (_index(each, device) for each in (plan.unknowns, plan.parents, plan.ends))
    signs = torch.as_tensor(plan.signs, device=device)

    def doubled(found: Tensor) -> Tensor:
        """Sums over descendants at distance less than 1, 2, 4, ..."""
        above = torch.cat([parents, parents.new_tensor([len(parents)])])
        for _ in range(plan.doublings):
            below = (above[:-1] < len(parents)).nonzero()[:, 0]
            found = found.index_add(0, above[below], found[below])
            above = above[above]
        return found

    def cumulated(found: Tensor) -> Tensor:
        """Differences of one sum over all, in float64, so that it rounds no more than the products did."""
        total = found.to(torch.promote_types(found.dtype, torch.float64)).cumsum(0)
        total = torch.nn.functional.pad(total, (1, 0))
        return (total.index_select(0, ends) - total[:-1]).to(found.dtype)

    summed = doubled if plan.doublings <= _FEW_DOUBLINGS else cumulated

    def read(products: Mapping[str, Tensor]) -> Tensor:
        found = products["columns"].reshape(-1).index_select(0, place)
        if plan.doublings:
            factors = signs.to(found.dtype)
            found = summed(found * factors) * factors
        return found.index_select(0, unknowns)

    return read


def _place(colors: Any, numbers: Any, coloring: Coloring, side: str, device: torch.device) -> Tensor:
    """Where the products, one row after another, have what belongs to a color and a number."""
    length = coloring.shape[0 if side == "columns" else 1]
    return _index(colors, device) * length + _index(numbers, device)


def _index(numbers: Any, device: torch.device) -> Tensor:
    return torch.as_tensor(numbers, device=device).to(torch.int64)
