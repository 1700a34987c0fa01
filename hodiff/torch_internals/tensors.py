"""What a tensor does not tell publicly: its version, its base, and what its memory is."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, TypeVar

from torch import Tensor
from torch.multiprocessing import reductions

# How often it was changed in place; tensors made in inference mode have no version.
version_of: Callable[[Tensor], int] = attrgetter("_version")
# What a view is a view of, as autograd sees it.
base_of: Callable[[Tensor], Tensor | None] = attrgetter("_base")
is_view: Callable[[Tensor], bool] = Tensor._is_view
# The zeros that forward mode hands over have a shape and no memory.
is_zero_without_memory: Callable[[Tensor], bool] = Tensor._is_zerotensor


T = TypeVar("T", bound=Tensor)


# The attribute of a tensor that counts what was written into its memory.
VERSION = "_version"


def stands_for_tensor(value: Any) -> bool:
    """Whether a value is an object of hodiff or torch.fx that answers torch's functions in the place of a tensor."""
    kind = type(value)
    if isinstance(value, Tensor):
        return getattr(kind, "is_stand_in", False)
    return hasattr(kind, "__torch_function__")


def without_memory(subclass: type[T], like: Tensor) -> T:
    """A tensor of a subclass with `__torch_dispatch__`, which has no elements, and which no transform wraps."""
    return Tensor._make_wrapper_subclass(subclass, (0,), dtype=like.dtype, device=like.device)


# A storage as the key of a table: it does not keep the memory, and no other storage takes its place.
WeakStorage = reductions.StorageWeakRef


def storage_of(tensor: Tensor) -> int:
    """A number for the storage that a tensor lies in, as long as the storage lives."""
    return tensor.untyped_storage()._cdata


def share_storage(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors lie in the same storage."""
    return storage_of(a) == storage_of(b)


def has_gradient_hooks(tensor: Tensor) -> bool:
    """Whether hooks change or read the gradient of a tensor, or what is added up of it."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def has_tensor_hooks(tensor: Tensor) -> bool:
    """Whether hooks change or read the gradient of a tensor each time that one is taken."""
    return bool(tensor._backward_hooks)
