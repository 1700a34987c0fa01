"""Detach results computed where derivatives are switched off: constants in forward mode as in reverse mode."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hodiff.torch_internals.autograd.grad_mode import CONSTANTS
from hodiff.torch_internals.autograd.recording import set_recording
from hodiff.torch_internals.autograd.transforms import differentiating_count

# Functions whose results are not detached: the switch itself, and the getter of an existing tensor. (mypy takes
# Tensor.grad and Tensor.data for tensors, while on the class they are descriptors.)
_KEPT = frozenset({set_recording, Tensor.grad.__get__})  # type: ignore[union-attr]


def makes_constants(function: Any) -> bool:
    """Whether the result of a call is constant to all transforms outside the block."""
    depth = CONSTANTS.depth
    if depth is None or depth != differentiating_count() or function in _KEPT:
        return False
    if torch.is_grad_enabled():
        # A function switched recording off and never on again; torch has restored the outer state.
        CONSTANTS.depth = None
        return False
    return True


def as_constants(result: Any, arguments: Any) -> Any:
    """Detach the tensors in a result, except arguments that are returned, such as those written in place."""
    given = {id(each) for each in pytree.tree_leaves(arguments) if isinstance(each, Tensor)}
    return pytree.tree_map_only(Tensor, lambda each: each if id(each) in given else each.detach(), result)
