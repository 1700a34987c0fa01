"""Conversion of results to ordinary tensors, which can be changed in place, saved and passed to NumPy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hodiff.common.trees import dense, has_strides, is_ordinary
from hodiff.torch_internals.autograd.differentiation import only_reverse_mode
from hodiff.torch_internals.tensors import is_zero_without_memory, storage_of

T = TypeVar("T")


def ordinary(results: Iterable[Tensor], given: Iterable[Tensor] = ()) -> tuple[Tensor, ...]:
    """Return the results in tensors with memory of their own.

    Autograd returns zeros without memory, expanded and conjugated views, one tensor for the gradients of two inputs,
    or the cotangent itself.

    Args:
        results: Tensors as autograd made them.
        given: Tensors of the caller, whose memory must not be shared.

    Returns:
        The tensors, copied where necessary; unchanged inside transforms and compiled code.
    """
    if not only_reverse_mode():
        return tuple(results)
    taken = {storage_of(each) for each in given if type(each) in _OWN}
    own = []
    for each in results:
        if type(each) is Tensor:
            if is_zero_without_memory(each) or not is_ordinary(each):
                each = _plain(each)
            storage = storage_of(each)
            if storage in taken:
                each = each.clone()
                storage = storage_of(each)
            taken.add(storage)
        own.append(each)
    return tuple(own)


def ordinary_tree(results: T, given: Iterable[Tensor] = ()) -> T:
    """Apply `ordinary` to the tensors of a pytree; other leaves stay unchanged."""
    if not only_reverse_mode():
        return results
    leaves, spec = pytree.tree_flatten(results)
    made = iter(ordinary([leaf for leaf in leaves if isinstance(leaf, Tensor)], given))
    tree: T = pytree.tree_unflatten([next(made) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)
    return tree


# Subclasses that wrap other tensors may have no storage.
_OWN = {Tensor, torch.nn.Parameter}


def _plain(tensor: Tensor) -> Tensor:
    """Return a tensor with each element stored in memory, in a place of its own."""
    if is_zero_without_memory(tensor):
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    if not has_strides(tensor):
        return tensor.to_dense()
    return dense(tensor)
