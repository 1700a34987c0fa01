"""Functions of pytrees as functions of their floating leaves that return their floating outputs.

Infinite or NaN elements of the inputs are constants, which the function gets unchanged. Outputs that are not finite as
a result are ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from hodiff.checks.attempts import Failure, attempt
from hodiff.checks.comparisons.scalar_requirements import require_inputs
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
