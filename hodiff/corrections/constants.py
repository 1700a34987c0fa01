"""What is computed where derivatives are switched off: a constant to forward mode as it is to reverse mode."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hodiff.torch_internals.autograd.grad_mode import CONSTANTS
from hodiff.torch_internals.autograd.recording import set_recording
from hodiff.torch_internals.autograd.transforms import differentiating_count

# What switches, and what gives a tensor that is there already. (mypy takes Tensor.grad and Tensor.data for
# tensors, while on the class they are descriptors.)
_KEPT = frozenset({set_recording, Tensor.grad.__get__})  # type: ignore[union-attr]


def makes_constants(function: Any) -> bool:
    """Whether what a call makes here is constant to all transforms, those inside of the block excepted."""
    depth = CONSTANTS.depth
    if depth is None or depth != differentiating_count() or function in _KEPT:
        return False
    if torch.is_grad_enabled():
        # A function switched off and not on again, and torch put back what it had found around it.
        CONSTANTS.depth = None
        return False
    return True


def as_constants(result: Any, arguments: Any) -> Any:
    """What a call has made, detached; what it was given, such as what it has written into, stays as it is."""
    given = {id(each) for each in pytree.tree_leaves(arguments) if isinstance(each, Tensor)}
    return pytree.tree_map_only(Tensor, lambda each: each if id(each) in given else each.detach(), result)
