"""Functions made by hodiff's decorators against hand-written Functions: with 10 elements, all time is overhead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from benchmarks.problems import Problem
from benchmarks.race import Contestant
from benchmarks.reference import relative_error
from hodiff.authoring import custom_jvp, custom_vjp, elementwise, straight_through

Way = Callable[[Tensor], Tensor]


def formula(x: Tensor) -> Tensor:
    """Compute log(1 + exp(x)), the example of JAX's documentation."""
    return torch.log1p(torch.exp(x))


def slope(x: Tensor) -> Tensor:
    """Compute the derivative of `formula`, in the stable form of JAX's example."""
    return 1 - 1 / (1 + torch.exp(x))


class Log1pExp(Function):
    """Hand-written Function of a careful user: it saves its input, supports any order in reverse mode and vmap."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """Compute the formula."""
        return formula(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        """Save the input."""
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        """Multiply the cotangent by the slope."""
        (x,) = ctx.saved_tensors
        return slope(x) * cotangent

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        """Multiply the tangent by the slope."""
        (x,) = ctx.saved_tensors
        return slope(x) * tangent


class Sign(Function):
    """Hand-written straight-through estimator."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        """Compute the sign."""
        return torch.sign(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        """Save the input."""
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        """Multiply the cotangent by the slope of tanh."""
        (x,) = ctx.saved_tensors
        return (1 - torch.tanh(x) ** 2) * cotangent


by_jvp = custom_jvp(formula)
by_jvp.defjvp(lambda primals, tangents: (by_jvp(*primals), slope(*primals) * tangents[0]))
by_jvps = custom_jvp(formula)
by_jvps.defjvps(lambda tangent, output, x: slope(x) * tangent)
by_vjp = custom_vjp(formula)
by_vjp.defvjp(lambda x: (formula(x), x), lambda x, cotangent: (slope(x) * cotangent,))

FAMILIES: dict[str, tuple[Way, dict[str, Way]]] = {
    "log1pexp": (
        Log1pExp.apply,
        {
            "custom_jvp, defjvp": by_jvp,
            "custom_jvp, defjvps": by_jvps,
            "custom_vjp": by_vjp,
            "elementwise": elementwise(formula, derivative=slope),
        },
    ),
    "sign": (Sign.apply, {"straight_through": straight_through(torch.sign, torch.tanh)}),
}


def forward(way: Way, x: Tensor) -> Tensor:
    """Compute the value, recorded by autograd."""
    return way(x)


def gradient(way: Way, x: Tensor) -> Tensor:
    """Compute forward and backward."""
    return torch.autograd.grad(way(x), x, torch.ones_like(x))[0]


def double_backward(way: Way, x: Tensor) -> Tensor:
    """Compute forward, a recorded backward, and a backward through that backward."""
    (g,) = torch.autograd.grad(way(x), x, torch.ones_like(x), create_graph=True)
    return torch.autograd.grad(g, x, torch.ones_like(x))[0]


WORK = {"forward": forward, "forward and backward": gradient, "double backward": double_backward}


def problems(quick: bool) -> Iterator[Problem]:
    """Yield problems by family; quick yields only the first family."""
    x = torch.linspace(-2, 2, 10).requires_grad_()
    for family, (hand, ways) in list(FAMILIES.items())[: 1 if quick else None]:
        for name, work in WORK.items():
            yield Problem(
                name=f"{family} {name}",
                title=f"{family} of 10 elements: {name}",
                contestants=[
                    Contestant("hand-written Function", "unit", partial(work, hand, x)),
                    *(Contestant(title, "hodiff", partial(work, way, x)) for title, way in ways.items()),
                ],
                error=partial(_error, work(hand, x).detach()),
                tolerance=1e-5,
            )


def _error(expected: Tensor, found: Tensor) -> float:
    return relative_error(found.detach(), expected.double())
