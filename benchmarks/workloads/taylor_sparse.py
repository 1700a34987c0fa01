"""Laplacians of networks over particles: sparse first derivatives against all directions."""

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
from benchmarks.targets import Target
from benchmarks.workloads import wavefunction

Function = Callable[[Tensor], Tensor]
# The network of folx's README: ten layers of 100 with SiLU and a last one, on 100 nodes of 4 features; 20 points.
NODES, LAYERS, WIDTH, POINTS = 100, 10, 100, 20
WALKERS = 64
SPARSE, DENSE = "hodiff.laplacian", "with all directions"


def problems(quick: bool) -> Iterator[Problem]:
    """Yield a network that acts on nodes one by one, and a wavefunction with attention."""
    yield nodes_problem(quick)
    yield wavefunction_problem(quick)


def on_nodes(nodes: int = NODES, points: int = POINTS) -> tuple[Summed, Tensor]:
    """Return the network, summed over nodes, and the points."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for width in (4, *[WIDTH] * (LAYERS - 1)):
        layers += [nn.Linear(width, WIDTH), nn.SiLU()]
    return Summed(nn.Sequential(*layers, nn.Linear(WIDTH, 1))).requires_grad_(False), torch.randn(points, nodes, 4)


class Summed(nn.Module):
    """Sum of a network's outputs over nodes."""

    def __init__(self, net: nn.Module):
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., nodes, features) to (...)."""
        found: Tensor = self.net(x)
        return found.sum((-1, -2))


def node_by_node(f: Summed, x: Tensor) -> Tensor:
    """Compute the Laplacian by torch as a sum of traces of small Hessians, given that nodes are independent."""

    def trace(node: Tensor) -> Tensor:
        return torch.trace(hessian(lambda y: f.net(y).squeeze(-1))(node))

    return vmap(trace)(x.flatten(0, -2)).unflatten(0, x.shape[:-1]).sum(-1)


def typical_error(found: Tensor, expected: Tensor) -> float:
    """Return the median error over points: float32 has no right digits near zeros of a wavefunction."""
    return float(((found.double() - expected) / expected).abs().median())


def nodes_problem(quick: bool) -> Problem:
    """Return the problem of the network of `on_nodes`."""
    nodes, points = (6, 2) if quick else (NODES, POINTS)
    f, x = on_nodes(nodes, points)
    # torch would need 15 seconds for the trace of the whole Hessian.
    return _problem(
        "nodes",
        f"a network on {nodes} nodes of 4 features each, ten layers of 100, {points} points",
        f,
        x,
        Contestant("torch.func.hessian, told that nodes do not meet", "torch", partial(node_by_node, f, x)),
        node_by_node(copy.deepcopy(f).double(), x.double()),
        [] if quick else [Target(DENSE, SPARSE, 15, at_least=True)],
    )


def wavefunction_problem(quick: bool) -> Problem:
    """Return the problem of `benchmarks.workloads.wavefunction`."""
    electrons, walkers = (4, 2) if quick else (wavefunction.ELECTRONS, WALKERS)
    single, double = (
        partial(wavefunction.log_psi, wavefunction.as_tensors(wavefunction.parameters(electrons), dtype))
        for dtype in (torch.float32, torch.float64)
    )
    x = wavefunction.positions(walkers, electrons)

    def trace(x: Tensor) -> Tensor:
        return torch.trace(hessian(single)(x).reshape(x.numel(), x.numel()))

    return _problem(
        "wavefunction",
        f"a wavefunction of {electrons} electrons with attention, {walkers} walkers",
        single,
        x,
        # The Hessians of all points at once do not fit into memory.
        Contestant("trace of torch.func.hessian", "torch", partial(vmap(trace, chunk_size=2), x)),
        hodiff.laplacian(double, batched=True, chunk_size=16)(x.double()),
        [] if quick else [Target(DENSE, SPARSE, 4, at_least=True)],
    )


def _problem(
    name: str, title: str, f: Function, x: Tensor, way_of_torch: Contestant, expected: Tensor, targets: list[Target]
) -> Problem:
    return Problem(
        name=f"sparse-{name}",
        title=f"Laplacian of {title}, float32",
        contestants=[
            Contestant(SPARSE, "hodiff", partial(hodiff.laplacian(f, batched=True), x)),
            Contestant(DENSE, "route", partial(hodiff.laplacian(f, batched=True, sparse=False), x)),
            way_of_torch,
        ],
        error=lambda found: typical_error(found, expected),
        tolerance=1e-3,
        targets=targets,
    )
