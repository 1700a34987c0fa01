"""Checks of closures and their return values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from hodiff.common.trees import describe
from hodiff.errors import InputError

Closure = Callable[[], Any]


def detached(value: Any) -> Any:
    """Detach the return value of a closure."""
    return value.detach() if isinstance(value, Tensor) else value


def require_loss(caller: str, loss: Any) -> None:
    """Raise unless the loss is one real number that depends on parameters."""
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        remedy = (
            "; return it, and in Lightning's manual optimization call step(closure=closure)" if loss is None else ""
        )
        got = describe(loss)
        raise InputError(f"{caller}: closure: expected it to return the loss, one real number, got {got}{remedy}.")
    if not loss.requires_grad:
        raise InputError(
            f"{caller}: closure: expected a loss with its graph, got one that hangs on no parameter; look for "
            ".detach(), .item() or torch.no_grad() in the closure."
        )


def require_closure(caller: str, closure: Any) -> None:
    """Raise if there is no closure."""
    if not callable(closure):
        raise InputError(
            f"{caller}: step: expected a closure that computes the loss and returns it, as a step takes the loss at "
            f"more than one point, got {closure!r}; pass step(lambda: criterion(model(inputs), targets))."
        )
