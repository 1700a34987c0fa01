"""Private properties of tensors: version, base, and kind of memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C import _get_dispatch_mode, _TorchDispatchModeKey
from torch._subclasses import fake_tensor
from torch.multiprocessing import reductions

# How often a tensor was changed in place; tensors made in inference mode have no version.
version_of: Callable[[Tensor], int] = attrgetter("_version")
# The base of a view, as autograd records it.
base_of: Callable[[Tensor], Tensor | None] = attrgetter("_base")
is_view: Callable[[Tensor], bool] = Tensor._is_view
# Forward mode returns zeros that have a shape, but no memory.
is_zero_without_memory: Callable[[Tensor], bool] = Tensor._is_zerotensor


T = TypeVar("T", bound=Tensor)

_MODES_OF_TRACES = (_TorchDispatchModeKey.FAKE, _TorchDispatchModeKey.PROXY)


# The attribute of a tensor that counts writes into its memory.
VERSION = "_version"


def stands_for_tensor(value: Any) -> bool:
    """Whether a value is an object of hodiff or torch.fx that handles torch's functions like a tensor."""
    kind = type(value)
    if isinstance(value, Tensor):
        return getattr(kind, "is_stand_in", False)
    # Dynamo of torch 2.11 and 2.12 cannot trace hasattr for every type.
    return getattr(kind, "__torch_function__", None) is not None


def broadcast_shape(*shapes: torch.Size) -> torch.Size:
    """Return the shape that shapes broadcast to; `torch.broadcast_shapes` makes 40 Python calls."""
    if torch.compiler.is_compiling():
        return torch.broadcast_shapes(*shapes)
    if shapes.count(shapes[0]) == len(shapes):
        return shapes[0]
    rank = max(map(len, shapes))
    found = [1] * rank
    for shape in shapes:
        for k, size in enumerate(shape, start=rank - len(shape)):
            if size != 1:
                found[k] = size
    return torch.Size(found)


def in_trace() -> bool:
    """Whether new tensors are fake, or operators are recorded by a trace."""
    return any(_get_dispatch_mode(key) is not None for key in _MODES_OF_TRACES)


def has_numbers(tensor: Tensor) -> bool:
    """Whether code may read the numbers of a tensor: it is neither fake, nor on the meta device, nor traced."""
    return not (tensor.is_meta or fake_tensor.is_fake(tensor) or in_trace())


def without_memory(subclass: type[T], like: Tensor, shape: Sequence[int] = (0,)) -> T:
    """Create a tensor of a subclass with `__torch_dispatch__`, without memory and outside of all transforms."""
    return Tensor._make_wrapper_subclass(subclass, shape, dtype=like.dtype, device=like.device)


# A storage as a key: it does not keep the memory alive, and no other storage compares equal to it.
WeakStorage = reductions.StorageWeakRef


def storage_of(tensor: Tensor) -> int:
    """Return a number that identifies a tensor's storage while the storage lives."""
    return tensor.untyped_storage()._cdata


def share_storage(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors share a storage."""
    return storage_of(a) == storage_of(b)


def has_gradient_hooks(tensor: Tensor) -> bool:
    """Whether a tensor has hooks that change or read its gradient, or its accumulated gradient."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def has_tensor_hooks(tensor: Tensor) -> bool:
    """Whether a tensor has hooks that run each time its gradient is computed."""
    return bool(tensor._backward_hooks)
