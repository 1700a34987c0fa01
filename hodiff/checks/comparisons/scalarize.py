"""Construction of `ScalarProblem`, a scalar function of a few numbers, from a function of pytrees.

Everything that `check` compares is a derivative of a `ScalarProblem` with a random cotangent and random directions.

The functions take the floating leaves of pytrees and return their floating outputs. Infinite or NaN elements of the
inputs are constants, which the function gets unchanged. Outputs that are not finite as a result are ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from hodiff.checks.attempts import Failure, attempt
from hodiff.checks.comparisons.scalar_problem import ScalarProblem, coarsest, real_parts
from hodiff.checks.comparisons.scalar_requirements import require_dependence, require_inputs, require_outputs
from hodiff.errors import InputError
from hodiff.torch_internals.autograd.differentiation import are_differentiated


def function_of_leaves(
    f: Callable[..., Any], args: tuple[Any, ...]
) -> tuple[Callable[..., Any], tuple[Tensor, ...], int]:
    """Return f as a function of its floating leaves, the leaves (constants as 0), and the number of constants."""
    leaves, structure = tree_flatten(args)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    require_inputs(args, any(leaves[i].numel() for i in places))
    constants = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    still = {i: ~constants[i].isfinite() for i in places if not constants[i].isfinite().all()}

    def function(*moving: Tensor) -> tuple[Tensor, ...]:
        filled = list(constants)
        for place, leaf in zip(places, moving, strict=True):
            # A probe may pass other shapes.
            stays = place in still and leaf.shape == still[place].shape
            filled[place] = torch.where(still[place], constants[place].to(leaf.dtype), leaf) if stays else leaf
        return _floating(f(*tree_unflatten(filled, structure)))

    points = tuple(constants[i].masked_fill(still[i], 0.0) if i in still else constants[i].clone() for i in places)
    return function, points, sum(int(each.sum()) for each in still.values())


def differentiates_inside(function: Callable[..., Any], leaves: tuple[Tensor, ...]) -> bool:
    """Whether f runs only if gradients are recorded, as it takes a gradient by its own input."""
    with torch.no_grad():
        plain = attempt(function, *(leaf.clone() for leaf in leaves))
    return isinstance(plain, Failure) and not isinstance(attempt(recorded_inside(function), *leaves), Failure)


def recorded_inside(function: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    """Wrap the function so that it records gradients whenever no outer code differentiates it."""

    def recorded(*leaves: Tensor) -> tuple[Tensor, ...]:
        if are_differentiated(leaves):
            return function(*leaves)
        with torch.enable_grad():
            outputs = function(*(leaf.detach().requires_grad_() for leaf in leaves))
        return tuple(each.detach() for each in outputs)

    return recorded


def without_infinities(
    function: Callable[..., tuple[Tensor, ...]], outputs: tuple[Tensor, ...]
) -> Callable[..., tuple[Tensor, ...]]:
    """Replace outputs that are infinite or NaN at the point by 0, such as the logarithm of a masked weight."""
    masks = [~y.isfinite() for y in outputs]

    def finite(*leaves: Tensor) -> tuple[Tensor, ...]:
        pairs = zip(function(*leaves), masks, strict=True)
        return tuple(torch.where(mask, 0.0, y) if mask.shape == y.shape and mask.any() else y for y, mask in pairs)

    return finite


def _floating(output: Any) -> tuple[Tensor, ...]:
    """Return the floating or complex outputs; integers, booleans and None have no derivative."""
    tensors = [leaf for leaf in tree_leaves(output) if leaf is not None]
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise InputError(f"check: f(*inputs): expected tensors, got {type(tensor).__name__}. Return tensors only.")
    return tuple(t for t in tensors if t.is_floating_point() or t.is_complex())


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
