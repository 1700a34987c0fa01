"""Whether a call that no rule sees would have a wrong derivative, by the way in which it is being differentiated."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hodiff.corrections.registry import Correction
from hodiff.routes import FORWARD_INSIDE
from hodiff.torch_internals.autograd.forward_mode import in_dual_level, in_forward_mode
from hodiff.torch_internals.autograd.transforms import differentiating_count, innermost_is_reverse
from hodiff.torch_internals.autograd.wrapped_tensors import below_transforms


def is_wrong(correction: Correction, arguments: Any, *, reads_others: bool = False) -> bool:
    """Whether torch's own derivative of a call, by its arguments or what else it reads, would be wrong in silence."""
    # Reverse mode inside of all else is trusted, and so is a first derivative. One that is missing raises by itself.
    if correction.kind != "wrong" or not in_forward_mode():
        return False
    routes = ("forward-over-reverse",) if innermost_is_reverse() else FORWARD_INSIDE
    return not set(routes).isdisjoint(correction.routes) and (
        # In forward mode something else differentiates too, or may do so later by a graph.
        differentiating_count() + in_dual_level() > 1
        or (torch.is_grad_enabled() and (reads_others or any(map(_requires_grad, _tensors(arguments)))))
    )


def _requires_grad(tensor: Tensor) -> bool:
    return below_transforms(tensor).requires_grad


def _tensors(arguments: Any) -> Iterable[Tensor]:
    return (each for each in pytree.tree_leaves(arguments) if isinstance(each, Tensor))
