r"""Lesson 18: an argument that may be missing.

$$ y = w x + b \quad \text{or} \quad y = w x, \qquad \bar x = w \bar y, \quad \bar w = x \bar y, \quad \bar b = \bar y,
   \qquad \dot y = w \dot x + x \dot w + \dot b $$

The only second derivative is $y_{wx} = 1$. A missing bias is None. `backward` still returns three gradients; the last
is None, because `needs_input_grad` is False for a missing bias. A missing bias has no tangent either.

    python examples/functions/18_optional_bias.py

Exercise: write `scale(x, w=None, b=None)`, $w x + b$, in which either may be missing, or both.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

import hodiff
from hodiff.functions import nestable_jvp

INPUTS = tuple(torch.tensor(numbers, dtype=torch.float64) for numbers in ([0.5, -1.2], [2.0, 0.3], [-0.7, 1.1]))


class Affine(Function):
    """Function $w x + b$ for tensors of one shape; b may be None. Saves x and w."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        """Compute the value."""
        return w * x if b is None else w * x + b

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
        """Save x and w."""
        ctx.save_for_backward(*inputs[:2])
        ctx.save_for_forward(*inputs[:2])

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return one gradient per argument, None for a missing argument."""
        x, w = ctx.saved_tensors
        x_needed, w_needed, b_needed = ctx.needs_input_grad
        return (
            w * cotangent if x_needed else None,
            x * cotangent if w_needed else None,
            cotangent if b_needed else None,
        )

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, x_tangent: Tensor, w_tangent: Tensor, b_tangent: Tensor | None) -> Tensor:
        """Apply the product rule; the tangent of a missing bias is None."""
        x, w = ctx.saved_tensors
        tangent = w * x_tangent + x * w_tangent
        return tangent if b_tangent is None else tangent + b_tangent


def affine(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    """Compute $w x$, plus b if it is given."""
    return Affine.apply(x, w, b)


def with_and_without(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return both uses, to check them at once."""
    return affine(x, w, b), affine(x, w)


def draw(figure: Any) -> None:
    """The graphs of backward with a bias and without: a missing bias has no node."""
    tensors = dict(zip("xwb", INPUTS, strict=True))
    for k, names in enumerate(("xwb", "xw")):
        given = {name: tensors[name] for name in names}
        axes = figure.add_subplot(1, 2, k + 1)
        hodiff.plot.graph(lambda p: affine(**p).sum(), given, order=1).draw(axes)
        axes.set_title("with a bias" if "b" in given else "without", fontsize="medium")


def main() -> hodiff.Report:
    """Check both uses by every route to third order."""
    report = hodiff.check(with_and_without, INPUTS, order=3)
    print(report)
    return report


if __name__ == "__main__":
    main()
