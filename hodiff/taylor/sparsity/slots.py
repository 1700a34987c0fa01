"""Conversion of jets in slots to common slots for the rule of a function, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from hodiff.taylor.jets import Jet, new_jet
from hodiff.taylor.registry import Entry
from hodiff.taylor.series import Frame
from hodiff.taylor.sparsity.moving_directions import Places, Support, support, united

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Call:
    """A call of a function, of an entry in the table of rules, with jets of a frame, some of them in slots."""

    def __init__(self, frame: Frame, entry: Entry, func: Any, args: Sequence[Any], kwargs: dict[str, Any]):
        self.frame = frame
        self.entry = entry
        self.func = func
        self.leaves, self.spec = pytree.tree_flatten((tuple(args), kwargs))
        self.places = [i for i, each in enumerate(self.leaves) if isinstance(each, Jet) and each.frame is frame]
        self.jets: list[Jet] = [self.leaves[i] for i in self.places]

    @property
    def sparse(self) -> bool:
        """Whether at least one jet moves, and all jets that move are in slots."""
        moving = [jet for jet in self.jets if moves(jet)]
        return bool(moving) and all(jet.support is not None for jet in moving)

    @property
    def arguments(self) -> Arguments:
        """Arguments of the function."""
        args, kwargs = pytree.tree_unflatten(self.leaves, self.spec)
        return args, kwargs

    def with_jets(self, jets: Sequence[Any]) -> Arguments:
        """Return the arguments with the jets replaced."""
        leaves = list(self.leaves)
        for i, each in zip(self.places, jets, strict=True):
            leaves[i] = each
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return args, kwargs

    def inner_frame(self, slots: int) -> Frame:
        """Return a frame whose directions are the slots."""
        frame = self.frame
        slotted = Frame(frame.order, slots, frame.collapsed, frame.depth, frame.handle, frame.mode, frame.observer)
        slotted.kink = frame.kink
        return slotted

    def run(self, inner: Frame, jets: Sequence[Jet], given: Support) -> Any:
        """Run the rule in the inner frame, and give its result the support."""
        args, kwargs = self.with_jets(jets)
        return outward(self.frame, inner, self.entry.rule(inner, self.func, *args, **kwargs), given)


def moves(jet: Jet) -> bool:
    """Whether a jet has a coefficient with directions."""
    return any(each is not None and jet.frame.has_axis(k) for k, each in enumerate(jet.in_slots()))


def outward(frame: Frame, inner: Frame, result: Any, given: Support) -> Any:
    """Convert results of the inner frame to jets of the outer frame."""
    if isinstance(result, Jet) and result.frame is inner:
        rank = result.value.ndim
        own = given if given.ndim == rank else support(given.aligned(rank), given.directions)
        return new_jet(frame, result.coefficients, own)
    if isinstance(result, (list, tuple)):
        return type(result)([outward(frame, inner, each, given) for each in result])
    return result


def placed(jet: Jet, inner: Frame, places: Places | None) -> Jet:
    """Move a jet's slots to places, in a frame whose directions are the places."""
    held, frame = jet.in_slots(), jet.frame
    if places is None or places.stay:
        return new_jet(inner, held)
    value, shape = held[0], tuple(held[0].shape)
    if not places.same_everywhere:
        # An element whose slots differ between the positions it is broadcast to is repeated.
        shape = tuple(torch.broadcast_shapes(value.shape, places.target.shape[1:]))
    found: list[Any] = [value.expand(shape)]
    for k, each in enumerate(held[1:], start=1):
        if each is None:
            found.append(None)
        elif frame.has_axis(k):
            own = each.reshape(len(each), *[1] * (len(shape) - value.ndim), *value.shape)
            found.append(places(own.expand(len(each), *shape)))
        else:
            found.append(each.expand(shape))
    return new_jet(inner, found)


def mapped_jet(jet: Jet, given: Support | None, function: Callable[[Any], Any], slots: Callable[[Any], Any]) -> Jet:
    """Apply a linear function to coefficients, and `slots` to coefficients with directions."""
    parts = [
        None if each is None else slots(each) if jet.frame.has_axis(k) else function(each)
        for k, each in enumerate(jet.in_slots())
    ]
    return new_jet(jet.frame, parts, given)


def together(call: Call) -> tuple[Frame, list[Jet], Support] | None:
    """Bring jets to the common slots of their elementwise result; None if there are too many slots."""
    rank = max(jet.value.ndim for jet in call.jets)
    supports = list(dict.fromkeys(jet.support for jet in call.jets if moves(jet)))
    if len(supports) == 1 and supports[0].ndim == rank:
        inner = call.inner_frame(supports[0].slots)
        return inner, [new_jet(inner, jet.in_slots()) for jet in call.jets], supports[0]
    found = united(tuple(supports), rank)
    if found is None:
        return None
    common, places = found
    inner = call.inner_frame(common.slots)
    where = dict(zip(supports, places, strict=True))
    return inner, [placed(jet, inner, where.get(jet.support)) for jet in call.jets], common
