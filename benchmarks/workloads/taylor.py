"""Laplacians of a network beside the trace of its Hessian, and derivatives of high order along a line."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import hessian, vmap

import hodiff
from benchmarks.problems import Problem
from benchmarks.race import Contestant
from hodiff.derivatives.directional import nested_directional_derivatives
from hodiff.taylor import jet

WIDTHS = (50, 768, 768, 512, 512, 1)
BATCHES = (1, 8)
ORDERS = (2, 4, 6)


def problems(quick: bool) -> Iterator[Problem]:
    """A network of tanh at points of fifty numbers; the derivatives along a line of a smaller one."""
    widths = (5, 16, 16, 1) if quick else WIDTHS
    for dtype in (torch.float32, torch.float64):
        net = network(widths, dtype)
        for points in BATCHES:
            yield _laplacian(net, widths, points, dtype)
    small = network((5, 16, 16, 1) if quick else (10, 64, 64, 1), torch.float64)
    for order in ORDERS[:1] if quick else ORDERS:
        yield _along_a_line(small, torch.randn(2, 5 if quick else 10, dtype=torch.float64), order)


def network(widths: tuple[int, ...], dtype: torch.dtype) -> nn.Sequential:
    """Linear layers with tanh between them."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for n, m in pairwise(widths):
        layers += [nn.Linear(n, m), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).to(dtype).requires_grad_(False)


def by_hand(net: nn.Sequential, x: Tensor) -> Tensor:
    """Values, derivatives in each direction and Laplacian, layer by layer: what no program can do with less."""
    value, slopes, total = x, torch.eye(x.shape[1], dtype=x.dtype)[:, None].expand(-1, *x.shape), torch.zeros_like(x)
    for layer in net:
        if isinstance(layer, nn.Linear):
            value, slopes, total = layer(value), slopes @ layer.weight.mT, total @ layer.weight.mT
        else:
            value = torch.tanh(value)
            rate = 1 - value * value
            total = rate * total - 2 * value * rate * slopes.square().sum(0)
            slopes = rate * slopes
    return total


def _laplacian(net: nn.Sequential, widths: tuple[int, ...], points: int, dtype: torch.dtype) -> Problem:
    x, title = torch.randn(points, widths[0], dtype=dtype), "-".join(map(str, widths))
    expected = by_hand(net.double(), x.double())
    net = net.to(dtype)

    def trace(x: Tensor) -> Tensor:
        return torch.trace(hessian(lambda y: net(y).squeeze(-1))(x))

    name = str(dtype).removeprefix("torch.")
    return Problem(
        name=f"laplacian-{points}-{name}",
        title=f"Laplacian of a network {title} at {points} point{'s' * (points > 1)}, {name}",
        contestants=[
            Contestant("by hand", "unit", partial(by_hand, net, x)),
            Contestant("trace of torch.func.hessian", "torch", lambda: vmap(trace)(x)[:, None]),
            Contestant("hodiff.laplacian", "hodiff", partial(hodiff.laplacian(net, batched=True), x)),
        ],
        error=partial(_distance, expected),
        tolerance=1e-4 if dtype == torch.float32 else 1e-10,
    )


def _along_a_line(net: nn.Sequential, line: Tensor, order: int) -> Problem:
    x, v = line
    zeros = [torch.zeros_like(v)] * (order - 1)

    def series() -> Tensor:
        return jet(net, (x,), ([v, *zeros],))[1][-1]

    def nested() -> Tensor:
        return nested_directional_derivatives(net, x, v, order=order)[-1]

    return Problem(
        name=f"line-{order}",
        title=f"Derivative {order} along a line of a network 10-64-64-1, float64",
        contestants=[
            Contestant("one evaluation", "unit", partial(net, x)),
            Contestant("nested forward mode", "torch", nested),
            Contestant("hodiff.taylor.jet", "hodiff", series),
        ],
        error=partial(_distance, nested()),
        tolerance=1e-9,
    )


def _distance(expected: Tensor, found: Any) -> float:
    return float((found.double() - expected).norm() / expected.norm())
