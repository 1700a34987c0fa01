"""Functions of other libraries, whose rules are constants to an outer forward pass in torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from hodiff.corrections.declining import UNNEEDED, Redirected
from hodiff.corrections.mode import Corrections
from hodiff.corrections.registry import register
from hodiff.rules.nesting import nestable_jvp, without_own_tangents
from hodiff.torch_internals.autograd.transforms import differentiating_count
from hodiff.torch_internals.autograd.wrapped_tensors import below_transforms
from hodiff.torch_internals.interception import apply_in_transform


@register(
    apply_in_transform,
    name="torch.autograd.Function.apply",
    routes=("forward-over-forward",),
    reason="torch runs a Function's jvp with forward mode off: a constant to an outer forward pass",
    reference="hodiff.functions.nestable_jvp around it",
)
def _apply(function: type[Function], *operands: Any, **_: Any) -> Any:
    if function.__module__.startswith("hodiff.") or not _rules_are_differentiated(operands):
        return UNNEEDED
    return Redirected((_nestable(function), *operands))


def _rules_are_differentiated(operands: Sequence[Any]) -> bool:
    """Whether there is a pass around the one that runs the Function's rules: another transform, or a recording."""
    count = differentiating_count()
    if count != 1 or not torch.is_grad_enabled():
        return count > 1
    return any(isinstance(each, Tensor) and below_transforms(each).requires_grad for each in operands)


def _nestable(function: Any) -> type[Function]:
    """A stand-in for a Function, which is left as it is: the same rules, to be differentiated by passes around."""

    # Rules run inside the mode, which is set aside while it handles the call that they belong to. They close over the
    # Function, where those look for it who have a node of a graph.
    def backward(ctx: Any, *cotangents: Any) -> Any:
        with Corrections():
            return function.backward(ctx, *cotangents)

    @nestable_jvp
    def jvp(ctx: Any, *tangents: Any) -> Any:
        with Corrections():
            return without_own_tangents(function.jvp(ctx, *tangents))

    def vmap(*args: Any) -> Any:
        with Corrections():
            return function.vmap(*args)

    members = {
        "__module__": function.__module__,
        "generate_vmap_rule": function.generate_vmap_rule,
        "forward": staticmethod(function.forward),
        "setup_context": staticmethod(function.setup_context),
        "backward": staticmethod(backward),
        "jvp": staticmethod(jvp),
        # torch compares it with the one that a Function without a rule inherits.
        "vmap": staticmethod(Function.vmap if function.vmap is Function.vmap else vmap),
        # Below all transforms the Function itself runs.
        "apply": staticmethod(function.apply),
    }
    return type(function.__name__, (Function,), members)
