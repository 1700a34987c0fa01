"""Probes of wrong rules of `custom_jvp` and `custom_vjp`, HD117, and of operators of torch.library, HD412."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from hodiff.authoring.custom_rule import CustomRule
from hodiff.checks.attempts import attempt
from hodiff.checks.probes.cause import Cause, by_forward, of_derivatives
from hodiff.checks.probes.function_calls import FunctionCall, LeavesFunction
from hodiff.checks.source_lines import class_location
from hodiff.errors import RouteError
from hodiff.graphs import nodes_of
from hodiff.recompute.cut_graphs import UnrecordedGradientError


def operators_without_forward_mode(call: FunctionCall, generator: torch.Generator) -> list[Cause]:
    """Report an operator of torch.library, which has no forward mode."""
    del generator
    evidence = (f"{call.name} is an operator of torch.library, with the rule of its register_autograd alone",)
    return [Cause("HD412", evidence, by_forward, needs_symptom=True)] if call.of_operator else []


def custom_rules(function: LeavesFunction, leaves: tuple[Tensor, ...]) -> list[Cause]:
    """Check the rules of `custom_jvp` and `custom_vjp` functions by torch's gradcheck and gradgradcheck."""
    tracked = [leaf.clone().requires_grad_() for leaf in leaves]
    found: dict[CustomRule, Cause] = {}
    with torch.enable_grad():
        for node in nodes_of(*(y for y in function(*tracked) if y.requires_grad)):
            owner = getattr(getattr(node, "call", None), "owner", None)
            if isinstance(owner, CustomRule) and owner not in found and attempt(_is_right, owner, node) is False:
                evidence = (f"the rule of {owner.__name__} fails torch's gradcheck or gradgradcheck by itself",)
                found[owner] = Cause("HD117", evidence, of_derivatives, class_location(owner), needs_symptom=True)
    return list(found.values())


def _is_right(owner: CustomRule, node: Any) -> bool:
    call = node.call
    saved = node.saved_tensors[: len(node.needs_input_grad) - 1]
    places = [i for i, each in enumerate(saved) if each.is_floating_point()]

    def alone(*moving: Tensor) -> tuple[Tensor, ...]:
        filled = [each.detach() for each in saved]
        for place, each in zip(places, moving, strict=True):
            filled[place] = each
        return tuple(_floating(owner(*call.all_arguments(filled))))

    moving = tuple(saved[i].detach().double().requires_grad_() for i in places)
    try:
        once = torch.autograd.gradcheck(alone, moving, raise_exception=False)
        return once and torch.autograd.gradgradcheck(alone, moving, raise_exception=False)
    except RouteError as error:
        if isinstance(error.__cause__, UnrecordedGradientError):
            return False
        raise


def _floating(output: Any) -> Iterator[Tensor]:
    """Yield the floating-point tensors of an output."""
    for each in tree_leaves(output):
        if isinstance(each, Tensor) and each.is_floating_point():
            yield each
