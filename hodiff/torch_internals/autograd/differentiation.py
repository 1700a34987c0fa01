"""Checks whether the running code is differentiated, by any mode of differentiation.

`transforms.in_transform` and `forward_mode.in_forward_mode` check a single mode each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from hodiff.torch_internals.autograd.grad_mode import has_tangent, in_dual_level, in_forward_mode
from hodiff.torch_internals.autograd.transforms import (
    at_level,
    batching_levels,
    differentiating_count,
    in_func_jvp,
    in_transform,
)
from hodiff.torch_internals.autograd.wrapped_tensors import (
    below_batches,
    below_one,
    is_batched,
    is_watched,
    is_wrapped,
    level_of,
)


def only_reverse_mode() -> bool:
    """Whether only reverse mode can be active, so that a graph recorded here is complete."""
    # The graph would miss a surrounding transform, level of forward mode, or compiled region.
    return not torch.compiler.is_compiling() and not in_transform() and not in_forward_mode()


def may_be_differentiated(tensors: Iterable[Any] | None = None) -> bool:
    """Whether a derivative by these tensors, or any, may be taken; False only if that is certain."""
    if torch.is_grad_enabled():
        if tensors is None:
            return True
        for each in tensors:  # a generator would take half of the time
            if isinstance(each, Tensor) and each.requires_grad:
                return True
    return in_transform() or in_forward_mode()


def autograd_records() -> bool:
    """Whether `torch.autograd` records if gradients are switched on, as it does outside of inference mode."""
    # In a backward pass torch reports that inference mode is off, but its dispatcher still obeys it.
    included: bool = torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.ADInplaceOrView)
    return included


def are_differentiated(tensors: Sequence[Tensor]) -> bool:
    """Whether a running transform, a graph or forward mode differentiates by these tensors."""
    if in_transform():
        if differentiating_count():
            return True
        # Batching differentiates nothing, and a rule under vmap that calls its own function must not recurse forever.
        tensors = [below_batches(each) for each in tensors]
    if torch.is_grad_enabled() and any(each.requires_grad for each in tensors):
        return True
    return in_forward_mode() and any(map(has_tangent, tensors))


def carry_derivatives(tensors: Iterable[Tensor]) -> bool:
    """Whether a derivative by at least one tensor is being taken, at any level, or may be taken later."""
    if torch.compiler.is_compiling():
        return may_be_differentiated(tensors)
    return any(map(_carries_derivatives, tensors))


def is_observed(tensor: Tensor) -> bool:
    """Whether a running transform or level of forward mode differentiates by the tensor, or batches it."""
    while is_wrapped(tensor):
        if is_watched(tensor) and (is_batched(tensor) or tensor.requires_grad or _has_tangent_at_its_level(tensor)):
            return True
        tensor = below_one(tensor)
    return in_dual_level() and has_tangent(tensor)


def has_tangent_anywhere(tensor: Tensor) -> bool:
    """Whether a tensor is a dual number of any running level of forward mode."""
    while is_wrapped(tensor):
        if is_watched(tensor) and not is_batched(tensor) and _has_tangent_at_its_level(tensor):
            return True
        tensor = below_one(tensor)
    return in_dual_level() and has_tangent(tensor)


def _has_tangent_at_its_level(tensor: Tensor) -> bool:
    level = level_of(tensor)
    # If its transform has been left temporarily, as by a rule, the code inside of the transform has to check.
    if level not in batching_levels():
        return False
    with at_level(level):
        return in_forward_mode() and has_tangent(tensor)


def _may_have_tangent(tensor: Tensor) -> bool:
    """Whether a tensor may have a tangent at its level; True if a surrounding batch hides that."""
    if not in_func_jvp() or is_batched(tensor):
        return False
    try:
        return _has_tangent_at_its_level(tensor)
    except RuntimeError:
        return True


def _carries_derivatives(tensor: Tensor) -> bool:
    while is_wrapped(tensor):
        if is_watched(tensor) and (tensor.requires_grad or _may_have_tangent(tensor)):
            return True
        tensor = below_one(tensor)
    if tensor.requires_grad and torch.is_grad_enabled():
        return True
    return in_forward_mode() and has_tangent(tensor)
