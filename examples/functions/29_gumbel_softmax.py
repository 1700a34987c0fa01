r"""Lesson 29: Gumbel-softmax, with noise as an argument.

$$ y = p\Big(\frac{x + g}{τ}\Big), \quad p = \operatorname{softmax}, \qquad
   \bar x = \frac{1}{τ} J \bar y, \quad \dot y = \frac{1}{τ} J (\dot x + \dot g), \qquad
   J z = p \circ (z - \langle p, z \rangle) $$

The output is a sample of a class, softened by a temperature τ so that it has a derivative in the logits x; g is Gumbel
noise, $g = -\log(-\log u)$ for uniform u. The noise is an *argument* of the Function, drawn once, outside. If `forward`
draws it, each call is another function: a second derivative, a checkpoint or differences would recompute it with other
noise than the value, and `vmap` raises. `main` shows both. With the noise as an argument, all derivatives use the same
draw, which can be repeated.

The gradient is the gradient of the soft sample. Passing $\bar y$ through unchanged, as for rounding, is not its
derivative.

    python examples/functions/29_gumbel_softmax.py

Exercise: write `hard_sample(logits, noise, temperature)`, whose values are the one-hot vector of the largest element of
x + g and whose derivatives of every order are those of the soft sample.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from lesson_tools import outcome, print_table
from torch import Tensor
from torch.autograd import Function

import hodiff
from hodiff.functions import nestable_jvp

INPUTS = (
    torch.tensor([0.5, -1.2, 0.3], dtype=torch.float64),
    torch.tensor([1.1, 0.4, -0.7], dtype=torch.float64),
    0.7,
)


class PerturbedSoftmax(Function):
    r"""$\operatorname{softmax}((x + g)/τ)$ over the last dimension, for a number τ. Saves the output."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, g: Tensor, temperature: float) -> Tensor:
        """Compute the value."""
        return torch.softmax((x + g) / temperature, -1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
        """Save different tensors for reverse and forward mode; keep the temperature."""
        x, g, ctx.temperature = inputs
        ctx.save_for_backward(output)
        ctx.save_for_forward(x, g)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        r"""$\frac{1}{τ} J ȳ$ for both inputs, as the function depends on their sum."""
        (p,) = ctx.saved_tensors
        gradient = softmax_derivative(p, cotangent) / ctx.temperature
        x_needed, g_needed, _ = ctx.needs_input_grad
        return gradient if x_needed else None, gradient if g_needed else None, None

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, x_tangent: Tensor, g_tangent: Tensor, temperature_tangent: None) -> Tensor:
        r"""$\frac{1}{τ} J (ẋ + ġ)$."""
        del temperature_tangent
        x, g = ctx.saved_tensors
        p = PerturbedSoftmax.apply(x, g, ctx.temperature)
        return softmax_derivative(p, x_tangent + g_tangent) / ctx.temperature


def softmax_derivative(p: Tensor, z: Tensor) -> Tensor:
    """Compute $J z$, with the Jacobian of softmax at the output p; it is symmetric."""
    return p * (z - (p * z).sum(-1, keepdim=True))


def draw_noise(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Draw Gumbel noise, float64; an exponential number is minus the logarithm of a uniform number."""
    return -torch.empty(shape, dtype=torch.float64).exponential_(generator=generator).log()


class NoisySoftmax(PerturbedSoftmax):
    """Function with the noise drawn in `forward`, which is the mistake."""

    @staticmethod
    def forward(x: Tensor, g: Tensor, temperature: float) -> Tensor:
        """Draw the noise, then compute the value."""
        del g
        noise = -torch.empty_like(x).exponential_().log()
        return torch.softmax((x + noise) / temperature, -1)


def batch_of_one(function: type[Function], x: Tensor, g: Tensor, temperature: float) -> Tensor:
    """Return the first class of a batch of one."""
    return torch.vmap(lambda x: function.apply(x, g, temperature)[0])(x[None])


def draw(figure: Any) -> None:
    """Samples of three classes with probabilities 0.6, 0.3 and 0.1, which are the corners, at three temperatures."""
    corners = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.5, 0.75**0.5]], dtype=torch.float64)
    logits = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64).log()
    noise = draw_noise((300, 3), torch.Generator().manual_seed(0))
    for k, temperature in enumerate((3.0, 1.0, 0.1)):
        axes = figure.add_subplot(1, 3, k + 1)
        points = PerturbedSoftmax.apply(logits, noise, temperature) @ corners
        outline = corners[[0, 1, 2, 0]]
        axes.plot(outline[:, 0], outline[:, 1], color="black", linewidth=0.7)
        axes.scatter(points[:, 0], points[:, 1], s=4, alpha=0.5)
        axes.set_title(f"τ = {temperature:g}")
        axes.set_aspect("equal")
        axes.axis("off")


def main() -> hodiff.Report:
    """Print the results of both Functions called twice, and in a batch; check the right one to third order."""
    x, g, temperature = INPUTS
    rows = []
    for function in (NoisySoftmax, PerturbedSoftmax):
        first, second = (function.apply(x, g, temperature)[0] for _ in range(2))
        batched = outcome(partial(batch_of_one, function, x, g, temperature))
        rows.append((function.__name__, f"{first:.4f}", f"{second:.4f}", batched))
    print_table(("first class", "a call", "another", "in a batch"), rows)
    report = hodiff.check(PerturbedSoftmax, INPUTS, order=3)
    print(report)
    return report


if __name__ == "__main__":
    main()
