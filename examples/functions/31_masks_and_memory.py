r"""Lesson 31: the memory of masks: bytes, not bits.

$$ y = \begin{cases} x & x > 0 \\ a x & \text{else} \end{cases}, \qquad
   \bar x = m \, \bar y, \quad \dot y = m \, \dot x, \qquad
   m = \begin{cases} 1 & x > 0 \\ a & \text{else} \end{cases} $$

The slope m has two values, so one bit per number is all that backward needs. A `torch.bool` takes a *byte*, a quarter
of a float32; an eighth of a byte would be possible (the exercise). Torch's own `leaky_relu` keeps x. If the next layer
saves y anyway, saving y is free, and better than any mask.

The mask is computed in `forward`, and it is not an input. Lesson 22 calls this a defect, for x. Here it is right, as
the mask does not change with x except at the kink. `setup_context` should compute nothing. The mask is therefore an
output that is marked as not differentiable, like the index of lesson 15, and a plain function hides it.

    python examples/functions/31_masks_and_memory.py

Exercise: write `packed_leaky_relu(x)` for a = 0.1, which keeps one bit for each number: eight of them in a
`torch.uint8`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from lesson_tools import draw_bars, saved_bytes
from torch import Tensor
from torch.autograd import Function

import hodiff
from hodiff.functions import nestable_jvp

INPUTS = (torch.tensor([0.5, -1.2, 2.0], dtype=torch.float64), 0.1)


class LeakyRelu(Function):
    """Function $m x$, with a mask of positive x as a second output. Saves the mask, one byte per number."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, a: float) -> tuple[Tensor, Tensor]:
        """Compute the value and the mask."""
        positive = x > 0
        return torch.where(positive, x, a * x), positive

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: tuple[Tensor, Tensor]) -> None:
        """Save the mask, and keep the number."""
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])
        ctx.save_for_forward(output[1])
        ctx.a = inputs[1]

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor, mask_cotangent: Any) -> tuple[Tensor, None]:
        """$m ȳ$."""
        del mask_cotangent
        (positive,) = ctx.saved_tensors
        return torch.where(positive, cotangent, ctx.a * cotangent), None

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, tangent: Tensor, a_tangent: None) -> tuple[Tensor, None]:
        """$m ẋ$, and no tangent of the mask."""
        del a_tangent
        (positive,) = ctx.saved_tensors
        return torch.where(positive, tangent, ctx.a * tangent), None


def leaky_relu(x: Tensor, a: float = 0.1) -> Tensor:
    """Return the value alone."""
    return LeakyRelu.apply(x, a)[0]


def bytes_kept(count: int = 1_000_000) -> dict[str, float]:
    """Measure the bytes per number that each way keeps of a float32 tensor that nothing else holds."""
    x = torch.randn(count, requires_grad=True)

    def kept(f: Any) -> float:
        # The product is an intermediate result, so nothing else keeps it.
        return (saved_bytes(lambda x: f(2 * x), x) - saved_bytes(lambda x: 2 * x, x)) / count

    return {"torch's leaky_relu": kept(F.leaky_relu), "a mask of torch.bool": kept(leaky_relu)}


def draw(figure: Any) -> None:
    """Memory kept for backward per float32 number; one bit would be 0.125 bytes."""
    draw_bars(figure.add_subplot(), {**bytes_kept(), "one bit": 1 / 8}, "bytes a number", "{:g}")


def main() -> hodiff.Report:
    """Print the memory kept, and check leaky_relu by every route to third order."""
    for name, size in bytes_kept().items():
        print(f"{name}: {size:g} bytes a number")
    report = hodiff.check(leaky_relu, INPUTS, order=3)
    print(report)
    return report


if __name__ == "__main__":
    main()
