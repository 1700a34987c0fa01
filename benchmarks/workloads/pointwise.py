"""Products with Hessians where elementwise work counts: activations and normalizations between layers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

import hodiff
from benchmarks import torch_ways
from benchmarks.objectives import Objective
from benchmarks.problems import Problem
from benchmarks.race import Contestant
from benchmarks.reference import difference_product, relative_error
from benchmarks.workloads.hvp import direction, flatten
from benchmarks.workloads.operators import KeptGraph, blocks, multiplications

BATCH = 200
WIDTHS = (300, 600, 600, 20)

# Modules between the layers, as functions of their width.
BETWEEN: dict[str, tuple[Callable[[int], nn.Module], ...]] = {
    "gelu": (lambda _: nn.GELU(),),
    "silu": (lambda _: nn.SiLU(),),
    "softplus": (lambda _: nn.Softplus(),),
    "tanh": (lambda _: nn.Tanh(),),
    "relu": (lambda _: nn.ReLU(),),
    "layer_norm-gelu": (nn.LayerNorm, lambda _: nn.GELU()),
    "rms_norm-gelu": (nn.RMSNorm, lambda _: nn.GELU()),
    "batch_norm-gelu": (nn.BatchNorm1d, lambda _: nn.GELU()),
}


def problems(quick: bool) -> Iterator[Problem]:
    """Yield two problems per network, one vector and a block, or only the problems of the first network."""
    for name in list(BETWEEN)[: 1 if quick else None]:
        objective = network(name)
        yield single(objective)
        yield blocks(objective)


def network(name: str) -> Objective:
    """Return a network 300-600-600-20 with a batch of 200; batch norm uses running statistics."""
    torch.manual_seed(0)
    *inner, classes = WIDTHS
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(inner):
        layers += [nn.Linear(before, after), *(build(after) for build in BETWEEN[name])]
    module = nn.Sequential(*layers, nn.Linear(inner[-1], classes)).eval()
    return Objective(name, module, torch.randn(BATCH, WIDTHS[0]), torch.randint(classes, (BATCH,)))


def single(objective: Objective) -> Problem:
    """Return products with one vector, by operators that have multiplied before."""
    x = objective.parameters()
    vector = flatten(direction(x))
    expected = difference_product(objective, vector)
    operators = {
        "hessian linearized": hodiff.HessianOperator(objective, x),
        "hessian linearized, compiled": hodiff.HessianOperator(objective, x, compile=True),
    }

    def product(operator: hodiff.HessianOperator | KeptGraph) -> Tensor:
        result: Tensor = operator @ vector
        return result

    unit = Contestant("one gradient, eager", "unit", partial(torch_ways.gradient, objective, x))
    kept = Contestant("torch, graph of the gradient kept", "torch", partial(product, KeptGraph(objective, x)))
    return Problem(
        name=objective.name,
        title=f"{objective.name}: one vector",
        contestants=[
            unit,
            *(Contestant(name, "hodiff", partial(product, operator)) for name, operator in operators.items()),
            kept,
        ],
        error=lambda product: relative_error(product, expected),
        tolerance=1e-4,
        remarks={kept.name: f"{multiplications(kept.run) / multiplications(unit.run):.2f}"},
        remarks_title="multiplications",
    )
