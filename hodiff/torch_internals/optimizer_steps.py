"""Optimizer steps without the global optimizer hooks, which torch wraps around each class in use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer


def unhooked_step(kind: type[Optimizer]) -> Callable[..., Any]:
    """Return the step of a class of optimizers as it was written."""
    step: Callable[..., Any] = kind.step
    unhooked: Callable[..., Any] = step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]
    return unhooked


def step_with_own_hooks(optimizer: Optimizer) -> None:
    """Run an optimizer's step with its own hooks, inside of another optimizer's step, which runs global hooks."""
    for before in optimizer._optimizer_step_pre_hooks.values():
        before(optimizer, (optimizer,), {})
    unhooked_step(type(optimizer))(optimizer)
    for after in optimizer._optimizer_step_post_hooks.values():
        after(optimizer, (optimizer,), {})
