"""Calls on tensors so small that only overhead takes time, against the same computation written by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, jvp, vjp

import hodiff
from benchmarks.problems import Problem
from benchmarks.race import Contestant
from benchmarks.reference import relative_error
from benchmarks.workloads.functions import PAIRS, Pair, gradient


def sum_of_cubes(x: Tensor) -> Tensor:
    """Compute the sum of cubes, whose Hessian is diag(6 x)."""
    return (x**3).sum()


def gradient_of_cubes(x: Tensor) -> Tensor:
    """Compute one eager gradient."""
    x = x.detach().requires_grad_()
    return torch.autograd.grad(sum_of_cubes(x), x)[0]


def double_backward(x: Tensor, v: Tensor) -> Tensor:
    """Compute the product by backward through the gradient's graph with v as the cotangent."""
    x = x.detach().requires_grad_()
    (g,) = torch.autograd.grad(sum_of_cubes(x), x, create_graph=True)
    return torch.autograd.grad(g, x, v)[0]


HAND_WRITTEN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "autograd.grad twice, grad_outputs=v": double_backward,
    "func.jvp of func.grad": lambda x, v: jvp(grad(sum_of_cubes), (x,), (v,))[1],
    "func.vjp of func.grad": lambda x, v: vjp(grad(sum_of_cubes), x)[1](v)[0],
    "func.grad of <func.grad, v>": lambda x, v: grad(lambda x: grad(sum_of_cubes)(x) @ v)(x),
    "func.grad of func.jvp": lambda x, v: grad(lambda x: jvp(sum_of_cubes, (x,), (v,))[1])(x),
    "autograd.functional.hvp": lambda x, v: torch.autograd.functional.hvp(sum_of_cubes, x, v)[1],
    "autograd.functional.vhp": lambda x, v: torch.autograd.functional.vhp(sum_of_cubes, x, v)[1],
}


def problems(quick: bool) -> Iterator[Problem]:
    """Yield products of a small function, calls within `corrected()`, and the gradient of each Function."""
    yield _product()
    if quick:
        return
    yield _later_products()
    yield from (_within_corrections(name, call) for name, call in CALLS.items())
    yield from map(_gradient_of, PAIRS)


def _product() -> Problem:
    x, v = torch.linspace(-1, 2, 10), torch.linspace(1, 3, 10)
    product = partial(hodiff.hvp, sum_of_cubes, x, v)
    return Problem(
        name="cubes",
        title="sum of cubes of 10 elements",
        contestants=[
            Contestant("one gradient, eager", "unit", partial(gradient_of_cubes, x)),
            Contestant("hodiff.hvp", "hodiff", product),
            *(Contestant(f"hodiff.hvp, {route}", "route", partial(product, route=route)) for route in hodiff.ROUTES),
            *(Contestant(f"torch {name}", "torch", partial(way, x, v)) for name, way in HAND_WRITTEN.items()),
        ],
        error=lambda found: relative_error(found, (6 * x * v).double()),
        tolerance=1e-5,
    )


def _later_products() -> Problem:
    x, v = torch.linspace(-1, 2, 10), torch.linspace(1, 3, 10)
    operator = hodiff.HessianOperator(sum_of_cubes, x)
    leaf = x.clone().requires_grad_()
    (kept,) = torch.autograd.grad(sum_of_cubes(leaf), leaf, create_graph=True)

    def by_hand() -> Tensor:
        return torch.autograd.grad(kept, leaf, v, retain_graph=True)[0]

    return Problem(
        name="later products",
        title="later products with the Hessian of the same function",
        contestants=[
            Contestant("one gradient, eager", "unit", partial(gradient_of_cubes, x)),
            Contestant("hodiff.HessianOperator @ v", "hodiff", lambda: operator @ v),
            Contestant("torch autograd.grad of a kept graph", "torch", by_hand),
        ],
        error=lambda found: relative_error(found, (6 * x * v).double()),
        tolerance=1e-5,
    )


# Calls of torch functions, on a tensor (4, 8).
CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "sin, which has no rule": torch.sin,
    "tanh, whose rule reads the range": torch.tanh,
    "layer_norm": lambda x: F.layer_norm(x, (8,)),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.arange(4)),
}


def _within_corrections(name: str, call: Callable[[Tensor], Tensor]) -> Problem:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()

    def often() -> Tensor:
        for _ in range(100):
            y = call(x)
        return y

    def corrected() -> Tensor:
        with hodiff.corrected():
            return often()

    return Problem(
        name=f"corrected {name}",
        title=f"100 calls within hodiff.corrected(): {name}",
        contestants=[
            Contestant("torch", "unit", often),
            Contestant("hodiff.corrected", "hodiff", corrected),
        ],
        error=lambda found: relative_error(found, call(x.double())),
        tolerance=1e-5,
    )


def _gradient_of(pair: Pair) -> Problem:
    small = replace(pair, shapes=tuple(tuple(min(size, 8) for size in shape) for shape in pair.shapes))
    inputs = small.inputs()
    exact = gradient(small.theirs, tuple(x.detach().double().requires_grad_() for x in inputs))

    def error(found: Any) -> float:
        return max(map(relative_error, found, exact))

    return Problem(
        name=f"gradient {pair.name}",
        title=f"{pair.name} and its gradient, inputs {', '.join(map(str, small.shapes))}",
        contestants=[
            Contestant("composition", "unit", partial(gradient, small.theirs, inputs)),
            Contestant("hodiff", "hodiff", partial(gradient, small.ours, inputs)),
        ],
        error=error,
        tolerance=1e-3,
    )
