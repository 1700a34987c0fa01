"""Elementwise functions: an element of the result depends on the same directions as the arguments' elements."""

from __future__ import annotations

from typing import Any

import torch

from hodiff.taylor.jets import Jet, new_jet
from hodiff.taylor.series import plus, times
from hodiff.taylor.sparsity.moving_directions import united
from hodiff.taylor.sparsity.slots import Call, moves, together


def pointwise(call: Call) -> Any:
    """Run the rule on common slots."""
    found = together(call) if call.sparse else None
    return NotImplemented if found is None else call.run(*found)


def added(call: Call) -> Any:
    """Sum of two jets, in common slots, or in all directions of a part that has them."""
    args, kwargs = call.arguments
    if kwargs or len(args) != 2 or len(call.jets) != 2 or not all(map(moves, call.jets)):
        return pointwise(call)
    a, b = args
    if a.value.dtype != b.value.dtype or a.support is b.support:
        return pointwise(call)
    if a.support is not None and b.support is not None:
        found = united((a.support, b.support), max(a.value.ndim, b.value.ndim))
        if found is None:
            return NotImplemented
        common, places = found
        first: Any = None
        shape = torch.broadcast_shapes(a.value.shape, b.value.shape)
        for each, place in zip((a, b), places, strict=True):
            first = place.onto(first, _expanded(each.in_slots()[1], each.value.ndim, shape))
    else:
        whole, slotted = (a, b) if a.support is None else (b, a)
        if whole.value.shape != slotted.value.shape:
            return NotImplemented
        common = None
        first = slotted.support.all_places.onto(whole.in_slots()[1].clone(), slotted.in_slots()[1])
    (a0, _, a2), (b0, _, b2) = a.in_slots(), b.in_slots()
    value, second = a0 + b0, plus(a2, b2)
    return new_jet(call.frame, [value, first, None if second is None else second.expand(value.shape)], common)


def _expanded(coefficient: Any, rank: int, shape: torch.Size) -> Any:
    """Expand a coefficient in slots, of a value with some rank, to a shape."""
    missing = len(shape) - rank
    own = coefficient.reshape(len(coefficient), *[1] * missing, *coefficient.shape[1:])
    return own.expand(len(own), *shape)


def multiplied(call: Call) -> Any:
    """Product; slots of one factor meet some directions of a factor that has all directions."""
    found = pointwise(call)
    parts = _mixed(call) if found is NotImplemented else None
    if parts is None:
        return found
    whole, slotted = parts
    a0, a1, a2 = whole.in_slots()
    b0, b1, b2 = slotted.in_slots()
    first = slotted.support.all_places.onto(a1 * b0, b1 * a0)
    second = plus(times(a0, b2), times(a2, b0))
    target = slotted.support.all_places
    met = a1.gather(0, target.full(b1.shape, b1.device))
    return new_jet(call.frame, [a0 * b0, first, plus(second, (met * b1).sum(0))])


def _mixed(call: Call) -> tuple[Jet, Jet] | None:
    """Return the jet with all directions and the jet in slots, if shapes and dtypes are equal; else None."""
    args, kwargs = call.arguments
    if kwargs or len(args) != 2 or len(call.jets) != 2 or not all(map(moves, call.jets)):
        return None
    a, b = args
    if (a.support is None) == (b.support is None) or a.value.dtype != b.value.dtype:
        return None
    whole, slotted = (a, b) if a.support is None else (b, a)
    return (whole, slotted) if whole.value.shape == slotted.value.shape else None
