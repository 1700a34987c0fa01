r"""Lesson 36: in place, and `mark_dirty`.

$$ x \leftarrow \begin{cases} x & x > 0 \\ a x & \text{else} \end{cases}, \qquad
   \bar x = m \, \bar y, \quad \dot y = m \, \dot x, \qquad
   m = \begin{cases} 1 & y > 0 \\ a & \text{else} \end{cases} $$

A Function that writes into its input must declare it by `ctx.mark_dirty`, and return the input. From then on, the graph
of x goes through the Function, and a node that saved x before raises instead of using changed numbers. `main` also runs
a Function without the mark: gradients bypass it, with slope 1, without a warning.

The old x is overwritten, so backward has to use y, whose sign is that of x for a > 0. No extra memory is needed. `jvp`
writes into the tangent as `forward` did into the input, and returns it. In forward mode, y cannot give a slope that
depends on x (lesson 3), so this works for piecewise linear functions.

A leaf that requires a gradient cannot be overwritten, and a tensor that a caller still needs should not be. The plain
wrapper therefore copies x. Use the in-place Function directly after a copy.

    python examples/functions/36_in_place.py

Exercise: write `InPlaceNegation`, $x \leftarrow -x$ in place. Nothing has to be saved.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from lesson_tools import draw_bars, outcome, saved_bytes
from torch import Tensor
from torch.autograd import Function

import hodiff
from hodiff.functions import nestable_jvp

INPUTS = (torch.tensor([0.5, -1.2, 2.0], dtype=torch.float64),)
SLOPE = 0.1


class InPlaceLeakyRelu(Function):
    """In-place leaky rectifier. Saves the output."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """Write into x, and return it."""
        return x.mul_(slopes(x))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        """Mark the input as modified, and save it."""
        ctx.mark_dirty(*inputs)
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        """$m ȳ$."""
        (y,) = ctx.saved_tensors
        return slopes(y) * cotangent

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        """Write into the tangent, too."""
        (y,) = ctx.saved_tensors
        return tangent.mul_(slopes(y))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int], x: Tensor) -> tuple[Tensor, int]:
        """Keep the batch dimension."""
        del info
        return InPlaceLeakyRelu.apply(x), in_dims[0]


class Unmarked(Function):
    """In-place $0.1 x$ without the mark, which is the mistake. Saves nothing."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """Write into x, and return it."""
        return x.mul_(SLOPE)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        """Save nothing, and mark nothing."""

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        """$0.1 ȳ$."""
        return SLOPE * cotangent


def slopes(x: Tensor) -> Tensor:
    """Return 1 where x is positive, else a."""
    return torch.full_like(x, SLOPE).masked_fill(x > 0, 1.0)


def leaky_relu(x: Tensor) -> Tensor:
    """Compute the leaky rectifier of a copy, which leaves the tensor unchanged."""
    return InPlaceLeakyRelu.apply(x.clone())


def slope_of(function: type[Function]) -> Tensor:
    """Compute the gradient at -2 of a copy that the Function modifies before it is read."""
    x = torch.tensor(-2.0, requires_grad=True)
    copy = x.clone()
    function.apply(copy)
    return torch.autograd.grad(copy, x)[0]


def square_saved_before() -> Tensor:
    """Compute the gradient of a square whose input is modified afterwards."""
    x = torch.tensor(-2.0, requires_grad=True)
    copy = x.clone()
    square = copy**2
    InPlaceLeakyRelu.apply(copy)
    return torch.autograd.grad(square, x)[0]


def bytes_held() -> dict[str, float]:
    """Measure the megabytes of saved tensors and the result, after a call on a million float32 numbers."""
    x = torch.randn(1_000_000, requires_grad=True)
    return {
        "out of place": saved_bytes(lambda x: F.leaky_relu(2 * x), x, with_output=True) / 1e6,
        "in place": saved_bytes(lambda x: InPlaceLeakyRelu.apply(2 * x), x, with_output=True) / 1e6,
    }


def draw(figure: Any) -> None:
    """Memory held after a call on a million float32 numbers: in place, the saved tensor is the result."""
    draw_bars(figure.add_subplot(), bytes_held(), "megabytes", "{:g}")


def main() -> hodiff.Report:
    """Print gradients with and without the mark, and check leaky_relu by every route to third order."""
    for name, size in bytes_held().items():
        print(f"{name}: {size:g} MB held")
    print(f"gradient at -2, marked: {outcome(lambda: slope_of(InPlaceLeakyRelu))}")
    print(f"gradient at -2, not marked: {outcome(lambda: slope_of(Unmarked))}")
    print(f"a square that had saved x: {outcome(square_saved_before)}")
    print(f"a leaf: {outcome(lambda: InPlaceLeakyRelu.apply(torch.ones((), requires_grad=True)))}")
    report = hodiff.check(leaky_relu, INPUTS, order=3)
    print(report)
    return report


if __name__ == "__main__":
    main()
