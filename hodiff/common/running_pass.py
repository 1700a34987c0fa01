"""The pass of a function over tensor-like values that runs in this thread, such as a pass of Taylor mode."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol


class Pass(Protocol):
    """Methods of a pass that functions of lower rooms call while it runs."""

    def call_closing_over(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function whose function arguments may close over values of the pass, or return NotImplemented."""

    def tensors_alone(self) -> AbstractContextManager[Any]:
        """Return a context for code that would treat values of the pass as constants."""

    def switched(self, how: str, block: Any, enabled: bool) -> None:
        """Follow a switch of gradients, as `hodiff.torch_internals.autograd.grad_mode.switched_by` reports it."""


class _Running(threading.local):
    innermost: Pass | None = None


_RUNNING = _Running()


def running_pass() -> Pass | None:
    """Innermost pass that runs in this thread."""
    return _RUNNING.innermost


@contextmanager
def running(new: Pass) -> Iterator[None]:
    """Make a pass the innermost one within the block."""
    before, _RUNNING.innermost = _RUNNING.innermost, new
    try:
        yield
    finally:
        _RUNNING.innermost = before
