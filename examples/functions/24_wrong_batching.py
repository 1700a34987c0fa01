r"""Lesson 24, a defect: a batching rule that ignores the position of the batch dimension.

$$ y = \frac{1}{n} \sum_i x_i, \qquad \bar x_i = \frac{\bar y}{n} $$

This is the mean of lesson 14, but its `vmap` does not move the batch to the front. With the batch in front, as in most
tests, everything is right. With the batch last, the mean runs over the samples instead.

    python examples/functions/24_wrong_batching.py

Exercise: fix it for any position of the batch dimension: write `Mean` with a batching rule that does not move the
batch, but takes the mean over the last of the *other* dimensions.
"""

from __future__ import annotations

from typing import Any

import torch
from lesson_tools import draw_matrix
from torch import Tensor
from torch.autograd import Function

import hodiff
from hodiff.functions import nestable_jvp

INPUTS = (torch.tensor([0.5, -1.2, 2.0], dtype=torch.float64),)


class Mean(Function):
    r"""$\frac{1}{n} \sum_i x_i$ over the last dimension, wrong in batches. Saves nothing."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """Compute the value."""
        return x.mean(-1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        """Keep the shape."""
        ctx.shape = inputs[0].shape

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        """Repeat the cotangent, divided by the count."""
        return (cotangent / ctx.shape[-1]).unsqueeze(-1).expand(ctx.shape)

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        """Apply the function itself, as it is linear."""
        return tangent.mean(-1)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int], x: Tensor) -> tuple[Tensor, int]:
        """Assume that the batch is in front, which is the defect."""
        del info, in_dims
        return Mean.apply(x), 0


def draw(figure: Any) -> None:
    """Means of three samples that are columns: by a loop, and by the batching rule, which averages rows."""
    x = torch.tensor([[1.0, 2.0, 3.0], [5.0, 6.0, 7.0], [9.0, 10.0, 14.0]], dtype=torch.float64)
    rows = {"a loop": torch.stack([Mean.apply(each) for each in x.T]), "vmap": torch.vmap(Mean.apply, 1)(x)}
    draw_matrix(figure.add_subplot(), torch.stack(list(rows.values())), "means", list(rows), ["0", "1", "2"])


def main() -> hodiff.Report:
    """Print what the check finds."""
    report = hodiff.check(Mean, INPUTS, order=3)
    print(report)
    return report


if __name__ == "__main__":
    main()
