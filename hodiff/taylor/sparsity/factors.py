"""Products of coefficient 1 of one matrix factor and the value of the other factor."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from hodiff.taylor.sparsity.moving_directions import Places, Support, levelled
from hodiff.taylor.sparsity.remembering import remembered
from hodiff.torch_internals.autograd.wrapped_tensors import is_wrapped


class Total:
    """Accumulator for a coefficient with all directions, which is updated in place."""

    def __init__(self) -> None:
        self.held: Any = None

    def add(self, each: Any) -> None:
        """Add a coefficient with all directions."""
        self.held = each if self.held is None else self.held.add_(each)

    def add_slots(self, places: Places, each: Any) -> None:
        """Add a coefficient in slots, at its places."""
        self.held = places.onto(self.held, each)

    def add_products(self, places: Places, x: Any, y: Any) -> None:
        """Add products of elements, (places, slots, ...), where each direction has one row."""
        if not places.stay:
            self.add_slots(places, (x * y).flatten(0, 1))
        elif self.held is None:
            self.held = (x * y).flatten(0, 1)
        else:
            rows = self.held.unflatten(0, (len(x), -1))
            # vmap has no rule for the in-place variant.
            self.held = (torch.addcmul(rows, x, y) if is_wrapped(rows) else rows.addcmul_(x, y)).flatten(0, 1)


class Factor:
    """Coefficient 1 of one factor times the value of the other, summed over axis -1 of A or -2 of B."""

    def __init__(self, coefficient: Any, given: Support | None, other: Any, axis: int):
        self.coefficient = coefficient
        self.given = given
        self.other = other
        self.axis = axis
        self.level = None if given is None else levelled(given, (given.ndim + axis,))

    def times(self, coefficient: Any) -> Any:
        """Multiply by the other factor's value."""
        return coefficient @ self.other if self.axis == -1 else self.other @ coefficient

    def levelled(self) -> Any:
        """Product in slots that are the same along the summed axis."""
        assert self.level is not None
        return self.times(self.level[1](self.coefficient))

    def add_to(self, total: Total) -> None:
        """Add the product, with all directions, to a total."""
        if self.given is None:
            total.add(self.times(self.coefficient))
            return
        if self.level is not None:
            total.add_slots(self.level[0].all_places, self.levelled())
            return
        kinds = kinds_of(self.given, self.axis)
        for kind in sorted(kinds):
            slots, places = kinds[kind]
            part = self.coefficient[list(slots)] if len(slots) < self.given.slots else self.coefficient
            if kind == "inner":
                # Each direction occurs once along the summed axis, so no sum is left. Products take the memory layout
                # of their factors, which should be contiguous.
                own = part.movedim(self.axis, 0).contiguous()
                other = self.other.movedim(-3 - self.axis, 0).contiguous().unsqueeze(1)
                total.add_products(places, own.unsqueeze(self.axis), other.unsqueeze(-3 - self.axis))
            elif kind == "rows":
                total.add_slots(places, self.times(part))
            else:
                total.add(self.times(places(part)))


@remembered
def kinds_of(given: Support, axis: int) -> dict[str, tuple[tuple[int, ...], Places]]:
    """Group slots whose directions change along the axis alone, not along it, or otherwise; give their places."""
    found: dict[str, list[int]] = {}
    holes: Any = (given.index < 0).reshape(given.slots, -1).any(1)
    for slot, varies in enumerate(given.varies):
        # An inner slot needs one direction for each place, so that it cannot be empty anywhere.
        alone = varies.sum() == 1 and not holes[slot]
        kind = "rows" if not varies[axis] else "inner" if alone else "whole"
        found.setdefault(kind, []).append(slot)
    return {kind: (tuple(slots), _places_of_kind(given, axis, kind, slots)) for kind, slots in found.items()}


def _places_of_kind(given: Support, axis: int, kind: str, slots: list[int]) -> Places:
    index = given.index[slots]
    if kind == "rows":
        # An empty slot takes the direction found elsewhere along the axis, if there is one.
        index = index.max(axis, keepdims=True)
    elif kind == "inner":
        # Ordered by place and slot, like the products.
        index = np.moveaxis(index, axis, 0).reshape(index.shape[axis], len(slots), -1)[..., 0].reshape(-1)
    return Places(np.maximum(index, 0), given.directions)
