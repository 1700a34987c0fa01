r"""Lesson 15: a maximum, with an output that has no derivative.

$$ y = x_k, \quad k = \operatorname{arg\,max}_i x_i, \qquad \bar x_i = [i = k] \, \bar y, \qquad \dot y = \dot x_k $$

Away from ties k does not change, so the second derivative vanishes. At a tie, the first of the largest numbers gets all
of the gradient, by convention. The index k is an output, so that the rules can read it, but it does not depend on x
smoothly. `mark_non_differentiable` declares this, `backward` ignores its cotangent, and `jvp` has to return None for
it.

    python examples/functions/15_max.py

Exercise: write `Sort`, which returns the numbers of the last dimension in rising order, and where each came from.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

import hodiff
from hodiff.functions import nestable_jvp

INPUTS = (torch.tensor([[0.5, -1.2], [0.3, 2.0]], dtype=torch.float64),)


class Max(Function):
    """$(x_k, k)$ over the last dimension. Saves the index."""

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the largest number and its index."""
        index = x.argmax(-1)
        return x.gather(-1, index.unsqueeze(-1)).squeeze(-1), index

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
        """Save the index, and keep the shape."""
        index = output[1]
        ctx.mark_non_differentiable(index)
        ctx.save_for_backward(index)
        ctx.save_for_forward(index)
        ctx.shape = inputs[0].shape

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor, index_cotangent: Any) -> Tensor:
        """Put the cotangent at the place of the largest number."""
        del index_cotangent
        (index,) = ctx.saved_tensors
        return cotangent.new_zeros(ctx.shape).scatter(-1, index.unsqueeze(-1), cotangent.unsqueeze(-1))

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, tangent: Tensor) -> tuple[Tensor, None]:
        """Take the tangent of the largest number."""
        (index,) = ctx.saved_tensors
        return tangent.gather(-1, index.unsqueeze(-1)).squeeze(-1), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int], x: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        """Move the batch to the front."""
        del info
        return Max.apply(x.movedim(in_dims[0], 0)), (0, 0)


def draw(figure: Any) -> None:
    """The largest of t, 1 - t and 0.7, and the gradients of all three."""
    axes = figure.add_subplot()
    t = torch.linspace(0, 1, 201, dtype=torch.float64)
    numbers = torch.stack([t, 1 - t, torch.full_like(t, 0.7)], -1)
    axes.plot(t, Max.apply(numbers)[0], color="black", label="largest")
    gradients = torch.vmap(torch.func.grad(lambda x: Max.apply(x)[0]))(numbers)
    for k, name in enumerate(("t", "1 - t", "0.7")):
        axes.plot(t, gradients[:, k], "--", label=f"gradient by {name}")
    axes.set_xlabel("t")
    axes.legend()


def main() -> hodiff.Report:
    """Check Max by every route to third order."""
    report = hodiff.check(Max, INPUTS, order=3)
    print(report)
    return report


if __name__ == "__main__":
    main()
