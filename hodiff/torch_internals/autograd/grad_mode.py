"""Where reverse mode is switched off and on again, which torch tells function modes without saying by whom."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch.autograd import functional

# The ways into a block that switches, and out of it. `no_grad` makes a `set_grad_enabled` of its own.
# By identity: the code that dynamo writes may hold a dict among its constants, and then it cannot be hashed.
_BLOCKS = (torch.no_grad, torch.enable_grad, torch.set_grad_enabled)
_ENTERS = {id(each.__enter__.__code__) for each in _BLOCKS}
_LEAVES = {id(each.__exit__.__code__) for each in _BLOCKS}
# What a `set_grad_enabled` does before it is entered, if it ever is.
_MADE = torch.set_grad_enabled.__init__.__code__


class _Constants(threading.local):
    """Inside of how many differentiating transforms all that is computed is constant; None where nothing is."""

    def __init__(self) -> None:
        # Not on the class: dynamo's guards would see the attribute appear.
        self.depth: int | None = None


CONSTANTS = _Constants()


@contextmanager
def nothing_constant() -> Iterator[None]:
    """Begin anew, as a transform does, and leave nothing behind that a function has switched and not switched back."""
    depth, CONSTANTS.depth = CONSTANTS.depth, None
    try:
        yield
    finally:
        CONSTANTS.depth = depth


def switched_by() -> tuple[str, Any]:
    """What switches at this call: "enters" or "leaves", or else "calls", and the block; None where there is none."""
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
    """Whether the call is by a function of `torch.autograd.functional`, on its inputs, which it has detached."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(10):
        if frame is None:
            return False
        if frame.f_code is _PREPARES:
            return True
        frame = frame.f_back
    return False


_PREPARES = functional._grad_preprocess.__code__
