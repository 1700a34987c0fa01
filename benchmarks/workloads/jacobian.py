"""Jacobians with more outputs than inputs, for many small operators and for few large operators, in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.func import jacfwd, jacrev

import hodiff
from benchmarks.problems import Problem
from benchmarks.race import Contestant

D = torch.float64
Function = Callable[[Tensor], Tensor]


def problems(quick: bool) -> Iterator[Problem]:
    """Yield an Euler integration, a chain of small operators, and two layers."""
    torch.manual_seed(0)
    for name, title, f, x in [_decay(20 if quick else 200), _chain(20 if quick else 50), _layers(20 if quick else 200)]:
        expected = jacrev(f)(x)
        yield Problem(
            name=name,
            title=f"{title}, {x.numel()} inputs, {expected.shape.numel() // x.numel():,} outputs",
            contestants=[
                Contestant("one evaluation", "unit", partial(f, x)),
                Contestant("torch.func.jacrev", "torch", partial(jacrev(f), x)),
                Contestant("torch.func.jacfwd", "torch", partial(jacfwd(f), x)),
                Contestant('hodiff.jacobian, "reverse"', "hodiff", partial(hodiff.jacobian(f, mode="reverse"), x)),
                Contestant('hodiff.jacobian, "forward"', "hodiff", partial(hodiff.jacobian(f, mode="forward"), x)),
                Contestant("hodiff.jacobian", "hodiff", partial(hodiff.jacobian(f), x)),
            ],
            error=partial(_error, expected),
            tolerance=1e-10,
        )


def _error(expected: Tensor, found: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def _decay(steps: int) -> tuple[str, str, Function, Tensor]:
    """Return Euler's method for two reactions, recorded at every tenth step."""

    def f(rates: Tensor) -> Tensor:
        y, seen = torch.stack([torch.ones_like(rates[0]), torch.zeros_like(rates[0])]), []
        for step in range(steps):
            flow = rates[0] * y[0] - rates[1] * y[1] * rates[2]
            y = y + 0.01 * torch.stack([-flow, flow])
            if step % 10 == 9:
                seen.append(y)
        return torch.stack(seen)

    return "decay", f"Euler's method, {steps} steps", f, torch.rand(3, dtype=D) + 0.5


def _chain(length: int) -> tuple[str, str, Function, Tensor]:
    """Return a chain of operators on vectors of ten numbers."""
    A = torch.randn(40, 10, dtype=D)

    def f(x: Tensor) -> Tensor:
        for _ in range(length):
            x = torch.tanh(x) * 1.1
        return A @ x

    return "chain", f"{2 * length} operators on ten numbers", f, torch.randn(10, dtype=D)


def _layers(inputs: int) -> tuple[str, str, Function, Tensor]:
    """Return two layers whose matrices are so large that fewer directions pay."""
    W, V = torch.randn(500, inputs, dtype=D) / inputs**0.5, torch.randn(2000, 500, dtype=D) / 500**0.5
    return "layers", "two layers", lambda x: V @ torch.tanh(W @ x), torch.randn(inputs, dtype=D)
