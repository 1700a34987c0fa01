"""Rule for code that `torch.jit` has compiled or traced, whose operators no mode sees."""

from __future__ import annotations

import functools
from typing import Any

import torch

from hodiff.corrections.declining import INVALID, UNNEEDED
from hodiff.corrections.mode import Corrections
from hodiff.corrections.programs.script_graphs import run_graph, unknown_node
from hodiff.corrections.registry import CORRECTIONS, Correction, register
from hodiff.corrections.stakes import is_wrong
from hodiff.errors import RouteError
from hodiff.routes import ROUTES
from hodiff.torch_internals.autograd.differentiation import may_be_differentiated
from hodiff.torch_internals.autograd.forward_mode import in_forward_mode
from hodiff.torch_internals.autograd.transforms import in_transform
from hodiff.torch_internals.compilers.scripts import (
    call_script,
    inlined,
    nodes_of_script,
    offer_scripts_to,
    operands_of,
    operator_of_script,
    without_optimizations,
)


@register(
    call_script,
    name="torch.jit.ScriptFunction",
    routes=ROUTES[1:],
    reason="an optimized graph drops tangents without a word, also in a first derivative",
    reference="the same graph, operator by operator",
)
def _script(script: Any, *args: Any, **kwargs: Any) -> Any:
    # A tracer inlines the graph.
    if torch.jit.is_tracing() or not may_be_differentiated():
        return UNNEEDED
    operands = operands_of(script, args, kwargs)
    if operands is None:
        return INVALID
    graph = inlined(script.graph)
    entries = [entry for each in _operators(graph) if (entry := CORRECTIONS.get(each)) and entry.kind != "slow"]
    unknown = unknown_node(graph) if entries else None
    if entries and unknown is None:
        with Corrections():
            return run_graph(graph, operands)
    for entry in entries:
        if is_wrong(entry, operands, reads_others=True):
            raise _unreachable(entry, script, unknown)
    # torch's recording for reverse mode is right.
    return without_optimizations(graph)(*operands) if in_transform() or in_forward_mode() else UNNEEDED


@functools.lru_cache(maxsize=16)
def _operators(graph: Any) -> tuple[Any, ...]:
    return tuple({operator_of_script(node)[0]: None for node in nodes_of_script(graph)})


def _unreachable(entry: Correction, script: Any, unknown: str | None) -> RouteError:
    return RouteError(
        f"{entry.name}, in the graph that torch.jit made of {script.name!r}: hodiff's rules do not reach it there, as "
        f"the graph also has {unknown}, and torch's own derivative is {entry.kind} by {', '.join(entry.routes)}: "
        f"{entry.reason}. Differentiate the module or function from which the graph was made, or take the route "
        "'reverse-over-reverse'."
    )


offer_scripts_to(Corrections)
