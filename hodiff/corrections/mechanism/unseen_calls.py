"""Test whether torch's derivative is wrong for a call that no rule sees, by the transforms that are active."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hodiff.common.trees import tensors_in
from hodiff.corrections.mechanism.registry import Correction
from hodiff.routes import FORWARD_INSIDE
from hodiff.torch_internals.autograd.grad_mode import in_dual_level, in_forward_mode
from hodiff.torch_internals.autograd.transforms import differentiating_count, innermost_is_reverse
from hodiff.torch_internals.autograd.wrapped_tensors import below_transforms


def is_wrong(correction: Correction, arguments: Any, *, reads_others: bool = False) -> bool:
    """Whether torch's derivative of a call, by its arguments or other tensors it reads, would be silently wrong."""
    # Reverse mode as the innermost pass is trusted, as is a first derivative. A missing derivative raises by itself.
    if correction.kind != "wrong" or not in_forward_mode():
        return False
    routes = ("forward-over-reverse",) if innermost_is_reverse() else FORWARD_INSIDE
    return not set(routes).isdisjoint(correction.routes) and (
        # Something else differentiates as well, or may do so later by a graph.
        differentiating_count() + in_dual_level() > 1
        or (torch.is_grad_enabled() and (reads_others or any(map(_requires_grad, tensors_in(arguments)))))
    )


def _requires_grad(tensor: Tensor) -> bool:
    return below_transforms(tensor).requires_grad
