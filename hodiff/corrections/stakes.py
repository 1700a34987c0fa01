"""Whether a call that no rule sees would have a wrong derivative, by the way in which it is being differentiated."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hodiff.corrections.registry import Correction
from hodiff.routes import FORWARD_INSIDE
from hodiff.torch_internals.forward_mode import in_dual_level, in_forward_mode
from hodiff.torch_internals.transforms import differentiating_count, innermost_is_reverse
from hodiff.torch_internals.wrapped_tensors import below_transforms


def is_wrong(correction: Correction, arguments: Any) -> bool:
    """Whether torch's own derivative would be wrong, in silence, of a call with these arguments."""
    # Reverse mode inside of all else is trusted, and so is a first derivative. One that is missing raises by itself.
    if correction.kind != "wrong" or not in_forward_mode():
        return False
    routes = ("forward-over-reverse",) if innermost_is_reverse() else FORWARD_INSIDE
    return not set(routes).isdisjoint(correction.routes) and is_differentiated_twice(arguments)


def is_differentiated_twice(arguments: Any) -> bool:
    """Whether, in forward mode, something else differentiates too, or may do so later by a graph."""
    if differentiating_count() + in_dual_level() > 1:
        return True
    return torch.is_grad_enabled() and any(below_transforms(each).requires_grad for each in _tensors(arguments))


def _tensors(arguments: Any) -> Iterable[Tensor]:
    return (each for each in pytree.tree_leaves(arguments) if isinstance(each, Tensor))
