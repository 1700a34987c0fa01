r"""Lesson 28: straight-through estimators, and why they are clipped.

$$ y = \operatorname{sign} x, \qquad \text{with the derivatives of } s(x) = \operatorname{clamp}(x, -1, 1), \qquad
   s' = [\,|x| \le 1\,], \quad s'' = 0 $$

The slope of the sign is zero wherever it exists, so no gradient reaches the rounded numbers. A straight-through
estimator keeps the values and takes the derivatives of a *surrogate* s. With $s(x) = x$ all gradients pass, and latent
weights may drift far beyond 1, although the value does not depend on their size. The clipped surrogate stops them.
`main` trains eight weights of ±1 with each estimator.

The rule does not agree with any derivative of the values, on purpose. `check(..., approximate=True)` compares the
routes with each other, and reports the difference between the claimed derivative and the values' derivative. All orders
have to use the same surrogate: `backward` and `jvp` both use s', and must be differentiable if the surrogate is curved.
`hodiff.functions.straight_through(forward, surrogate)` makes such Functions.

    python examples/functions/28_straight_through.py

Exercise: write `Ternary`, which rounds to the nearest of -1, 0 and 1 (a half goes to 0, beyond ±1 it stays there), with
the surrogate $\tanh x$, right to third order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lesson_tools import print_table
from torch import Tensor
from torch.autograd import Function

import hodiff
from hodiff.functions import nestable_jvp, sign_ste

INPUTS = (torch.tensor([0.5, -1.2, -0.3, 2.0], dtype=torch.float64),)


class ClippedSign(Function):
    r"""$\operatorname{sign} x$ with the slope of $\operatorname{clamp}(x, -1, 1)$. Saves the input."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """Compute the value."""
        return x.sign()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        """Save the input."""
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        r"""$[\,|x| \le 1\,] ȳ$."""
        (x,) = ctx.saved_tensors
        return (x.abs() <= 1) * cotangent

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        r"""$[\,|x| \le 1\,] ẋ$."""
        (x,) = ctx.saved_tensors
        return (x.abs() <= 1) * tangent


ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "the true slope, 0": torch.sign,
    "straight through": sign_ste,
    "clipped": ClippedSign.apply,
}


def train(sign: Callable[[Tensor], Tensor], steps: int = 2000) -> tuple[float, float, float]:
    """Fit signs of eight weights to data; return the loss before and after, and the largest latent weight."""
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(64, 8, generator=generator)
    targets = X @ torch.linspace(-1.5, 1.5, 8)
    weights = (0.1 * torch.randn(8, generator=generator)).requires_grad_()

    def loss() -> Tensor:
        return (X @ sign(weights) - targets).square().mean()

    before = loss().item()
    for _ in range(steps):
        (gradient,) = torch.autograd.grad(loss(), weights)
        weights.data -= 0.01 * gradient
    return before, loss().item(), weights.abs().max().item()


def draw(figure: Any) -> None:
    """The values, the surrogate, and the slope of all derivatives."""
    axes = figure.add_subplot()
    x = torch.linspace(-2, 2, 801, dtype=torch.float64)
    axes.plot(x, ClippedSign.apply(x), label="values, sign x")
    axes.plot(x, x.clamp(-1, 1), "--", label="surrogate, clamp(x, -1, 1)")
    axes.plot(x, torch.vmap(torch.func.grad(ClippedSign.apply))(x), ":", label="slope that backward uses")
    axes.set_xlabel("x")
    axes.legend()


def main() -> hodiff.Report:
    """Print how each estimator trains, and check the routes of ClippedSign against each other."""
    rows = [(name, *(f"{number:.2f}" for number in train(sign))) for name, sign in ESTIMATORS.items()]
    print_table(("estimator", "loss before", "loss after", "largest latent weight"), rows)
    report = hodiff.check(ClippedSign, INPUTS, order=3, approximate=True)
    print(report)
    return report


if __name__ == "__main__":
    main()
