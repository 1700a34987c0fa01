"""Solution of exercise 21: the gradient is the output of a Function whose own backward refuses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


class LoudSine(Function):
    r"""$\sin x$, to be differentiated once. Saves the input."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """Compute the value."""
        return x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        """Save the input."""
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        """Hand over to the Function that refuses: its output depends on x, unlike that of a marked backward."""
        (x,) = ctx.saved_tensors
        return OnlyOnce.apply(x, cotangent)


class OnlyOnce(Function):
    r"""$\cos(x) ȳ$, which has no derivative."""

    @staticmethod
    def forward(x: Tensor, cotangent: Tensor) -> Tensor:
        """Compute the gradient."""
        return torch.cos(x) * cotangent

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        """Save nothing."""

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, Tensor]:
        """Refuse."""
        raise RuntimeError("LoudSine has no second derivative.")
