"""Laplacians of networks over particles: first derivatives in slots, and all of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import hessian, vmap

import hodiff
from benchmarks.problems import Problem
from benchmarks.race import Contestant
from benchmarks.workloads import wavefunction

Function = Callable[[Tensor], Tensor]
# The network of folx's README: ten layers of 100 with SiLU and a last one, on 100 nodes of 4 features; 20 points.
NODES, LAYERS, WIDTH, POINTS = 100, 10, 100, 20
WALKERS = 64


def problems(quick: bool) -> Iterator[Problem]:
    """A network that acts on nodes one by one, and a wavefunction with attention."""
    nodes, points, walkers = (6, 2, 2) if quick else (NODES, POINTS, WALKERS)
    title = f"a network on {nodes} nodes of 4 features each, ten layers of 100, {points} points"
    # By torch one call takes a quarter of a minute.
    f, x = on_nodes(nodes, points)
    yield _problem("nodes", title, f, copy.deepcopy(f).double(), x, by_torch=quick)
    electrons = 4 if quick else wavefunction.ELECTRONS
    single, double = (
        partial(wavefunction.log_psi, wavefunction.as_tensors(wavefunction.parameters(electrons), dtype))
        for dtype in (torch.float32, torch.float64)
    )
    x = torch.randn(walkers, electrons, 3, generator=torch.Generator().manual_seed(1))
    title = f"a wavefunction of {electrons} electrons with attention, {walkers} walkers"
    yield _problem("wavefunction", title, single, double, x, by_torch=True)


def on_nodes(nodes: int = NODES, points: int = POINTS) -> tuple[Summed, Tensor]:
    """The network, summed over nodes, and where."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for width in (4, *[WIDTH] * (LAYERS - 1)):
        layers += [nn.Linear(width, WIDTH), nn.SiLU()]
    return Summed(nn.Sequential(*layers, nn.Linear(WIDTH, 1))).requires_grad_(False), torch.randn(points, nodes, 4)


class Summed(nn.Module):
    """A network on each node, and the sum."""

    def __init__(self, net: nn.Module):
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        """(..., nodes, features) to a number each."""
        found: Tensor = self.net(x)
        return found.sum((-1, -2))


def typical_error(found: Tensor, expected: Tensor) -> float:
    """The median over points: next to where a wavefunction is zero float32 has no digits."""
    return float(((found.double() - expected) / expected).abs().median())


def _problem(name: str, title: str, f: Function, in_double: Function, x: Tensor, *, by_torch: bool) -> Problem:
    def trace(x: Tensor) -> Tensor:
        return torch.trace(hessian(f)(x).reshape(x.numel(), x.numel()))

    expected = hodiff.laplacian(in_double, batched=True, chunk_size=16)(x.double())
    # That of all points at once does not fit.
    way_of_torch = Contestant("trace of torch.func.hessian", "torch", partial(vmap(trace, chunk_size=2), x))
    return Problem(
        name=f"sparse-{name}",
        title=f"Laplacian of {title}, float32",
        contestants=[
            Contestant("hodiff.laplacian", "unit", partial(hodiff.laplacian(f, batched=True), x)),
            Contestant("with all directions", "route", partial(hodiff.laplacian(f, batched=True, sparse=False), x)),
            *([way_of_torch] if by_torch else []),
        ],
        error=lambda found: typical_error(found, expected),
        tolerance=1e-3,
    )
