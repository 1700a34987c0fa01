r"""The bilaplacian, by collapsed jets of order 4, or for many coordinates as the Laplacian of the Laplacian.

The fourth powers along the directions sum to the square of the squared length,
$\sum_r w_r (v_r \cdot \xi)^4 = |\xi|^4$. The fewest directions are three of a hexagon in the plane, and six of an
icosahedron in space. More dimensions use the vertices of a simplex and the midpoints of its edges, (n+1)(n+2)/2
directions (I. P. Mysovskikh, 1968).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from hodiff.common.trees import PyTree, unflatten
from hodiff.derivatives.bound_function import leave_inference_mode
from hodiff.errors import RouteError
from hodiff.taylor.differential.laplacian import laplacian
from hodiff.taylor.differential.operand import Operand, bound, grouped, require_options
from hodiff.taylor.differential.random_directions import Sample, estimate, sampled, sampling_of

# Above this dimension some weights are negative.
ALL_ABOVE = 7


def fourth_powers(n: int) -> list[tuple[int, Tensor]]:
    """Pairs of a sign and the directions (R, n) with that sign, whose lengths include the weights."""
    known = {1: _line, 2: _hexagon, 3: _icosahedron}
    return [(1, known[n]())] if n in known else _simplex(n)


def _line() -> Tensor:
    return torch.ones(1, 1, dtype=torch.float64, device="cpu")


def _hexagon() -> Tensor:
    angles = torch.arange(3, dtype=torch.float64, device="cpu") * (math.pi / 3)
    return torch.stack((angles.cos(), angles.sin()), 1) * (8 / 9) ** 0.25


def _icosahedron() -> Tensor:
    golden = (1 + 5**0.5) / 2
    pairs = [(1.0, golden), (1.0, -golden)]
    rows = [[0, a, b] for a, b in pairs] + [[a, b, 0] for a, b in pairs] + [[b, 0, a] for a, b in pairs]
    found = torch.tensor(rows, dtype=torch.float64, device="cpu")
    return found / found.norm(dim=1, keepdim=True) * (5 / 6) ** 0.25


def _simplex(n: int) -> list[tuple[int, Tensor]]:
    vertices = _vertices(n)
    edges = torch.stack([vertices[i] + vertices[j] for i, j in combinations(range(n + 1), 2)])
    edges = edges / edges.norm(dim=1, keepdim=True)
    # The mean of the fourth power over the sphere is 3 / (n (n + 2)).
    whole = n * (n + 2) / 3
    at_vertices = whole * n * (7 - n) / ((n + 1) ** 2 * (n + 2))
    at_edges = whole * 4 * (n - 1) ** 2 / (n * (n + 1) ** 2 * (n + 2))
    edges, vertices = edges * at_edges**0.25, vertices * abs(at_vertices) ** 0.25
    if n < ALL_ABOVE:
        return [(1, torch.cat((edges, vertices)))]
    return [(1, edges)] if n == ALL_ABOVE else [(1, edges), (-1, vertices)]


def _vertices(n: int) -> Tensor:
    """Unit vectors (n + 1, n) with products -1/n."""
    corners = math.sqrt(1 + 1 / n) * torch.eye(n, dtype=torch.float64, device="cpu") - (math.sqrt(n + 1) + 1) / n**1.5
    return torch.cat((corners, torch.full((1, n), n**-0.5, dtype=torch.float64, device="cpu")))


_REFUSED = {
    "rademacher": "the mean of fourth derivatives along signs takes fourth derivatives along a coordinate for a third.",
    "coordinates": "fourth derivatives along single coordinates omit mixed derivatives.",
}


def bilaplacian(
    f: Callable[..., Any],
    argnums: int = 0,
    *,
    batched: bool = False,
    randomised: str | None = None,
    samples: int = 16,
    generator: torch.Generator | None = None,
    chunk_size: int | None = None,
    correct: bool = True,
) -> Callable[..., Any]:
    r"""Function that computes the bilaplacian, or biharmonic operator, of each output of a function.

    $$ \Delta^2 f(x) = \sum_{i,j} \frac{\partial^4 f}{\partial x_i^2\, \partial x_j^2}
       = \sum_r D^4 f(x)[v_r, v_r, v_r, v_r], \qquad \sum_r (v_r \cdot \xi)^4 = |\xi|^4 $$

    Up to seven coordinates, one pass (a collapsed jet of order 4) sums fourth derivatives along the $v_r$: 3 directions
    in the plane, 6 in space, and (n+1)(n+2)/2 in n dimensions. Beyond that the Laplacian of the Laplacian stores fewer
    numbers, about n² of them, and is used unless `f` calls a function without a rule, which jets of jets do not
    support. The result can be differentiated.

    In very many dimensions `randomised="gaussian"` takes the mean of $\tfrac13 D^4 f(x)[v, v, v, v]$ over standard
    normal v, whose expectation is the bilaplacian. Independent signs and single coordinates lack that property.

    Args:
        f: As in `hodiff.laplacian`.
        argnums: As in `hodiff.laplacian`.
        batched: As in `hodiff.laplacian`.
        randomised: "gaussian" for random directions, drawn anew at each point; None for the exact sum.
        samples: Number of random directions.
        generator: Random number generator; torch's default if None.
        chunk_size: As in `hodiff.laplacian`; it applies to both Laplacians of the Laplacian of the Laplacian.
        correct: As in `hodiff.hvp`.

    Returns:
        Function of the arguments of `f` that returns the bilaplacian in the structure and shapes of what `f` returns;
        with `randomised` a `hodiff.taylor.RandomisedEstimate` of it.

    Raises:
        InputError: As by `hodiff.laplacian`, or if `randomised` names a distribution without the property above.

    Example:
        >>> import torch, hodiff
        >>> r5 = lambda x: x.square().sum() ** 2.5
        >>> hodiff.bilaplacian(r5)(torch.tensor([2.0, 1.0, 2.0], dtype=torch.float64))  # in three dimensions 360 r
        tensor(1080., dtype=torch.float64)

    Source: I. P. Mysovskikh, "On the construction of cubature formulas with the smallest number of nodes", 1968; F.
    Dangel et al., "Collapsing Taylor mode automatic differentiation", 2025; Z. Shi et al., "Stochastic Taylor
    derivative estimator", NeurIPS 2024.
    """
    require_options("bilaplacian", f, argnums, chunk_size, batched=batched, correct=correct)
    sampling = sampling_of("bilaplacian", randomised, samples, generator, _REFUSED)

    @leave_inference_mode
    def transformed(*args: Any, **kwargs: Any) -> Any:
        operand = bound("bilaplacian", f, args, kwargs, argnums, batched=batched, correct=correct)
        if sampling is not None:
            sample = sampled(operand, sampling)
            terms, spec = operand.along_each(grouped(sample.directions, chunk_size), 4)
            return estimate(terms, spec, Sample((), 1 / 3, 1.0))
        if 1 <= operand.size <= ALL_ABOVE:
            return _by_fourth_derivatives(operand, chunk_size)

        def once(f: Callable[..., Any]) -> Callable[..., Any]:
            return laplacian(f, argnums, batched=batched, chunk_size=chunk_size, correct=correct)

        try:
            return once(once(f))(*args, **kwargs)
        except RouteError:
            # Jets of jets do not support functions without a rule.
            return _by_fourth_derivatives(operand, chunk_size)

    return transformed


def _by_fourth_derivatives(operand: Operand, chunk_size: int | None) -> PyTree:
    """Sum the fourth derivatives along the directions of a cubature."""
    signed = [
        (sign, group)
        for sign, rows in fourth_powers(operand.size)
        for group in grouped(operand.spread(rows), chunk_size)
    ]
    sums: list[Any] = []
    structure: Any = None
    passes = operand.passes((group for _, group in signed), 4, collapsed=True)
    for (sign, _), each in zip(signed, passes, strict=True):
        found = [24 * sign * output[4] for output in each.outputs]
        sums = found if not sums else [old + new for old, new in zip(sums, found, strict=True)]
        structure = each.structure
    return unflatten(sums, structure)
