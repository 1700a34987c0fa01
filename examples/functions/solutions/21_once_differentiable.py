"""Solution of exercise 21: the gradient is the output of a Function whose own backward raises."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


class LoudSine(Function):
    r"""Function $\sin x$ that can be differentiated once. Saves the input."""

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
        """Call the Function that raises: its output depends on x, unlike that of a marked backward."""
        (x,) = ctx.saved_tensors
        return OnlyOnce.apply(x, cotangent)


class OnlyOnce(Function):
    r"""Function $\cos(x) ȳ$ without derivative."""

    @staticmethod
    def forward(x: Tensor, cotangent: Tensor) -> Tensor:
        """Compute the gradient."""
        return torch.cos(x) * cotangent

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        """Save nothing."""

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, Tensor]:
        """Raise an error."""
        raise RuntimeError("LoudSine has no second derivative.")
