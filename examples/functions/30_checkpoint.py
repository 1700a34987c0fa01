r"""Lesson 30: a checkpoint, with gradients of its parameters.

$$ y = f(x, θ), \qquad (\bar x, \bar θ) = \Big(\frac{\partial f}{\partial (x, θ)}\Big)^{\!T} \bar y, \qquad
   \dot y = \frac{\partial f}{\partial x} \dot x + \frac{\partial f}{\partial θ} \dot θ $$

where f is run again when a derivative is needed. Only the arguments of f are kept, not its intermediate results.

`torch.func.vjp` of f computes the derivative. It consists of operators of the arguments, so backward can be
differentiated in turn, and each further order runs f once more. `jvp` is the pullback of the pullback, since
`torch.func.jvp` cannot run inside of torch's plain forward mode. A Function has gradients only for its *arguments*.
Weights that f closes over are constants to it, and get no gradient, without a warning. Parameters are therefore
arguments, like x. `hodiff.functions.checkpoint` finds closed-over tensors by itself, and repeats the random numbers of
f.

    python examples/functions/30_checkpoint.py

Exercise: write `checkpoint_module(module, x)` from `Checkpoint`, so that the module's parameters get their gradients,
and nothing is kept beside x and the parameters (`torch.func.functional_call` runs a module with given ones).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lesson_tools import draw_bars, saved_bytes
from torch import Tensor
from torch.autograd import Function

import hodiff
from hodiff.functions import nestable_jvp

INPUTS = (
    torch.tensor([[0.5, -1.2]], dtype=torch.float64),
    torch.tensor([[0.3, -0.7], [1.1, 0.4]], dtype=torch.float64),
)


class Checkpoint(Function):
    """$f(x, θ, ...)$ for a function f with one output. Saves the arguments."""

    generate_vmap_rule = True

    @staticmethod
    def forward(f: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Compute the value."""
        return f(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save the tensors, and keep the function."""
        ctx.f, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        """Run f again, and pull back to the arguments that need a gradient."""
        inputs = ctx.saved_tensors
        wanted = [k for k, needed in enumerate(ctx.needs_input_grad[1:]) if needed]

        def of_wanted(*some: Tensor) -> Tensor:
            replaced = dict(zip(wanted, some, strict=True))
            return ctx.f(*(replaced.get(k, each) for k, each in enumerate(inputs)))

        pull = torch.func.vjp(of_wanted, *(inputs[k] for k in wanted))[1]
        gradients = dict(zip(wanted, pull(cotangent), strict=True))
        return None, *(gradients.get(k) for k in range(len(inputs)))

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, f_tangent: None, *tangents: Tensor) -> Tensor:
        """Pull back the pullback, which is linear: this pushes tangents forward."""
        del f_tangent
        y, pull = torch.func.vjp(ctx.f, *ctx.saved_tensors)[:2]
        push = torch.func.vjp(pull, torch.zeros_like(y))[1]
        return push(tangents)[0]


def layers(x: Tensor, weight: Tensor, depth: int = 3) -> Tensor:
    """Apply a network that uses one weight in every layer."""
    for _ in range(depth):
        x = (x @ weight).sin()
    return x


def checkpointed(x: Tensor, weight: Tensor) -> Tensor:
    """Apply the network behind a checkpoint, with its weight passed in."""
    return Checkpoint.apply(layers, x, weight)


def bytes_kept() -> dict[str, float]:
    """Measure the kilobytes that eight layers keep for backward, for 256 rows of width 64."""
    x, weight = torch.randn(256, 64, requires_grad=True), torch.randn(64, 64, requires_grad=True)

    def deep(x: Tensor, weight: Tensor) -> Tensor:
        return layers(x, weight, 8)

    return {
        "plain call": saved_bytes(deep, x, weight) / 1000,
        "checkpoint": saved_bytes(lambda x, weight: Checkpoint.apply(deep, x, weight), x, weight) / 1000,
    }


def draw(figure: Any) -> None:
    """Memory that eight layers keep between forward and backward, in addition to input and weight."""
    draw_bars(figure.add_subplot(), bytes_kept(), "kilobytes kept for backward")


def main() -> hodiff.Report:
    """Print the memory kept, and the gradient of a closed-over weight; check the network behind a checkpoint."""
    for name, size in bytes_kept().items():
        print(f"{name}: {size:,.0f} kB saved, in addition to input and weight")
    x, weight = (each.clone().requires_grad_() for each in INPUTS)
    for name, y in {
        "closed over": Checkpoint.apply(lambda x: layers(x, weight), x),
        "passed in": checkpointed(x, weight),
    }.items():
        (gradient,) = torch.autograd.grad(y.sum(), weight, allow_unused=True)
        found = "none" if gradient is None else [round(each, 4) for each in gradient.flatten().tolist()]
        print(f"gradient of a weight that is {name}: {found}")
    report = hodiff.check(checkpointed, INPUTS, order=3)
    print(report)
    return report


if __name__ == "__main__":
    main()
