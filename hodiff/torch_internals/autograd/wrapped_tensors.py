"""Tensors wrapped by `torch.func` transforms: the transform of a wrapper, and the tensor inside."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C import _functorch as functorch

from hodiff.torch_internals.autograd.transforms import batching_levels, in_transform, outside_transforms

is_wrapped: Callable[[Tensor], bool] = functorch.is_functorch_wrapped_tensor
is_batched: Callable[[Tensor], bool] = functorch.is_batchedtensor
below_one: Callable[[Tensor], Tensor] = functorch.get_unwrapped
# The level of the outermost wrapper's transform; negative if the transform has ended.
level_of: Callable[[Tensor], int] = functorch.maybe_get_level
# A wrapper may outlive its transform; the tensor inside is then a constant, which operators unwrap.
unwrap_if_ended: Callable[[Tensor], Tensor] = functorch.unwrap_if_dead


def is_watched(tensor: Tensor) -> bool:
    """Whether a transform that is still running differentiates or batches the tensor."""
    # torch's stubs lack is_dead_tensor_wrapper.
    return (
        functorch.is_gradtrackingtensor(tensor) or functorch.is_batchedtensor(tensor)
    ) and not functorch.is_dead_tensor_wrapper(tensor)  # type: ignore[attr-defined]


def is_batched_innermost(tensor: Tensor) -> bool:
    """Whether the innermost transform, which must be a `vmap`, has batched the tensor."""
    return (
        functorch.is_batchedtensor(tensor)
        and functorch.maybe_get_level(tensor) == functorch.peek_interpreter_stack().level()
    )


def is_of_no_running_transform(tensor: Tensor) -> bool:
    """Whether a wrapped tensor belongs to a transform that has not ended, but is not running at this point."""
    if not functorch.is_functorch_wrapped_tensor(tensor):
        return False
    running = batching_levels()
    while functorch.is_functorch_wrapped_tensor(tensor):
        level = level_of(tensor)
        if level < 0:  # its transform has ended, so it is a constant
            return False
        if level not in running or functorch.is_batchedtensor(tensor) != running[level]:
            return True
        tensor = functorch.get_unwrapped(tensor)
    return False


def below_transforms(tensor: Tensor) -> Tensor:
    """Return the tensor below all transforms, whose numbers can be read."""
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


def first_row(tensor: Tensor) -> Tensor:
    """Unwrap a tensor, and take the first row of each batch; call it outside of all transforms."""
    if not is_wrapped(tensor):
        return tensor
    inner = first_row(below_one(tensor))
    return inner.select(functorch.maybe_get_bdim(tensor), 0) if is_batched(tensor) else inner


def is_batched_by_any(tensor: Tensor) -> bool:
    """Whether at least one wrapper of a tensor is a `vmap`'s."""
    while functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.is_batchedtensor(tensor):
            return True
        tensor = functorch.get_unwrapped(tensor)
    return False


def numbers_in(tensor: Tensor) -> np.ndarray:
    """Return a tensor as an array on the CPU, bfloat16 as float32, also inside transforms, unless they batched it."""
    inner = below_transforms(tensor)
    # Inside of a transform, even plain tensors cannot be converted to arrays.
    with outside_transforms() if in_transform() else nullcontext():
        inner = inner.detach().cpu()
        # NumPy has no bfloat16.
        array: np.ndarray = (inner.float() if inner.dtype is torch.bfloat16 else inner).numpy()
    return array


def any_holds(flags: Tensor) -> bool:
    """Whether any flag is true, in any row of a batch, also inside transforms."""
    inner = below_transforms(flags)
    with outside_transforms() if in_transform() else nullcontext():
        return bool(inner.any())


def below_batches(tensor: Tensor) -> Tensor:
    """Return the tensor below the outermost wrappers that are `vmap`s."""
    while functorch.is_batchedtensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


def below_derivatives(tensor: Tensor) -> Tensor:
    """Return the tensor below the outermost wrappers that are differentiating transforms."""
    while functorch.is_gradtrackingtensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


def without_ended_wrappers(tensor: Tensor) -> Tensor:
    """Return the tensor below all wrappers whose transforms have ended."""
    # torch's stubs lack is_dead_tensor_wrapper.
    while functorch.is_dead_tensor_wrapper(tensor):  # type: ignore[attr-defined]
        tensor = functorch.unwrap_if_dead(tensor)
    return tensor


def without_tangent(tensor: Any, level: int) -> Any:
    """Rewrap a tensor at a level of differentiation, without its tangent there; return other values unchanged."""
    if not isinstance(tensor, Tensor):
        return tensor
    if functorch.is_batchedtensor(tensor):
        wrapped = functorch.get_unwrapped(tensor)
        inner = without_tangent(wrapped, level)
        if inner is wrapped:
            return tensor
        return functorch._add_batch_dim(inner, functorch.maybe_get_bdim(tensor), functorch.maybe_get_level(tensor))
    if functorch.is_gradtrackingtensor(tensor) and functorch.maybe_get_level(tensor) == level:
        return functorch._wrap_for_grad(functorch._unwrap_for_grad(tensor, level), level)
    return tensor
