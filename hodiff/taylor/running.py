"""Stack of the Taylor-mode calls that are running in a thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hodiff.taylor.series import Frame
from hodiff.torch_internals.autograd.transforms import transform_count


class _Running(threading.local):
    def __init__(self) -> None:
        self.frames: list[Frame] = []
        # Number of calls around each running function that does not support jets.
        self.knowing_none: list[int] = []
        # Numbers of calls and of transforms around the place where derivatives are switched off; None where they are
        # on.
        self.constant: tuple[int, int] | None = None


_RUNNING = _Running()
# A compiler traces a single thread and does not support threading.local.
_traced: list[Frame] = []


def frames() -> list[Frame]:
    """Frames of the running calls, outermost first."""
    return _traced if torch.compiler.is_compiling() else _RUNNING.frames


def is_running() -> bool:
    """Whether a Taylor-mode call is running."""
    return bool(frames())


@contextmanager
def under_way(frame: Frame) -> Iterator[None]:
    """Push a frame onto the stack of running calls."""
    running = frames()
    running.append(frame)
    constant = None if torch.compiler.is_compiling() else _RUNNING.constant
    try:
        yield
    finally:
        running.pop()
        if not torch.compiler.is_compiling():
            # Discard a switch that the function did not undo.
            _RUNNING.constant = constant


def as_constant(jet: Any) -> Any:
    """Return the value of a jet: the point function of `moment` for constant jets."""
    return jet.value


class JetMet(BaseException):
    """Raised when a function that does not support jets meets one."""

    def __init__(self, frame: Frame):
        super().__init__()
        self.frame = frame


@contextmanager
def knowing_no_jets() -> Iterator[None]:
    """Mark that a function without support for jets runs, so that meeting a jet raises `JetMet`."""
    _RUNNING.knowing_none.append(len(_RUNNING.frames))
    try:
        yield
    finally:
        _RUNNING.knowing_none.pop()


def must_not_be_met(frame: Frame) -> bool:
    """Whether a frame's jets are used inside a function that does not support jets."""
    found = _RUNNING.knowing_none
    return bool(found) and frame.depth <= found[-1]


def some_are_constant() -> bool:
    """Whether derivatives were switched off inside the function of a running call."""
    if torch.compiler.is_compiling():
        return not torch.is_grad_enabled()
    return torch.is_inference_mode_enabled() or _RUNNING.constant is not None


def is_constant_here(frame: Frame) -> bool:
    """Whether a frame's jets are constant, because derivatives were switched off inside its function."""
    if torch.compiler.is_compiling():
        # A compiler does not see the switch; every traced pass starts with gradients enabled.
        return frame.mode is not None and not torch.is_grad_enabled()
    if torch.is_inference_mode_enabled():
        return True
    constant = _RUNNING.constant
    return constant is not None and frame.depth <= constant[0]


# Attribute in which a block stores the state to restore.
_BEFORE = "_hodiff_jets_before"


def switch(how: str, block: Any, enabled: bool) -> None:
    """Track gradient switches during a call, as `hodiff.common.running_pass.Pass.switched` receives them."""
    if block is not None and how != "leaves" and not hasattr(block, _BEFORE):
        setattr(block, _BEFORE, (_RUNNING.constant,))
    if how == "enters" or (how == "calls" and enabled != torch.is_grad_enabled()):
        constant = _RUNNING.constant
        if not enabled:
            _RUNNING.constant = (len(_RUNNING.frames), transform_count())
        elif constant is None or transform_count() <= constant[1]:
            # A transform that began inside the block enables gradients only for itself.
            _RUNNING.constant = None
    elif how == "leaves" and hasattr(block, _BEFORE):
        (_RUNNING.constant,) = getattr(block, _BEFORE)
        delattr(block, _BEFORE)
