r"""Lesson 27: from `forward(ctx, ...)` to `setup_context`.

$$ y = \sqrt{1 + x^2}, \qquad y' = \frac{x}{y}, \qquad y'' = \frac{1}{y^3}, \qquad y''' = -\frac{3x}{y^5} $$

Functions in older programs save while they compute, in one `forward(ctx, x)`. Such a Function can be differentiated any
number of times by `backward`, but `torch.func`, forward mode and `vmap` raise errors. Four steps convert it:

1. Remove `ctx` from `forward`, which returns values only.
2. Code that uses `ctx` moves to `setup_context`, which receives only inputs and outputs. A saved intermediate result
   becomes an output (lesson 4), or `backward` computes it again. Here y is the output already, and `backward` does not
   change.
3. Write `jvp`, from the saved input (lesson 3).
4. Set `generate_vmap_rule` if all rules are torch operators (lesson 2), or write `vmap` (lesson 9).

    python examples/functions/27_legacy_functions.py

Exercise: convert this Function by the same steps. Note that it saves a tensor that is neither input nor output.

    class LogOfOnePlusSquare(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.denominator = 1 + x * x
            ctx.save_for_backward(x)
            return ctx.denominator.log()

        @staticmethod
        def backward(ctx, cotangent):
            (x,) = ctx.saved_tensors
            return 2 * x / ctx.denominator * cotangent
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lesson_tools import outcome, print_table
from torch import Tensor
from torch.autograd import Function

import hodiff
from hodiff.functions import nestable_jvp

INPUTS = (torch.tensor([0.5, -1.2], dtype=torch.float64),)


class LegacyHypotenuse(Function):
    r"""Function $\sqrt{1 + x^2}$ in the old form. Saves input and output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Compute the value and save."""
        y = (1 + x * x).sqrt()
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        """$x ȳ / y$."""
        x, y = ctx.saved_tensors
        return x / y * cotangent


class Hypotenuse(Function):
    r"""$\sqrt{1 + x^2}$. Saves input and output; forward mode saves the input."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """Compute the value."""
        return (1 + x * x).sqrt()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        """Save different tensors for reverse and forward mode."""
        ctx.save_for_backward(*inputs, output)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        """$x ȳ / y$, as before."""
        x, y = ctx.saved_tensors
        return x / y * cotangent

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        """$x ẋ / y$, with y recomputed."""
        (x,) = ctx.saved_tensors
        return x / Hypotenuse.apply(x) * tangent


def derivatives_at(f: Callable[[Tensor], Tensor], x: Tensor) -> dict[str, str]:
    """Return the result of each way to compute a derivative, or the error that it raises."""
    leaf = x.clone().requires_grad_()

    def slope() -> Tensor:
        return torch.autograd.grad(f(leaf), leaf, create_graph=True)[0]

    return {
        "backward": outcome(slope),
        "backward of backward": outcome(lambda: torch.autograd.grad(slope(), leaf)[0]),
        "torch.func.grad": outcome(lambda: torch.func.grad(f)(x)),
        "torch.func.jvp": outcome(lambda: torch.func.jvp(f, (x,), (torch.ones_like(x),))[1]),
        "torch.vmap": outcome(lambda: torch.vmap(f)(x.expand(3)).sum() / 3),
    }


def draw(figure: Any) -> None:
    """A branch of a hyperbola and its derivatives; the dots are SciPy's differences."""
    hodiff.plot.derivatives(Hypotenuse.apply, -3, 3, order=3, ax=figure.add_subplot())


def main() -> hodiff.Report:
    """Print the results of both Functions, and check Hypotenuse by every route to third order."""
    x = torch.tensor(0.5, dtype=torch.float64)
    old, new = derivatives_at(LegacyHypotenuse.apply, x), derivatives_at(Hypotenuse.apply, x)
    print_table(("at 0.5", "LegacyHypotenuse", "Hypotenuse"), [(way, old[way], new[way]) for way in new])
    report = hodiff.check(Hypotenuse, INPUTS, order=3)
    print(report)
    return report


if __name__ == "__main__":
    main()
