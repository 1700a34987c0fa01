"""Whether, and by what, the code that runs is differentiated: the questions that stand on all modes at once.

`transforms.in_transform` and `forward_mode.in_forward_mode` ask for one mode each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from hodiff.torch_internals.autograd.forward_mode import has_tangent, in_dual_level, in_forward_mode
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
    """Whether nothing but reverse mode can be at work, so that a graph recorded here sees all there is."""
    # It would miss what a transform, a level of forward mode or a compiled region around it does.
    return not torch.compiler.is_compiling() and not in_transform() and not in_forward_mode()


def may_be_differentiated(tensors: Iterable[Any] | None = None) -> bool:
    """Whether a derivative by these tensors, or any, may be asked for; False only where it certainly is not."""
    if in_transform() or in_forward_mode():
        return True
    if tensors is None:
        return torch.is_grad_enabled()
    return torch.is_grad_enabled() and any(isinstance(each, Tensor) and each.requires_grad for each in tensors)


def autograd_records() -> bool:
    """Whether `torch.autograd` records where gradients are switched on: not in inference mode."""
    # In a backward pass torch says that the mode is over, and its dispatcher still works by it.
    included: bool = torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.ADInplaceOrView)
    return included


def are_differentiated(tensors: Sequence[Tensor]) -> bool:
    """Whether a running transform, a graph or forward mode does differentiate by these tensors."""
    if in_transform():
        if differentiating_count():
            return True
        # Batching alone differentiates nothing, and a rule under vmap that calls its own function must come to an end.
        tensors = [below_batches(each) for each in tensors]
    if torch.is_grad_enabled() and any(each.requires_grad for each in tensors):
        return True
    return in_forward_mode() and any(map(has_tangent, tensors))


def carry_derivatives(tensors: Iterable[Tensor]) -> bool:
    """Whether a derivative by one of the tensors is being taken, at any level, or may be taken later."""
    if torch.compiler.is_compiling():
        return may_be_differentiated(tensors)
    return any(map(_carries_derivatives, tensors))


def is_observed(tensor: Tensor) -> bool:
    """Whether a transform or a level of forward mode that runs does differentiate by the tensor, or batches it."""
    while is_wrapped(tensor):
        if is_watched(tensor) and (is_batched(tensor) or tensor.requires_grad or _has_tangent_at_its_level(tensor)):
            return True
        tensor = below_one(tensor)
    return in_dual_level() and has_tangent(tensor)


def has_tangent_anywhere(tensor: Tensor) -> bool:
    """Whether a tensor is a dual number of any level of forward mode that runs."""
    while is_wrapped(tensor):
        if is_watched(tensor) and not is_batched(tensor) and _has_tangent_at_its_level(tensor):
            return True
        tensor = below_one(tensor)
    return in_dual_level() and has_tangent(tensor)


def _has_tangent_at_its_level(tensor: Tensor) -> bool:
    level = level_of(tensor)
    # Where its transform has been left for a moment, as by a rule, whoever is inside of it has to ask.
    if level not in batching_levels():
        return False
    with at_level(level):
        return in_forward_mode() and has_tangent(tensor)


def _may_have_tangent(tensor: Tensor) -> bool:
    """Whether a tensor has a tangent at its level, or it cannot be asked, as a batch is around it."""
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
