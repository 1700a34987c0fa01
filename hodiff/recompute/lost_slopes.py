"""Functions whose backward takes for a constant what depends on the point.

A backward that multiplies by a number, such as one that forward computed and kept, records its cotangent and not the
point; one that also reads arguments records a part. Whether the number is a constant, only other points show.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import CodeType
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from hodiff.recompute.cut_graphs import Suspect, UnrecordedGradientError, lead_to, lost_slope
from hodiff.recompute.reachable import is_atom
from hodiff.recompute.slopes import (
    OFFSETS,
    Schedule,
    can_run_again,
    loses_operands,
    normal_like,
    slope_at,
    steps_at,
    varies_smoothly,
)
from hodiff.torch_internals.autograd.graph_nodes import (
    described_backward,
    function_name,
    function_of,
    watching_operands,
)
from hodiff.torch_internals.autograd.recording import in_fx_trace

# Runs a function at other leaves, with the same random numbers and modes, and returns the nodes of Functions that it
# recorded, and the leaves as it saw them.
RunAt = Callable[[Sequence[Tensor]], tuple[Sequence[Any], Sequence[Tensor]]]

# Of Functions, by the code of the function that calls them.
_SCHEDULE = Schedule()

# Under which a node holds what its Function was called with.
_OPERANDS = "hodiff.operands"


def is_due(f: Any, nodes: Iterable[Any]) -> bool:
    """Whether the Functions of some nodes are looked at: at the 1st, 2nd, 4th, 8th time that one is met and so on.

    Args:
        f: The user's function that called them.
        nodes: Their nodes.

    Returns:
        Whether one of them is due.
    """
    return _SCHEDULE.is_due(_code(f), *set(map(_key, nodes))) and not in_fx_trace()


def refuse_lost_slopes(f: Any, leaves: Sequence[Tensor], suspects: Sequence[Suspect], run_at: RunAt) -> None:
    """Compare the slopes of Functions at neighbouring points with the graph that their backward records.

    Each Function is called by itself with what the user's function gave to it, so that what was detached before is a
    constant. Of those in C++, whose arguments cannot be seen, the user's function is run at other points.

    Args:
        f: The user's function that called them.
        leaves: Its point.
        suspects: What may take for a constant what depends on the point.
        run_at: Runs it at other points.

    Raises:
        UnrecordedGradientError: If a slope is seen to depend smoothly on what its backward takes for a constant; jumps,
            and numbers that differ in any case, are no evidence.
    """
    if not suspects:
        return
    try:
        lost = _lost(leaves, suspects, run_at)
    except Exception:
        # The function need not take other points, and its own errors at them are of no interest.
        return
    if lost is not None:
        _SCHEDULE.begin_again(_code(f), _key(lost.node))
        raise UnrecordedGradientError(lost_slope(described_backward(lost.node), linear=lost.linear))


@contextmanager
def noting_operands(owner: Any) -> Iterator[None]:
    """Keep with the graph what Functions are called with inside, so that `refuse_noted_slopes` needs no other run.

    Args:
        owner: Of whose entries the 1st, 2nd, 4th, 8th and so on is noted.
    """
    if not _SCHEDULE.is_due(owner, _OPERANDS):
        yield
        return

    def keep(node: Any, operands: Sequence[Any]) -> None:
        # Without their graphs, of which the node itself may be a part.
        try:
            held = [
                partial(_same, each.detach().requires_grad_(needed)) if isinstance(each, Tensor) else _reference(each)
                for each, needed in zip(operands, node.needs_input_grad, strict=True)
            ]
        except TypeError:  # of a collection, which may hold a result of the Function, there is no weak reference
            return
        node.metadata[_OPERANDS] = ref(owner), held

    with watching_operands(keep):
        yield


def refuse_noted_slopes(suspects: Sequence[Suspect]) -> None:
    """Compare slopes as `refuse_lost_slopes` does, where a graph was recorded within `noting_operands`.

    Args:
        suspects: What may take for a constant what depends on the point.

    Raises:
        UnrecordedGradientError: As there.
    """
    for suspect in suspects:
        owner, held = suspect.node.metadata.get(_OPERANDS, (None, ()))
        operands = [refer() for refer in held]
        gone = any(each is None and isinstance(refer, ref) for each, refer in zip(operands, held, strict=True))
        if held and not gone and loses_operands(function_of(suspect.node), operands, suspect.cotangents):
            _SCHEDULE.begin_again(owner(), _OPERANDS)
            raise UnrecordedGradientError(lost_slope(described_backward(suspect.node), linear=suspect.linear))


def _reference(value: Any) -> Callable[[], Any]:
    """Return a function that gives a value, which is held only if it holds no tensor."""
    kind: Any = type(value)
    return partial(_same, value) if is_atom(kind) else ref(value)


def _same(value: Any) -> Any:
    return value


def _lost(leaves: Sequence[Tensor], suspects: Sequence[Suspect], run_at: RunAt) -> Suspect | None:
    """Return the first suspect that loses a slope."""
    operands: dict[Any, Sequence[Any]] = {}
    with watching_operands(operands.__setitem__):
        functions, seen = run_at(leaves)
    unseen = []
    for suspect, node in zip(suspects, _nodes_of(functions, suspects), strict=True):
        if node not in operands or not can_run_again(function_of(node)):
            unseen.append(suspect)
            continue
        if loses_operands(function_of(node), _moving(operands[node], seen), suspect.cotangents):
            return suspect
    constant = [each for each in unseen if each.linear]
    return next((each for offset in OFFSETS for each in _lost_near(run_at, leaves, constant, offset)), None)


def _moving(operands: Sequence[Any], leaves: Sequence[Tensor]) -> list[Any]:
    """Detach the operands of a Function that do not depend on a leaf."""

    def depends(operand: Tensor) -> bool:
        return operand.requires_grad and lead_to([get_gradient_edge(operand).node], leaves)

    return [each.detach() if isinstance(each, Tensor) and not depends(each) else each for each in operands]


def _lost_near(
    run_at: RunAt, leaves: Sequence[Tensor], suspects: Sequence[Suspect], offset: float
) -> Iterator[Suspect]:
    """Yield the suspects whose slope, a constant in the graph, varies near a point at a distance from the leaves."""
    if not suspects:
        return
    seed = torch.Generator().manual_seed(0)
    probes = [[normal_like(each, seed) for each in suspect.cotangents] for suspect in suspects]
    scales = [1 + leaf.detach().abs() for leaf in leaves]
    centre = [
        leaf.detach() + offset * scale * normal_like(leaf, seed) for leaf, scale in zip(leaves, scales, strict=True)
    ]
    steps = steps_at(centre, seed)

    def slopes(step: int) -> list[Tensor]:
        functions, _ = run_at([x + step * h for x, h in zip(centre, steps, strict=True)])
        with torch.no_grad():  # one that can be differentiated may compute in another way
            nodes = _nodes_of(functions, suspects)
            return [slope_at(node, probe) for node, probe in zip(nodes, probes, strict=True)]

    for suspect, *seen in zip(suspects, *map(slopes, (-1, 0, 0, 1)), strict=True):
        if varies_smoothly(*seen):
            yield suspect


def _nodes_of(functions: Sequence[Any], suspects: Sequence[Suspect]) -> list[Any]:
    nodes = [functions[each.position] for each in suspects]
    if [each.name() for each in nodes] != [each.node.name() for each in suspects]:
        raise LookupError("other Functions are called there")
    return nodes


def _key(node: Any) -> tuple[str, int]:
    return function_name(node), id(type(node))


def _code(f: Any) -> CodeType | None:
    while isinstance(f, partial):
        f = f.func
    found = (f, getattr(type(f), "forward", None), type(f).__call__ if callable(f) else None)
    return next((code for each in found if isinstance(code := getattr(each, "__code__", None), CodeType)), None)
