"""Functions whose backward takes for a constant what depends on the point.

A backward that multiplies by a number, such as one that forward computed and kept, records its cotangent and not the
point; one that also reads arguments records a part. Whether the number is a constant, only other points show.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from types import CodeType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from hodiff.errors import HodiffWarning, levels_to_the_caller
from hodiff.recompute.cut_graphs import Suspect, UnrecordedGradientError, lost_slope
from hodiff.recompute.recording import Recording
from hodiff.recompute.slopes import (
    OFFSETS,
    Schedule,
    flat,
    has_derivatives,
    has_difference,
    kept_constants,
    loses_recorded,
    normal_like,
    slope_at,
    slope_elsewhere,
    steps_at,
    varies_smoothly,
)
from hodiff.torch_internals.autograd.graph_nodes import described_backward, function_name, function_of
from hodiff.torch_internals.autograd.recording import in_fx_trace

# Runs a function at other leaves, with the same random numbers and modes, and inspects what it recorded.
Record = Callable[[Sequence[Tensor]], Recording[Any]]

# Of Functions, by the code of the function that calls them.
_SCHEDULE = Schedule()
# Functions that a warning has named, by the code of the function that calls them.
_TOLD: WeakKeyDictionary[CodeType, set[tuple[str, int]]] = WeakKeyDictionary()


def is_due(f: Any, nodes: Iterable[Any]) -> bool:
    """Whether the Functions of some nodes are looked at: at the 1st, 2nd, 4th, 8th time that one is met and so on.

    Args:
        f: The user's function that called them.
        nodes: Their nodes.

    Returns:
        Whether one of them is due.
    """
    return _SCHEDULE.is_due(_code(f), *set(map(_key, nodes))) and not in_fx_trace()


def refuse_lost_slopes(
    f: Any, leaves: Sequence[Tensor], suspects: Sequence[Suspect], record: Record, caller: str
) -> None:
    """Compare the slopes of Functions at neighbouring points.

    Args:
        f: The user's function that called them.
        leaves: Its point.
        suspects: What may take for a constant what depends on the point.
        record: Runs it at other points.
        caller: The public function that warnings name.

    Raises:
        UnrecordedGradientError: If a slope is seen to depend smoothly on what its backward takes for a constant; jumps,
            and numbers that differ in any case, are no evidence. Where that may have been an argument without a
            gradient, which somebody has detached, it is a warning.
    """
    code = _code(f)
    told = set() if code is None else _TOLD.setdefault(code, set())
    suspects = [each for each in suspects if _key(each.node) not in told]
    if not suspects:
        return
    seed = torch.Generator().manual_seed(0)
    probes = [
        [
            each.requires_grad_() if has_derivatives(each) and not suspect.linear else each
            for each in (normal_like(each, seed) for each in suspect.cotangents)
        ]
        for suspect in suspects
    ]
    for offset in OFFSETS:
        try:
            lost = _lost_near(record, leaves, suspects, probes, offset, seed)
        except Exception:
            # The function need not take other points, and its own errors at them are of no interest.
            return
        for suspect in lost:
            key, message = _key(suspect.node), lost_slope(described_backward(suspect.node), linear=suspect.linear)
            if suspect.linear or not _detached_arguments(suspect.node):
                _SCHEDULE.begin_again(code, key)
                raise UnrecordedGradientError(message)
            if key not in told:
                told.add(key)
                text = f"{caller}: {message}; an argument that was detached on purpose loses nothing"
                warnings.warn(text, HodiffWarning, stacklevel=levels_to_the_caller())


def _lost_near(
    record: Record,
    leaves: Sequence[Tensor],
    suspects: Sequence[Suspect],
    probes: Sequence[Sequence[Any]],
    offset: float,
    seed: torch.Generator,
) -> list[Suspect]:
    """The suspects that lose derivatives near a point, at that distance from the function's."""
    scales = [1 + leaf.detach().abs() for leaf in leaves]
    centre = [
        leaf.detach() + offset * scale * normal_like(leaf, seed) for leaf, scale in zip(leaves, scales, strict=True)
    ]
    steps = steps_at(centre, seed)
    look = partial(_look, record, suspects, probes)
    # One graph at a time is kept.
    before, after = (look([x + sign * h for x, h in zip(centre, steps, strict=True)]) for sign in (-1, 1))
    here = look(
        centre, lambda i, _, slope, operands: has_difference(before[i].slope, after[i].slope, slope, operands, steps)
    )
    again = look(centre, lambda i, node, *_: _loses_a_part(before[i], here[i], after[i], node, probes[i]))
    return [
        suspect
        for suspect, *seen in zip(suspects, before, here, again, after, strict=True)
        if (varies_smoothly(*(each.slope for each in seen)) if suspect.linear else seen[2].told)
    ]


class _Seen(NamedTuple):
    """A Function at a neighbouring point.

    Attributes:
        slope: The gradients that its backward returns for the probe, flattened.
        kept: The constants that it keeps.
        told: The answer to `ask`; None without one.
    """

    slope: Tensor
    kept: dict[int | str, Tensor]
    told: Any


def _look(
    record: Record,
    suspects: Sequence[Suspect],
    probes: Sequence[Sequence[Any]],
    leaves: Sequence[Tensor],
    ask: Callable[[int, Any, Tensor, Sequence[Tensor]], Any] | None = None,
) -> list[_Seen]:
    """Run a function at a point, and each suspect's backward on its probe; `ask` is for those that are not linear."""
    recording = record(leaves)
    nodes = recording.functions or ()
    found = []
    for i, (suspect, probe) in enumerate(zip(suspects, probes, strict=True)):
        node = nodes[suspect.position]
        if node.name() != suspect.node.name():
            raise LookupError("other Functions are called there")
        # A backward that can be differentiated may compute in another way.
        with torch.set_grad_enabled(not suspect.linear):
            slope = slope_at(node, probe)
            told = None
            if ask and not suspect.linear:
                # A backward that cannot be differentiated, or tensors that cannot be replaced, say nothing.
                with suppress(RuntimeError):
                    told = ask(i, node, slope, recording.operands)
        found.append(_Seen(slope.detach(), {} if suspect.linear else kept_constants(node), told))
    return found


def _loses_a_part(before: _Seen, here: _Seen, after: _Seen, node: Any, probe: Sequence[Any]) -> bool:
    """Whether the slope of a Function depends on the point by more than the graph has, and by what it keeps or cuts."""
    if here.told is not False:
        return False
    if loses_recorded(function_of(node), node, probe):
        return True
    kept = kept_constants(node)
    # They may all be arguments, which whoever calls has detached.
    if len(kept) <= _detached_arguments(node):
        return False
    points = before.kept, here.kept, kept, after.kept
    if not varies_smoothly(*(flat(each.values()) for each in points)):
        return False
    function = function_of(node)
    return varies_smoothly(*(slope_elsewhere(function, node, each, probe).detach() for each in points))


def _detached_arguments(node: Any) -> int:
    """How many tensors without a gradient a Function was called with."""
    return sum(parent is None for parent, _ in node.next_functions)


def _key(node: Any) -> tuple[str, int]:
    return function_name(node), id(type(node))


def _code(f: Any) -> CodeType | None:
    code = getattr(f, "__code__", None) or getattr(getattr(type(f), "forward", None), "__code__", None)
    return code if isinstance(code, CodeType) else None
