"""The calls of Taylor mode that are under way in a thread, one inside of the other."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree

from hodiff.taylor.jets import Jet
from hodiff.taylor.series import Frame
from hodiff.torch_internals.autograd.transforms import transform_count


class _Running(threading.local):
    def __init__(self) -> None:
        self.frames: list[Frame] = []
        # Of functions under way that know no jets, how deep the call was that each was called in.
        self.knowing_none: list[int] = []
        # Where derivatives are switched off: inside of how many calls, and of how many transforms; None where they are
        # on.
        self.constant: tuple[int, int] | None = None


_RUNNING = _Running()
# A compiler traces one thread, and no threading.local.
_traced: list[Frame] = []


def frames() -> list[Frame]:
    """From the outermost."""
    return _traced if torch.compiler.is_compiling() else _RUNNING.frames


def is_running() -> bool:
    """Whether there is any."""
    return bool(frames())


@contextmanager
def under_way(frame: Frame) -> Iterator[None]:
    """A call, deeper than those around it."""
    running = frames()
    running.append(frame)
    constant = None if torch.compiler.is_compiling() else _RUNNING.constant
    try:
        yield
    finally:
        running.pop()
        if not torch.compiler.is_compiling():
            # What a function has switched and not switched back is forgotten.
            _RUNNING.constant = constant


def at_the_moment(tree: Any) -> Any:
    """A tree with tensors in the place of jets that stand for a point of their curve, or are constant here."""
    if torch.compiler.is_compiling():
        off = not torch.is_grad_enabled()
    else:
        off = torch.is_inference_mode_enabled() or _RUNNING.constant is not None
    if not off and not any(frame.moment is not None for frame in frames()):
        return tree
    return pytree.tree_map_only(Jet, _point, tree)


def _point(jet: Any) -> Any:
    while isinstance(jet, Jet):
        if jet.frame.moment is not None:
            jet = jet.frame.moment(jet)
        elif is_constant_here(jet.frame):
            jet = jet.value
        else:
            break
    return jet


def as_constant(jet: Jet) -> Any:
    """The point of a jet where a call is constant."""
    return jet.value


def is_moving(x: Any) -> bool:
    """Whether a value is a jet with derivatives, which are not switched off here."""
    if not isinstance(x, Jet) or x.frame.ended or x.frame.moment is as_constant:
        return False
    if x.frame.moment is None and is_constant_here(x.frame):
        return False
    return any(each is not None for each in x.in_slots()[1:])


class JetMet(BaseException):
    """A jet is met in a function that knows none."""

    def __init__(self, frame: Frame):
        super().__init__()
        self.frame = frame


@contextmanager
def knowing_no_jets() -> Iterator[None]:
    """A function that knows no jets runs: whoever meets one says so."""
    _RUNNING.knowing_none.append(len(_RUNNING.frames))
    try:
        yield
    finally:
        _RUNNING.knowing_none.pop()


def must_not_be_met(frame: Frame) -> bool:
    """Whether jets of a call are met where a function runs that knows none."""
    found = _RUNNING.knowing_none
    return bool(found) and frame.depth <= found[-1]


def is_constant_here(frame: Frame) -> bool:
    """Whether what a call makes of jets is constant, as derivatives are switched off inside of their function."""
    if torch.compiler.is_compiling():
        # A compiler sees no switch; every pass is begun with them on there.
        return frame.mode is not None and not torch.is_grad_enabled()
    if torch.is_inference_mode_enabled():
        return True
    constant = _RUNNING.constant
    return constant is not None and frame.depth <= constant[0]


# Where a block keeps what it has to restore.
_BEFORE = "_hodiff_jets_before"


def switch(how: str, block: Any, enabled: bool) -> None:
    """Derivatives are switched off or on, as `hodiff.torch_internals.autograd.grad_mode.switched_by` says."""
    if not _RUNNING.frames:
        return
    if block is not None and how != "leaves" and not hasattr(block, _BEFORE):
        setattr(block, _BEFORE, (_RUNNING.constant,))
    if how == "enters" or (how == "calls" and enabled != torch.is_grad_enabled()):
        constant = _RUNNING.constant
        if not enabled:
            _RUNNING.constant = (len(_RUNNING.frames), transform_count())
        elif constant is None or transform_count() <= constant[1]:
            # A transform lets its own gradients be recorded, inside of a block too.
            _RUNNING.constant = None
    elif how == "leaves" and hasattr(block, _BEFORE):
        (_RUNNING.constant,) = getattr(block, _BEFORE)
        delattr(block, _BEFORE)
