"""Where reverse mode is switched off and on again, which torch tells function modes without saying by whom."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch

# The ways into a block without gradients, and out of it. `no_grad` makes a `set_grad_enabled` of its own.
_ENTERS = (torch.no_grad.__enter__.__code__, torch.set_grad_enabled.__enter__.__code__)
_LEAVES = (torch.no_grad.__exit__.__code__, torch.set_grad_enabled.__exit__.__code__)


def entered_block() -> Any:
    """The `torch.no_grad()` or `torch.set_grad_enabled(...)` that is being entered by this call, or None."""
    return _caller(_ENTERS)


def left_block() -> Any:
    """The one that is being left by this call, or None."""
    return _caller(_LEAVES)


def _caller(codes: tuple[Any, ...]) -> Any:
    """The `self` of the method that runs one of these codes, a few calls up."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(8):
        if frame is None:
            return None
        if frame.f_code in codes:
            return frame.f_locals["self"]
        frame = frame.f_back
    return None
