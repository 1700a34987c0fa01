"""Switches of gradient recording: torch shows them to function modes, but not the block that causes them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch.autograd import functional

# The enter and exit code of blocks that switch. `no_grad` creates a `set_grad_enabled` of its own. Compare by
# identity: code that dynamo writes may hold a dict among its constants, and then cannot be hashed.
_BLOCKS = (torch.no_grad, torch.enable_grad, torch.set_grad_enabled)
_ENTERS = {id(each.__enter__.__code__) for each in _BLOCKS}
_LEAVES = {id(each.__exit__.__code__) for each in _BLOCKS}
# `set_grad_enabled` already switches when it is created, even if it is never entered.
_MADE = torch.set_grad_enabled.__init__.__code__


class _Constants(threading.local):
    """The number of differentiating transforms around the block that switched gradients off; None if none did."""

    def __init__(self) -> None:
        # Not a class attribute: dynamo's guards would see the instance attribute appear.
        self.depth: int | None = None


CONSTANTS = _Constants()


@contextmanager
def nothing_constant() -> Iterator[None]:
    """Start without constants, as a transform does, and restore the state that a function may leave switched."""
    depth, CONSTANTS.depth = CONSTANTS.depth, None
    try:
        yield
    finally:
        CONSTANTS.depth = depth


def switched_by() -> tuple[str, Any]:
    """Return how this call switches, "enters", "leaves" or else "calls", and the block, or None if unknown."""
    frame: FrameType | None = sys._getframe(1)
    made = None
    for _ in range(10):
        if frame is None:
            break
        if id(frame.f_code) in _ENTERS:
            return "enters", frame.f_locals["self"]
        if id(frame.f_code) in _LEAVES:
            return "leaves", frame.f_locals["self"]
        if frame.f_code is _MADE:
            made = frame.f_locals["self"]
        frame = frame.f_back
    return "calls", made


def in_torch_autograd_functional() -> bool:
    """Whether a function of `torch.autograd.functional` makes this call, on inputs that it has detached."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(10):
        if frame is None:
            return False
        if frame.f_code is _PREPARES:
            return True
        frame = frame.f_back
    return False


_PREPARES = functional._grad_preprocess.__code__
