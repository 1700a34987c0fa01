"""Checks of the rules of `custom_jvp`, `custom_vjp` and `elementwise` functions alone: HD117, HD301 to HD303."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hodiff.authoring.custom_rule import CustomRule
from hodiff.authoring.rule_checks import ChangedInPlaceError, versions_of
from hodiff.checks.attempts import Failure, attempt
from hodiff.checks.check_options import CheckOptions
from hodiff.checks.comparisons.scalar_problem import ScalarProblem
from hodiff.checks.probes.cause import Cause, every_entry, of_derivatives
from hodiff.checks.probes.function_calls import FunctionCall, recorded_calls
from hodiff.checks.report.data import Entry
from hodiff.checks.source_lines import class_location
from hodiff.checks.subjects.subject import failures, subject_of_function
from hodiff.errors import InputError
from hodiff.graphs import nodes_of
from hodiff.torch_internals.autograd.graph_nodes import function_of


def wrong_rules(problem: ScalarProblem, options: CheckOptions) -> list[Cause]:
    """Compare the derivatives of each function with a custom rule, alone, at the arguments of its first call."""
    nodes: Any = attempt(_nodes_within, problem)
    if isinstance(nodes, Failure):
        return []
    found: list[Cause] = []
    for node in {_owner_of(each): each for each in reversed(nodes)}.values():
        cause = attempt(_custom_rule, node, options)
        found += [cause] if isinstance(cause, Cause) else []
    classes = dict.fromkeys(cls for cls in map(function_of, nodes) if cls is not None and hasattr(cls, "formulas"))
    calls: Any = attempt(recorded_calls, list(classes), problem.function, problem.leaves) if classes else []
    for call in [] if isinstance(calls, Failure) else calls:
        cause = attempt(_elementwise, call, options)
        found += [cause] if isinstance(cause, Cause) else []
    return found


def _nodes_within(problem: ScalarProblem) -> list[Any]:
    tracked = [leaf.detach().clone().requires_grad_() for leaf in problem.leaves]
    with torch.enable_grad():
        outputs = problem.function(*(leaf.clone() for leaf in tracked))
    return list(nodes_of(*(y for y in outputs if y.requires_grad)))


def _owner_of(node: Any) -> CustomRule | None:
    owner = getattr(getattr(node, "call", None), "owner", None)
    return owner if isinstance(owner, CustomRule) else None


def _custom_rule(node: Any, options: CheckOptions) -> Cause | None:
    """Return the defect of a `custom_jvp` or `custom_vjp` function, from a node of its graph."""
    owner, call, needed = _owner_of(node), node.call, node.needs_input_grad[1:]
    if owner is None:
        return None
    args = _in_double(node.saved_tensors[: len(needed)])
    for function in dict.fromkeys((owner.f, getattr(owner, "forward", owner.f))):
        copies = [each.clone() for each in args]
        before = versions_of(copies)
        attempt(function, *call.all_arguments(copies))
        if versions_of(copies) != before:
            text = f"{owner.__name__} changes an argument in place"
            return Cause("HD303", (text,), every_entry, class_location(function), needs_symptom=True, in_function=True)
    error = _error_of_rule(owner, call.all_arguments(args), options.seed)
    location = class_location(owner)
    if isinstance(error, ChangedInPlaceError):
        code = "HD301" if error.written == "cotangent" else "HD302"
        text = f"backward of {owner.__name__} writes into its {error.written}"
        return Cause(code, (text,), of_derivatives, location, needs_symptom=True)
    moving = [i for i, each in enumerate(needed) if each]
    if not _fails(lambda *leaves: owner(*call.all_arguments(leaves)), args, moving, options):
        return None
    text = (
        f"the rule of {owner.__name__} is wrong by itself, compared with differences" if error is None else str(error)
    )
    return Cause("HD117", (text,), of_derivatives, location, needs_symptom=True)


def _error_of_rule(owner: CustomRule, args: Sequence[Any], seed: int) -> InputError | None:
    try:
        owner.check_rule(*args, seed=seed)
    except InputError as error:
        return error
    return None


def _elementwise(call: FunctionCall, options: CheckOptions) -> Cause | None:
    """Return the defect of an `elementwise` function."""
    args, moving = _in_double(call.args), call.moves()
    if not _fails(call.function.apply, args, moving, options):
        return None
    # Mixed second derivatives may be wrong where the derivatives with respect to each input alone are right.
    alone = [i for i in moving if len(moving) > 1 and _fails(call.function.apply, args, [i], options)]
    worst = (alone or moving)[0]
    formulas = call.function.formulas  # type: ignore[attr-defined]  # the classes that `elementwise` makes have it
    location = class_location(formulas[worst if len(formulas) > 1 else 0])
    evidence = (f"the derivative of {call.name} is wrong by itself, compared with differences",)
    return Cause("HD117", evidence, of_derivatives, location, needs_symptom=True)


def _in_double(args: Sequence[Any]) -> list[Any]:
    tensors = [each.detach() if isinstance(each, Tensor) else each for each in args]
    return [each.double() if isinstance(each, Tensor) and each.is_floating_point() else each for each in tensors]


def _fails(function: Callable[..., Any], args: Sequence[Any], moving: Sequence[int], options: CheckOptions) -> bool:
    """Whether a derivative with respect to some arguments is wrong by any route."""

    def of_moving(*tensors: Tensor) -> Any:
        filled = list(args)
        for place, tensor in zip(moving, tensors, strict=True):
            filled[place] = tensor
        return function(*filled)

    subject = subject_of_function(of_moving, tuple(args[i] for i in moving), {})
    return any(map(_is_wrong, failures(subject, options.order, options.seed)))


def _is_wrong(entry: Entry) -> bool:
    """Whether a derivative is wrong, or lost as hodiff noticed; other errors have their own findings."""
    return entry.status in {"wrong", "zero"} or (entry.status == "raises" and entry.detail.startswith("RouteError"))
