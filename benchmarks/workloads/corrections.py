"""Costs of corrections: gradients and products with and without them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from torch import Tensor

import hodiff
from benchmarks import torch_ways
from benchmarks.objectives import NETWORKS, Objective
from benchmarks.problems import Problem
from benchmarks.race import Contestant
from benchmarks.reference import difference_product, relative_error
from benchmarks.workloads.hvp import direction, flatten

Parameters = dict[str, Tensor]


def problems(quick: bool) -> Iterator[Problem]:
    """Yield two problems per network: the gradient, and the product by the route that torch computes right."""
    for build in list(NETWORKS.values())[: 1 if quick else None]:
        objective = build()
        x = objective.parameters()
        v = direction(x)
        exact = flatten(torch_ways.gradient(objective, x))
        yield Problem(
            name=f"{objective.name}-gradient",
            title=f"{objective.name}: gradient",
            contestants=[
                Contestant("one gradient, eager", "unit", partial(torch_ways.gradient, objective, x)),
                Contestant("the same within hodiff.corrected()", "hodiff", partial(corrected_gradient, objective, x)),
            ],
            error=partial(_error, exact.double()),
            tolerance=1e-4,
        )
        expected = difference_product(objective, flatten(v))
        product = partial(hodiff.hvp, objective, x, v, route="forward-over-reverse")
        yield Problem(
            name=f"{objective.name}-product",
            title=f"{objective.name}: product by forward-over-reverse",
            contestants=[
                Contestant("one gradient, eager", "unit", partial(torch_ways.gradient, objective, x)),
                Contestant("hodiff.hvp", "hodiff", product),
                Contestant("hodiff.hvp, correct=False", "torch", partial(product, correct=False)),
            ],
            error=partial(_error, expected),
            tolerance=1e-4,
        )


def _error(exact: Tensor, found: Parameters) -> float:
    return relative_error(flatten(found), exact)


def corrected_gradient(objective: Objective, x: Parameters) -> Parameters:
    """Compute one eager gradient, recorded with corrections."""
    with hodiff.corrected():
        return torch_ways.gradient(objective, x)
