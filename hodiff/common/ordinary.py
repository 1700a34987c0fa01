"""Results as ordinary tensors: with memory of their own, that can be changed in place, saved and given to NumPy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hodiff.common.trees import dense, has_strides
from hodiff.torch_internals.autograd.differentiation import only_reverse_mode
from hodiff.torch_internals.tensors import is_zero_without_memory, storage_of

T = TypeVar("T")


def ordinary(results: Iterable[Tensor], given: Iterable[Tensor] = ()) -> tuple[Tensor, ...]:
    """The same numbers in tensors of their own.

    Autograd hands out zeros without memory, expanded and conjugated views, and one tensor for the gradients of two
    inputs, or the very tensor that was pulled back.

    Args:
        results: Tensors as autograd made them.
        given: Those of the caller, whose memory is not to be shared.

    Returns:
        The tensors, copied where need be, and as they are inside of transforms and compiled code.
    """
    if not only_reverse_mode():
        return tuple(results)
    taken = {storage_of(each) for each in given if type(each) in _OWN}
    own = []
    for each in results:
        if type(each) is Tensor:
            each = _plain(each)
            storage = storage_of(each)
            if storage in taken:
                each = each.clone()
                storage = storage_of(each)
            taken.add(storage)
        own.append(each)
    return tuple(own)


def ordinary_tree(results: T, given: Iterable[Tensor] = ()) -> T:
    """The same for a pytree, in which other things than tensors stay as they are."""
    if not only_reverse_mode():
        return results
    leaves, spec = pytree.tree_flatten(results)
    made = iter(ordinary([leaf for leaf in leaves if isinstance(leaf, Tensor)], given))
    tree: T = pytree.tree_unflatten([next(made) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)
    return tree


# Subclasses that wrap other tensors may have no storage.
_OWN = {Tensor, torch.nn.Parameter}


def _plain(tensor: Tensor) -> Tensor:
    """A tensor whose elements lie in memory as they are, each in a place of its own."""
    if is_zero_without_memory(tensor):
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    if not has_strides(tensor):
        return tensor.to_dense()
    if tensor.is_neg() or tensor.is_conj():
        tensor = tensor.resolve_conj().resolve_neg()
    return dense(tensor)
