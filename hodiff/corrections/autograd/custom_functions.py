"""Functions of other libraries, whose rules are constants to an outer forward pass in torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils import _pytree as pytree

from hodiff.corrections.declining import UNNEEDED, Redirected
from hodiff.corrections.mode import Corrections
from hodiff.corrections.registry import register
from hodiff.errors import RouteError
from hodiff.rules.any_order import outside_graphs
from hodiff.rules.nesting import nestable_jvp, without_own_tangents
from hodiff.torch_internals.autograd.differentiation import carry_derivatives
from hodiff.torch_internals.autograd.graph_nodes import place_of
from hodiff.torch_internals.autograd.transforms import (
    differentiating_count,
    innermost_jvp_level,
    outside_transforms,
)
from hodiff.torch_internals.autograd.wrapped_tensors import (
    below_one,
    below_transforms,
    is_wrapped,
    level_of,
    without_tangent,
)
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
    return Redirected((_nestable(function, operands), *operands))


def _rules_are_differentiated(operands: Sequence[Any]) -> bool:
    """Whether there is a pass around the one that runs the Function's rules: another transform, or a recording."""
    count = differentiating_count()
    if count != 1 or not torch.is_grad_enabled():
        return count > 1
    return any(isinstance(each, Tensor) and below_transforms(each).requires_grad for each in operands)


def _nestable(function: Any, operands: Sequence[Any]) -> type[Function]:
    """A stand-in for a Function, which is left as it is: the same rules, to be differentiated by passes around."""

    # Rules run inside the mode, which is set aside while it handles the call that they belong to. They close over the
    # Function, where those look for it who have a node of a graph.
    def backward(ctx: Any, *cotangents: Any) -> Any:
        with Corrections():
            return function.backward(ctx, *cotangents)

    @nestable_jvp
    def jvp(ctx: Any, *tangents: Any) -> Any:
        with Corrections():
            pushed = without_own_tangents(function.jvp(ctx, *tangents))
            if not torch.compiler.is_compiling():
                _require_recorded(function, ctx, operands, tangents, pushed)
            return pushed

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


# Behind a graph break dynamo would take up its frames one by one, in the midst of transforms.
@outside_graphs
def _require_recorded(function: Any, ctx: Any, operands: Sequence[Any], tangents: Sequence[Any], pushed: Any) -> None:
    """Refuse a jvp that loses what its tangents depend on.

    A tangent that comes out is linear in those that go in. Where it does not depend on what passes around differentiate
    by, the rule is given tangents that do.

    Raises:
        RouteError: If what comes out does not depend on them, either.
    """
    level = innermost_jvp_level()
    if level is None or not any(map(_is_nonzero, _unrecorded(pushed))):
        return
    seeded = [_seeded(t, x, level) for t, x in zip(tangents, operands, strict=True)]
    if not carry_derivatives(_tensors(seeded)):
        return
    found = without_own_tangents(function.jvp(ctx, *seeded))
    if carry_derivatives(_tensors(found)) or not any(map(_is_nonzero, _unrecorded(found))):
        return
    raise RouteError(
        f"{function.__name__}.jvp{place_of(function.jvp)} records nothing of what it computes (torch.no_grad, "
        ".detach(), .data, NumPy or a kernel), so that its own derivative would be zero without a word; write it with "
        "torch operators or other Functions of ctx.saved_tensors, or take hodiff.custom_jvp."
    )


def _seeded(tangent: Any, operand: Any, level: int) -> Any:
    """The same numbers as a tangent, which depend on what its operand depends on outside of a pass."""
    if not isinstance(tangent, Tensor) or not isinstance(operand, Tensor):
        return tangent
    # The call has come down from passes inside of this one.
    while is_wrapped(operand) and level_of(operand) > level:
        operand = below_one(operand)
    if operand.shape != tangent.shape:
        return tangent
    return torch.where(torch.ones_like(tangent, dtype=torch.bool), tangent, without_tangent(operand, level))


def _unrecorded(tree: Any) -> list[Tensor]:
    return [each for each in _tensors(tree) if not carry_derivatives([each])]


def _is_nonzero(tensor: Tensor) -> bool:
    with outside_transforms():
        return bool(below_transforms(tensor).detach().any())


def _tensors(tree: Any) -> list[Tensor]:
    return [each for each in pytree.tree_leaves(tree) if isinstance(each, Tensor)]
