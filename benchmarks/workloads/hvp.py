"""Hessian-vector products of the networks, by hodiff and by all ways of torch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

import hodiff
from benchmarks import torch_ways
from benchmarks.objectives import NETWORKS, Objective
from benchmarks.problems import Problem
from benchmarks.race import Contestant
from benchmarks.reference import difference_product, relative_error

# Forward over forward takes one pass per coordinate: with half a million parameters, hours.
ROUTES = [route for route in hodiff.ROUTES if route != "forward-over-forward"]


def problems(quick: bool) -> Iterator[Problem]:
    """Yield one problem per network, or only the first."""
    for build in list(NETWORKS.values())[: 1 if quick else None]:
        yield problem(build(), (build.__doc__ or "").strip().rstrip("."))


def problem(objective: Objective, title: str) -> Problem:
    """Return the problem of a product of a network's Hessian and a random vector."""
    x = objective.parameters()
    v = direction(x)
    expected = difference_product(objective, flatten(v))
    return Problem(
        name=objective.name,
        title=f"{objective.name}: {title}",
        contestants=[
            Contestant("one gradient, eager", "unit", partial(torch_ways.gradient, objective, x)),
            Contestant("hodiff.hvp", "hodiff", partial(hodiff.hvp, objective, x, v)),
            *(
                Contestant(f"hodiff.hvp, {route}", "route", partial(hodiff.hvp, objective, x, v, route=route))
                for route in ROUTES
            ),
            *(
                Contestant(f"torch {name}", "torch", partial(way, objective, x, v))
                for name, way in torch_ways.PRODUCTS.items()
            ),
        ],
        error=lambda product: relative_error(flatten(product), expected),
        tolerance=1e-4,
    )


def direction(x: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a random vector with the structure of `x`."""
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(tensor.shape, generator=generator) for name, tensor in x.items()}


def flatten(tree: dict[str, Tensor]) -> Tensor:
    """Return all entries in one vector."""
    return torch.cat([tensor.flatten() for tensor in tree.values()])
