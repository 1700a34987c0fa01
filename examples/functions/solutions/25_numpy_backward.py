"""Solution of exercise 25: each slope is again a Function, as sine and cosine are each other's slopes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function

from hodiff.functions import nestable_jvp


def by_numpy(f: Any, x: Tensor) -> Tensor:
    """Compute by NumPy, outside of torch."""
    return torch.as_tensor(f(x.detach().numpy()))


class Sine(Function):
    r"""$\sin x$. Saves the input."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """Compute the value."""
        return by_numpy(np.sin, x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        """Save the input."""
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        r"""Compute $\cos(x) ȳ$."""
        (x,) = ctx.saved_tensors
        return Cosine.apply(x) * cotangent

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        r"""Compute $\cos(x) ẋ$."""
        (x,) = ctx.saved_tensors
        return Cosine.apply(x) * tangent

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int], x: Tensor) -> tuple[Tensor, int]:
        """Keep the batch dimension."""
        del info
        return Sine.apply(x), in_dims[0]


class Cosine(Function):
    r"""$\cos x$. Saves the input."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """Compute the value."""
        return by_numpy(np.cos, x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        """Save the input."""
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        r"""Compute $-\sin(x) ȳ$."""
        (x,) = ctx.saved_tensors
        return -Sine.apply(x) * cotangent

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        r"""Compute $-\sin(x) ẋ$."""
        (x,) = ctx.saved_tensors
        return -Sine.apply(x) * tangent

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int], x: Tensor) -> tuple[Tensor, int]:
        """Keep the batch dimension."""
        del info
        return Cosine.apply(x), in_dims[0]
