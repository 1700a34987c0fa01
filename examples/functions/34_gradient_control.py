r"""Lesson 34: hooks, and gradients that are stopped, scaled, reversed, clipped or made noisy.

$$ y = x, \qquad \bar x = c \, \bar y, \quad \dot y = c \, \dot x \qquad
   (c = 0 \text{ stops}, \; 0 < c < 1 \text{ scales}, \; c < 0 \text{ reverses}) $$

This is the identity, with a Jacobian c I of our choice. It is linear in $\bar y$ and $\dot x$, so both modes support
it, and all routes agree. As $y'$ is constant, the second derivative is 0.

Clipping and noise do not multiply by a number: $\operatorname{clamp}(\bar y)$ is not linear, and noise is not even a
function of $\bar y$. They have no Jacobian, so forward mode is undefined; `hodiff.functions.clip_gradient` and
`noise_gradient` raise there. A hook (`tensor.register_hook`) changes gradients in reverse mode, but *no* tangent:
routes disagree without a warning. `main` prints the effect of each on a gradient and on a tangent of 1. A function that
is differentiated twice needs a Function with both rules; hooks are for training loops.

    python examples/functions/34_gradient_control.py

Exercise: write `scheduled(x, strength)`, a gradient reversal $c = -λ$ whose λ is a tensor without dimensions that
changes during training. λ itself is a constant and gets no gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from lesson_tools import outcome, print_table
from torch import Tensor
from torch.autograd import Function

import hodiff
from hodiff import functions as hf
from hodiff.functions import nestable_jvp

INPUTS = (torch.tensor([0.5, -1.2], dtype=torch.float64), -0.5)


class ScaledGradient(Function):
    """Identity with Jacobian $c I$. Saves nothing."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, c: float) -> Tensor:
        """Copy the input, which must not be returned itself."""
        del c
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
        """Keep the number."""
        ctx.c = inputs[1]

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None]:
        """$c ȳ$."""
        return ctx.c * cotangent, None

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, tangent: Tensor, c_tangent: None) -> Tensor:
        """$c ẋ$."""
        del c_tangent
        return ctx.c * tangent


def hooked(x: Tensor) -> Tensor:
    """Return the input through a hook that halves the gradient."""
    y = x.clone()
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient / 2)
    return y


def noisy(x: Tensor) -> Tensor:
    """Return the input with noise on its gradient."""
    return hf.noise_gradient(x, 0.1, torch.Generator().manual_seed(0))


CONTROLS: dict[str, Callable[[Tensor], Tensor]] = {
    "stop": lambda x: ScaledGradient.apply(x, 0.0),
    "scale by 0.5": lambda x: ScaledGradient.apply(x, 0.5),
    "reverse": lambda x: ScaledGradient.apply(x, -1.0),
    "clip to ±0.25": lambda x: hf.clip_gradient(x, -0.25, 0.25),
    "noise of 0.1": noisy,
    "hook, halves": hooked,
}


def pulled(control: Callable[[Tensor], Tensor], gradient: float = 1.0) -> Tensor:
    """Pull a gradient back."""
    x = torch.zeros((), requires_grad=True)
    return torch.autograd.grad(control(x), x, torch.tensor(gradient))[0]


def pushed(control: Callable[[Tensor], Tensor]) -> Tensor:
    """Push a tangent of 1 forward."""
    return torch.func.jvp(control, (torch.zeros(()),), (torch.ones(()),))[1]


def draw(figure: Any) -> None:
    """The outgoing gradient against the incoming gradient; clipping is not linear, the other controls are."""
    axes = figure.add_subplot()
    incoming = torch.linspace(-1, 1, 41)
    for name, control in CONTROLS.items():
        outgoing = torch.stack([pulled(control, each.item()) for each in incoming])
        axes.plot(incoming, outgoing, ":" if control is hooked else "-", label=name)
    axes.set_xlabel("gradient that comes in")
    axes.set_ylabel("gradient that leaves")
    axes.legend()


def main() -> hodiff.Report:
    """Print the effect of each control in both modes, and check the routes of ScaledGradient against each other."""
    rows = [
        (name, outcome(partial(pulled, control)), outcome(partial(pushed, control)))
        for name, control in CONTROLS.items()
    ]
    print_table(("control", "gradient of 1", "tangent of 1"), rows)
    report = hodiff.check(ScaledGradient, INPUTS, order=3, approximate=True)
    print(report)
    return report


if __name__ == "__main__":
    main()
