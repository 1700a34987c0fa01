"""Construction of `ScalarProblem`, a scalar function of a few numbers, from a function of pytrees.

Everything that `check` compares is a derivative of a `ScalarProblem` with a random cotangent and random directions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hodiff.checks.comparisons.leaf_functions import (
    differentiates_inside,
    function_of_leaves,
    recorded_inside,
    without_infinities,
)
from hodiff.checks.comparisons.scalar_problem import ScalarProblem, coarsest, real_parts
from hodiff.checks.comparisons.scalar_requirements import require_dependence, require_outputs

# Up to this many numbers V is the identity; beyond, a few random directions move all numbers at once.
FULL = 12
SUBSPACE = 4


def scalarize(
    f: Callable[..., Any], args: tuple[Any, ...], generator: torch.Generator, method: str = "auto"
) -> ScalarProblem:
    """Validate a function and its inputs, draw cotangents and directions, and return the problem."""
    function, leaves, still = function_of_leaves(f, args)
    if differentiates_inside(function, leaves):
        function = recorded_inside(function)
    outputs = require_outputs(f, args, function, leaves)
    if still:
        function = without_infinities(function, outputs)
        outputs = function(*(leaf.clone() for leaf in leaves))
    directions = _draw_directions(leaves, generator, method)
    reals = [real_parts(y) for y in outputs]
    cotangents = tuple(draw_normal(y.shape, generator).to(y.device) for y in reals)
    weights = tuple(
        draw_normal(y.shape, generator).to(y.device) / (1 + y.abs()).where(y.isfinite(), 1.0) for y in reals
    )
    eps = coarsest((*leaves, *outputs))
    problem = ScalarProblem(function, leaves, directions, cotangents, weights, eps, still=still)
    require_dependence(problem, outputs)
    return problem


def draw_normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Draw float64 normal numbers that bfloat16 represents exactly, so that every dtype gets equal numbers."""
    return torch.randn(shape, generator=generator, dtype=torch.float64, device=generator.device).bfloat16().double()


def _draw_directions(leaves: tuple[Tensor, ...], generator: torch.Generator, method: str) -> tuple[Tensor, ...]:
    sizes = [leaf.numel() for leaf in leaves]
    count = sum(sizes)
    full = count <= FULL if method == "auto" else method == "matrices"
    V = torch.eye(count, dtype=torch.float64, device="cpu") if full else draw_normal((count, SUBSPACE), generator)
    return tuple(block.to(leaf.device) for block, leaf in zip(V.split(sizes), leaves, strict=True))
