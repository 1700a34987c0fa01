r"""Lesson 6: the sigmoid, whose backward calls the Function itself.

$$ σ(x) = \frac{1}{1 + e^{-x}}, \qquad σ' = σ(x)\,σ(-x), \qquad σ'' = σ' \, (σ(-x) - σ(x)) $$

Textbooks have $σ' = σ (1 - σ)$. For x = 40 in float64, σ rounds to 1 and $1 - σ$ to 0, so every derivative is lost;
$σ(-x)$ keeps all its digits. A formula that is differentiated again has to be stable itself. The simplest solution is
to call a Function that is right to every order. The price is that this Function saves the input, and computes two
sigmoids.

    python examples/functions/06_sigmoid.py

Exercise: write `Softplus`, $\log(1 + e^x)$, whose derivatives keep their digits at x = -40; its slope is a Function
that you have.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

import hodiff
from hodiff.functions import nestable_jvp

INPUTS = (torch.tensor([0.5, -1.2], dtype=torch.float64),)


class Sigmoid(Function):
    """$σ(x)$. Saves the input."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """Compute the value."""
        return x.sigmoid()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        """Save the input."""
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        """$σ(x) σ(-x) ȳ$."""
        (x,) = ctx.saved_tensors
        return Sigmoid.apply(x) * Sigmoid.apply(-x) * cotangent

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        """$σ(x) σ(-x) ẋ$."""
        (x,) = ctx.saved_tensors
        return Sigmoid.apply(x) * Sigmoid.apply(-x) * tangent


def draw(figure: Any) -> None:
    """The slope by this Function and by the textbook's formula, which is lost where σ rounds to 1."""
    axes = figure.add_subplot()
    x = torch.linspace(25, 45, 81, dtype=torch.float64)
    y = x.sigmoid()
    axes.semilogy(x, torch.vmap(torch.func.grad(Sigmoid.apply))(x), label="σ(x) σ(-x)")
    axes.semilogy(x, y * (1 - y), ".", label="σ (1 - σ), until it is 0")
    axes.set_xlabel("x")
    axes.set_ylabel("slope")
    axes.legend()


def main() -> hodiff.Report:
    """Print three derivatives at 40, and check Sigmoid by every route to third order."""
    f, x = Sigmoid.apply, torch.tensor(40.0, dtype=torch.float64)
    for order in (1, 2, 3):
        f = torch.func.grad(f)
        print(f"derivative {order} at 40: {f(x).item():.6e}")
    report = hodiff.check(Sigmoid, INPUTS, order=3)
    print(report)
    return report


if __name__ == "__main__":
    main()
