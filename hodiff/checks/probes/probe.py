"""`probe`: runs all probes on a function and the custom Functions that it calls."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence, Set
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hodiff.checks.attempts import Failure, attempt
from hodiff.checks.check_options import CheckOptions
from hodiff.checks.module_buffers import buffers_put_back
from hodiff.checks.probes.cause import UNRELIABLE, Cause, by_forward
from hodiff.checks.probes.domain_edges import domain_edges, large_arguments
from hodiff.checks.probes.empty_tensors import empty_tensors
from hodiff.checks.probes.first_order import first_order, first_order_beside
from hodiff.checks.probes.fixed_tensors import device_of_function, fixed_devices, fixed_dtypes, narrow_factors
from hodiff.checks.probes.function_calls import FunctionCall, LeavesFunction
from hodiff.checks.probes.left_graph import left_graph
from hodiff.checks.probes.linearity import (
    frozen_arguments,
    linearity,
    lone_tangents,
    returned_gradients,
    unneeded_gradients,
)
from hodiff.checks.probes.memory_layouts import memory_layouts
from hodiff.checks.probes.repeated_calls import calls_between, repeated_calls
from hodiff.checks.probes.rule_slopes import backward_slopes, forward_slopes
from hodiff.checks.probes.saved_tensors import wasted_memory
from hodiff.checks.probes.side_effects import in_place_writes, tensors_on_context, uninitialised_memory
from hodiff.checks.source_lines import class_location
from hodiff.corrections import corrected


def operators_without_forward_mode(call: FunctionCall, generator: torch.Generator) -> list[Cause]:
    """Report an operator of torch.library, which has no forward mode."""
    del generator
    evidence = (f"{call.name} is an operator of torch.library, with the rule of its register_autograd alone",)
    return [Cause("HD412", evidence, by_forward, needs_symptom=True)] if call.of_operator else []


Probe = Callable[[FunctionCall, torch.Generator], list[Cause]]

# Codes of wrong formulas, which surrogates have on purpose.
_OF_FORMULAS = {"HD101", "HD102", "HD105", "HD109", "HD110", "HD111", "HD112"}

# Code that takes numbers out of tensors rarely handles empty ones.
_OFF_GRAPH = {"HD104", "HD106"}

_ROUNDED = {"HD306"}
_FORMULA = {"HD101", "HD105", "HD109", "HD110"}

# Probes, and the codes after which a probe is skipped.
PROBES: tuple[tuple[Probe, Set[str]], ...] = (
    (uninitialised_memory, set()),
    (repeated_calls, {"HD308"}),
    (in_place_writes, set()),
    (calls_between, UNRELIABLE),
    (memory_layouts, UNRELIABLE),
    (tensors_on_context, set()),
    (returned_gradients, set()),
    (frozen_arguments, UNRELIABLE | {"HD203"}),
    # Skip this probe if a gradient is missing or lost when another argument needs none.
    (unneeded_gradients, {"HD203", "HD101"}),
    (fixed_dtypes, UNRELIABLE),
    (fixed_devices, set()),
    (lone_tangents, UNRELIABLE | _ROUNDED),
    (first_order, UNRELIABLE | _ROUNDED),
    (linearity, UNRELIABLE),
    # A wrong formula need not read what the right one would.
    (wasted_memory, _FORMULA),
    (backward_slopes, UNRELIABLE | _ROUNDED),
    (forward_slopes, UNRELIABLE | _ROUNDED),
    (narrow_factors, UNRELIABLE | _ROUNDED | _FORMULA),
    (first_order_beside, UNRELIABLE | _ROUNDED | _FORMULA | {"HD102"}),
    (operators_without_forward_mode, set()),
)


def probe(
    f: Any,
    args: tuple[Any, ...],
    function: LeavesFunction,
    leaves: tuple[Tensor, ...],
    calls: list[FunctionCall],
    options: CheckOptions,
    truth: LeavesFunction | None = None,
    rules: Sequence[Cause] = (),
) -> list[Cause]:
    """Run all applicable probes on a function and the calls within it; a probe that raises finds nothing."""
    with warnings.catch_warnings():
        # Probes run f at points and in dtypes that the user did not ask for.
        warnings.simplefilter("ignore")
        causes = [cause for call in calls for cause in _of_call(call, options.seed)]
        if not options.brief:
            causes += _of_whole(f, args, function, leaves, {cause.code for cause in causes}, truth, vmap=options.vmap)
        # A wrong custom rule explains what calls that leave the graph would explain, too.
        if not calls and not rules:
            causes += _causes_of(left_graph, function, leaves)
        causes = [*rules, *causes]
    return [cause for cause in causes if not (options.approximate and cause.code in _OF_FORMULAS)]


def _of_call(call: FunctionCall, seed: int) -> list[Cause]:
    causes: list[Cause] = []
    for each, after in PROBES:
        if not after & {cause.code for cause in causes}:
            causes += _causes_of(each, call, torch.Generator().manual_seed(seed))
    return causes


def _of_whole(
    f: Any,
    args: tuple[Any, ...],
    function: LeavesFunction,
    leaves: tuple[Tensor, ...],
    codes: set[str],
    truth: LeavesFunction | None,
    *,
    vmap: bool,
) -> list[Cause]:
    location = class_location(f)
    found: list[Cause] = []
    if not UNRELIABLE & codes:
        with buffers_put_back():
            found += _causes_of(large_arguments, function, leaves, location, truth)
            # Skip infinities if large arguments overflow already, or the formula is wrong.
            found += _causes_of(
                partial(domain_edges, infinite=not found and not _FORMULA & codes), function, leaves, location, truth
            )
            if not _OFF_GRAPH & codes:
                # Torch's own gradient of an empty pdist ends the process; hodiff's rule does not.
                with corrected():
                    found += _causes_of(partial(empty_tensors, vmap=vmap), f, args, leaves, location)
    if not isinstance(f, type) and "HD307" not in codes:
        found += _causes_of(device_of_function, f, args)
    return found


def _causes_of(each: Callable[..., list[Cause]], *arguments: Any) -> list[Cause]:
    found = attempt(each, *arguments)
    return [] if isinstance(found, Failure) else found
