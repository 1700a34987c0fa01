"""Batched minimization of many small problems by `hodiff.optim`, against a loop over a fiftieth of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.problems import Problem
from benchmarks.race import Contestant
from hodiff.optimize import least_squares, minimize

D = torch.float64
N = 10
# The loop runs over this part of the problems only, as its time is proportional to their number.
PART = 50


def problems(quick: bool) -> Iterator[Problem]:
    """Yield Rosenbrock's function by several methods, and fits of peaks."""
    count = 100 if quick else 1_000
    for method in ("trust-exact",) if quick else ("trust-exact", "bfgs", "l-bfgs-b"):
        yield _rosenbrock(count, method)
    yield _peaks(count)


def _rosenbrock(count: int, method: str) -> Problem:
    """Return variants of Rosenbrock's function, with starts near one minimum."""
    a = torch.linspace(0.8, 1.2, count, dtype=D)
    x0 = 1 + 0.3 * torch.randn(count, N, dtype=D, generator=torch.Generator().manual_seed(0))

    def f(x: Tensor, a: Tensor) -> Tensor:
        return (100 * (x[1:] - x[:-1] ** 2) ** 2 + (a - x[:-1]) ** 2).sum()

    title = f"{count:,} functions of Rosenbrock's, n = {N}, {method}"
    return _problem(f"rosenbrock {method}", title, partial(minimize, f, method=method), x0, a, {})


def _peaks(count: int) -> Problem:
    """Return fits of the heights and places of noisy peaks."""
    draw = torch.Generator().manual_seed(0)
    t, places = torch.linspace(0, 6, 60, dtype=D), torch.arange(1, N // 2 + 1, dtype=D)

    def model(x: Tensor) -> Tensor:
        heights, moves = x[: N // 2], x[N // 2 :]
        return heights @ torch.exp(-8 * (t - (places + moves)[:, None]) ** 2)

    truth = torch.cat(
        [1 + torch.rand(count, N // 2, generator=draw), 0.2 * torch.randn(count, N // 2, generator=draw)], 1
    )
    data = torch.stack([model(x) for x in truth.to(D)]) + 0.02 * torch.randn(count, 60, dtype=D, generator=draw)
    x0 = torch.cat([torch.ones(count, N // 2, dtype=D), torch.zeros(count, N // 2, dtype=D)], 1)

    title = f"{count:,} fits of {N // 2} peaks to 60 points, n = {N}, Levenberg-Marquardt"
    solver = partial(least_squares, lambda x, data: model(x) - data, method="lm")
    return _problem("peaks", title, solver, x0, data, {"x_scale": "jac"})


def _problem(
    name: str, title: str, solver: Callable[..., Any], x0: Tensor, data: Tensor, alone: dict[str, Any]
) -> Problem:
    def looped() -> Tensor:
        pairs = zip(x0[::PART], data[::PART], strict=True)
        return torch.stack([solver(x, each, **alone).x for x, each in pairs])

    def together() -> Tensor:
        found: Tensor = solver(x0, data, batched=True).x
        return found

    expected = looped()

    def error(found: Tensor) -> float:
        return float((found[::PART] - expected).norm() / expected.norm())

    return Problem(
        name=name,
        title=title,
        contestants=[
            Contestant(f"a loop over {len(expected)} of them", "unit", looped),
            Contestant("all at once, batched=True", "hodiff", together),
        ],
        error=error,
        # The methods stop at small gradients, before the last digit is right.
        tolerance=1e-4,
    )
