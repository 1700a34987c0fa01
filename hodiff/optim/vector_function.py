"""Functions of a pytree that return several numbers, as functions of vectors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hodiff.common.trees import describe, tensors_in
from hodiff.corrections import Corrections
from hodiff.errors import InputError
from hodiff.optim.variables import Variables


def vector_function(
    caller: str, argument: str, function: Callable[..., Any], args: tuple[Any, ...], variables: Variables
) -> Callable[[Tensor], Tensor]:
    """Wrap a function as one from the vector of the unknowns to the vector of its outputs, within `corrected()`."""

    def values(x: Tensor) -> Tensor:
        with Corrections():
            found = function(variables.space.unflatten(x), *args)
        return vector_of(caller, argument, found, x)

    return values


def vector_of(caller: str, argument: str, found: Any, like: Tensor) -> Tensor:
    """Join the outputs of a function to one vector; raise if they are no pytree of real tensors."""
    tensors = tensors_in(found)
    if not tensors or len(tensors) != len(pytree.tree_leaves(found)):
        raise InputError(
            f"{caller}: {argument}: expected a function that returns a tensor or a pytree of tensors, got "
            f"{describe(found)}."
        )
    if any(each.is_complex() for each in tensors):
        raise InputError(
            f"{caller}: {argument}: expected a function that returns real numbers, got complex ones; return "
            "torch.view_as_real(...) of them."
        )
    return torch.cat([each.reshape(-1).to(like) for each in tensors])


def numbers_of(values: Callable[[Tensor], Tensor], x: np.ndarray, variables: Variables) -> np.ndarray:
    """Compute the values at x as a NumPy vector; the function itself may differentiate with respect to x."""
    with torch.enable_grad():
        return variables.array(values(variables.vector(x).requires_grad_()))
