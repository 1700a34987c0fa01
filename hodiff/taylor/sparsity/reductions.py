"""Sums: slots of the added elements become slots of the sum."""

from __future__ import annotations

import math
from typing import Any

from hodiff.taylor.jets import Jet
from hodiff.taylor.sparsity.moving import sequence
from hodiff.taylor.sparsity.moving_directions import Places, Support, levelled, support
from hodiff.taylor.sparsity.slots import Call, mapped_jet


def total(call: Call) -> Any:
    """Sum or mean over dimensions."""
    options = _options(*call.arguments)
    if options is None or not call.sparse or len(call.jets) != 1:
        return NotImplemented
    (jet, dims, keepdim) = options
    value = jet.value
    dims = (
        tuple(range(value.ndim))
        if dims is None or dims == ()
        else tuple(sorted(d % value.ndim for d in sequence(dims)))
    )
    count = math.prod(value.shape[d] for d in dims) if call.entry.name == "mean" else 1
    found: Any = summed(jet, dims, keepdim=keepdim)
    return found if count == 1 else found / count


def _options(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Jet, Any, bool] | None:
    """Read the jet, the dimensions and keepdim from the arguments of sum."""
    named = {"axis": "dim", "self": "input"}
    given = dict(zip(("input", "dim", "keepdim"), args, strict=False))
    given.update({named.get(name, name): each for name, each in kwargs.items() if each is not None})
    if set(given) - {"input", "dim", "keepdim"} or not isinstance(given["input"], Jet):
        return None
    dims = given.get("dim")
    if isinstance(dims, (list, tuple)) and not all(isinstance(each, int) for each in dims):
        return None
    return given["input"], dims, bool(given.get("keepdim", False))


def summed(jet: Jet, dims: tuple[int, ...], *, keepdim: bool) -> Jet:
    """Sum of a jet in slots over dimensions, counted from 0; in all directions if slots would be too many."""
    given: Support = jet.support
    found = levelled(given, dims)
    if found is None:
        own, places = None, given.all_places
    else:
        level, places = found
        index = level.index if keepdim else level.index.squeeze(tuple(d + 1 for d in dims))
        own = support(index, level.directions)

    def add(each: Any) -> Any:
        return each.sum(dims, keepdim=keepdim)

    return mapped_jet(jet, own, add, lambda each: accumulated(each, places, dims, keepdim=keepdim))


def accumulated(coefficient: Any, places: Places, dims: tuple[int, ...], *, keepdim: bool) -> Any:
    """Sum over dimensions while slots move to their places, without writing all elements there first."""
    axes = tuple(d + 1 for d in dims)
    target = places.target
    # Sum first along dimensions on which places do not depend.
    early = tuple(a for a in axes if target.shape[a] == 1)
    late = tuple(a for a in axes if target.shape[a] > 1)
    if early:
        coefficient = coefficient.sum(early, keepdim=True)
    if late:
        kept = [a for a in range(1, target.ndim) if a not in late]
        flat = coefficient.permute(0, *late, *kept).flatten(0, len(late))
        found = places.rows(late)(flat)
        for a in late:
            found = found.unsqueeze(a)
    else:
        found = places(coefficient)
    return found if keepdim else found.squeeze(axes)
