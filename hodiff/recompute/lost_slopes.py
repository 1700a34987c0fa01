"""Detection of Functions whose backward treats values that depend on the point as constants.

A backward that multiplies by a number that forward computed and kept records its cotangent and not the point; if it
also reads arguments, it records a part. Only evaluation at other points shows whether the number is a constant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import compress
from types import CodeType
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from hodiff.distributed.exchanges import IgnoringErrors
from hodiff.errors import RouteError
from hodiff.graphs import lead_to
from hodiff.recompute.cut_graphs import Suspect, UnrecordedGradientError, lost_slope_of
from hodiff.recompute.reachable import is_atom
from hodiff.recompute.slope_differences import (
    OFFSETS,
    loses_operands,
    normal_like,
    size_of,
    steps_at,
    varies_smoothly,
)
from hodiff.recompute.slopes import Schedule, can_run_again, form_of, slope_at
from hodiff.torch_internals.autograd.grad_mode import in_fx_trace
from hodiff.torch_internals.autograd.graph_nodes import (
    function_name,
    function_of,
    watching_operands,
)


class Run(Protocol):
    """A recorded run of a function.

    Attributes:
        functions: The nodes of its Functions. Before torch 2.13 they become invalid once the run is freed.
        operands: The leaves as the function saw them.
    """

    functions: Sequence[Any] | None
    operands: tuple[Tensor, ...]


# Runs a function at other leaves, with the same random numbers and modes.
RunAt = Callable[[Sequence[Tensor]], Run]

# Counts the calls of each Function, separately for each calling function's code.
_SCHEDULE = Schedule()

# The metadata key of a node for the operands of its Function.
_OPERANDS = "hodiff.operands"


def is_due(f: Any, nodes: Iterable[Any]) -> bool:
    """Whether a Function of the nodes is checked: at its 1st, 2nd, 4th, 8th, ... call by the user's function."""
    return _SCHEDULE.is_due(_code(f), *set(map(_key, nodes))) and not in_fx_trace()


def refuse_lost_slopes(
    f: Any, leaves: Sequence[Tensor], suspects: Sequence[Suspect], run_at: RunAt, *, connected: bool
) -> list[Tensor]:
    """Compare gradients of Functions at neighbouring points with the graph that their backward records.

    Each Function is called separately with the operands from the user's function, so that detached operands are
    constants. The arguments of C++ Functions cannot be seen, so the user's function is run at other points for them.

    Args:
        f: The user's function that called them.
        leaves: The point.
        suspects: Functions that may treat values that depend on the point as constants.
        run_at: Runs the user's function at other points.
        connected: Whether derivatives may be differentiated with respect to tensors outside of the point.

    Returns:
        Zeros whose derivative with respect to such tensors raises, for Functions that would lose it.

    Raises:
        UnrecordedGradientError: If a gradient depends smoothly on a value that its backward treats as a constant;
            jumps, and values that differ in every run, are not evidence.
    """
    if not suspects:
        return []
    by_others: list[tuple[Suspect, Tensor]] = []

    def begin_again(_: Suspect) -> None:
        # The Functions after the lost one have not been checked.
        for each in suspects:
            _SCHEDULE.begin_again(_code(f), _key(each.node))

    _refuse(lambda: _lost(leaves, suspects, run_at, by_others if connected else None), begin_again)
    for each, _ in by_others:
        _SCHEDULE.begin_again(_code(f), _key(each.node))
    return [refusal for _, refusal in by_others]


@contextmanager
def noting_operands(owner: Any) -> Iterator[None]:
    """Keep the operands of Functions in their nodes, so that `refuse_noted_slopes` needs no further run.

    Args:
        owner: An object whose 1st, 2nd, 4th, 8th, ... use of this context keeps operands; other uses keep nothing.
    """
    if not _SCHEDULE.is_due(owner, _OPERANDS):
        yield
        return

    def keep(node: Any, operands: Sequence[Any]) -> None:
        try:
            node.metadata[_OPERANDS] = ref(owner), [_reference(each) for each in operands]
        except TypeError:
            # Collections do not support weak references, and a strong reference may keep the node itself alive.
            return

    with watching_operands(keep):
        yield


def refuse_noted_slopes(suspects: Sequence[Suspect]) -> None:
    """Compare gradients of Functions whose operands `noting_operands` kept with the graph of backward."""

    def begin_again(lost: Suspect) -> None:
        owner, _ = lost.node.metadata[_OPERANDS]
        _SCHEDULE.begin_again(owner(), _OPERANDS)

    _refuse(lambda: next(filter(_loses_noted, suspects), None), begin_again)


def _refuse(find: Callable[[], Suspect | None], begin_again: Callable[[Suspect], None]) -> None:
    """Raise for the suspect that a search finds, and schedule it for the next check."""
    lost = None
    # The function may not accept other points.
    with IgnoringErrors():
        lost = find()
    if lost is not None:
        begin_again(lost)
        raise UnrecordedGradientError(lost_slope_of(lost.node, linear=lost.linear))


def _loses_noted(suspect: Suspect) -> bool:
    """Whether a suspect loses a part of its gradient, by the operands in its node; False if there are none."""
    _, references = suspect.node.metadata.get(_OPERANDS, (None, ()))
    operands = [refer() for refer in references]
    freed = any(each is None and isinstance(refer, ref) for each, refer in zip(operands, references, strict=True))
    if freed or not operands:
        return False
    moving = [
        each.requires_grad_() if needed else each
        for each, needed in zip(operands, suspect.node.needs_input_grad, strict=True)
    ]
    return loses_operands(function_of(suspect.node), suspect.node, moving, suspect.cotangents)


def _reference(value: Any) -> Callable[[], Any]:
    """Return a function that returns a value, by a strong reference only if the value can hold no graph."""
    kind: Any = type(value)
    held = value.detach() if isinstance(value, Tensor) else value
    return (lambda: held) if held is not value or is_atom(kind) else ref(value)


class _Refusal(torch.autograd.Function):
    """Zero, whose derivative with respect to some tensors raises an error."""

    @staticmethod
    def forward(ctx: Any, message: str, *tensors: Tensor) -> Tensor:
        ctx.message = message
        return tensors[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RouteError(ctx.message)


def _lost(
    leaves: Sequence[Tensor],
    suspects: Sequence[Suspect],
    run_at: RunAt,
    by_others: list[tuple[Suspect, Tensor]] | None,
) -> Suspect | None:
    """Return the first suspect that loses a derivative by the leaves; collect those that lose one by other tensors."""
    operands: dict[Any, Sequence[Any]] = {}
    with watching_operands(operands.__setitem__):
        run = run_at(leaves)
    unseen = []
    for suspect, node in zip(suspects, _nodes_of(run, suspects), strict=True):
        if node not in operands or not can_run_again(function_of(node)):
            unseen.append(suspect)
            continue
        function, given = function_of(node), operands[node]
        moving = [isinstance(each, Tensor) and _depends(each, run.operands) for each in given]
        if loses_operands(function, node, _detached(given, moving), suspect.cotangents):
            return suspect
        others = [isinstance(x, Tensor) and x.requires_grad and not m for x, m in zip(given, moving, strict=True)]
        if by_others is None or not any(others):
            continue
        if loses_operands(function, node, _detached(given, others), suspect.cotangents):
            message = lost_slope_of(suspect.node, linear=suspect.linear)
            by_others.append((suspect, _Refusal.apply(message, *compress(given, others))))
    constant = [each for each in unseen if each.linear]
    return next((each for offset in OFFSETS for each in _lost_near(run_at, leaves, constant, offset)), None)


def _depends(operand: Tensor, leaves: Sequence[Tensor]) -> bool:
    return operand.requires_grad and lead_to([get_gradient_edge(operand).node], leaves)


def _detached(operands: Sequence[Any], kept: Iterable[bool]) -> list[Any]:
    """Detach operands of a Function, except those in `kept`."""
    return [
        each.detach() if isinstance(each, Tensor) and not keep else each
        for each, keep in zip(operands, kept, strict=True)
    ]


def _lost_near(
    run_at: RunAt, leaves: Sequence[Tensor], suspects: Sequence[Suspect], offset: float
) -> Iterator[Suspect]:
    """Yield suspects whose gradient is constant in the graph, but varies near a point at a distance from the leaves."""
    if not suspects:
        return
    seed = torch.Generator().manual_seed(0)
    probes = [[normal_like(each, seed) for each in suspect.cotangents] for suspect in suspects]
    scales = [size_of(leaf) for leaf in leaves]
    centre = [
        leaf.detach() + offset * scale * normal_like(leaf, seed) for leaf, scale in zip(leaves, scales, strict=True)
    ]
    steps = steps_at(centre, seed)

    def slopes(step: int) -> list[Tensor]:
        run = run_at([x + step * h for x, h in zip(centre, steps, strict=True)])
        with torch.no_grad():  # a rule that records may compute in another way
            nodes = _nodes_of(run, suspects)
            return [slope_at(node, probe) for node, probe in zip(nodes, probes, strict=True)]

    for suspect, *seen in zip(suspects, *map(slopes, (-1, 0, 0, 1)), strict=True):
        if varies_smoothly(*seen):
            yield suspect


def _nodes_of(run: Run, suspects: Sequence[Suspect]) -> list[Any]:
    nodes = [(run.functions or ())[each.position] for each in suspects]
    if [each.name() for each in nodes] != [each.node.name() for each in suspects]:
        raise LookupError("other Functions are called there")
    return nodes


def _key(node: Any) -> tuple[Any, ...]:
    return function_name(node), id(type(node)), form_of(node)


def _code(f: Any) -> CodeType | None:
    while isinstance(f, partial):
        f = f.func
    found = (f, getattr(type(f), "forward", None), type(f).__call__ if callable(f) else None)
    return next((code for each in found if isinstance(code := getattr(each, "__code__", None), CodeType)), None)
