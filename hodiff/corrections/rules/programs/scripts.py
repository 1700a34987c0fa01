"""Rules for code that a mode does not see: scripts of `torch.jit`, and torch's own Python functions.

Scripts run node by node in Python. A torch function written in Python first calls the mode, and then runs with the mode
off. Its twin, the same code without that call, runs inside the mode.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hodiff.corrections.mechanism.declining import INVALID, UNNEEDED
from hodiff.corrections.mechanism.mode import Corrections, run_in_the_mode
from hodiff.corrections.mechanism.registry import CORRECTIONS, Correction, register
from hodiff.corrections.mechanism.unseen_calls import is_wrong
from hodiff.corrections.mechanism.wrapping import twin
from hodiff.errors import RouteError
from hodiff.routes import ROUTES
from hodiff.torch_internals.autograd.differentiation import may_be_differentiated
from hodiff.torch_internals.autograd.grad_mode import in_forward_mode
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

# Nodes that are no operators, as functions of the node and its inputs that return a list of the node's outputs.
_SIMPLE: dict[str, Callable[..., list[Any]]] = {
    "prim::Constant": lambda node: [_constant(node)],
    "prim::GetAttr": lambda node, owner: [owner.getattr(node.s("name"))],
    "prim::ListConstruct": lambda _, *items: [list(items)],
    "prim::ListUnpack": lambda _, items: list(items),
    "prim::TupleConstruct": lambda _, *items: [items],
    "prim::TupleUnpack": lambda _, items: list(items),
    "prim::TupleIndex": lambda _, items, index: [items[index]],
    "prim::unchecked_cast": lambda _, value: [value],
    "prim::device": lambda _, tensor: [tensor.device],
    "prim::dtype": lambda _, tensor: [tensor.dtype],
    "prim::is_cuda": lambda _, tensor: [tensor.is_cuda],
    "prim::NumToTensor": lambda _, number: [torch.tensor(number)],
    # What a branch that raises would return.
    "prim::Uninitialized": lambda _: [None],
    "aten::Int": lambda _, number: [int(number)],
    "aten::Bool": lambda _, number: [bool(number)],
    "aten::Float": lambda _, number: [float(number)],
    "aten::ScalarImplicit": lambda _, number: [number.item() if isinstance(number, Tensor) else number],
    "aten::__is__": lambda _, a, b: [a is b],
    "aten::__isnot__": lambda _, a, b: [a is not b],
    "aten::__not__": lambda _, a: [not a],
    "aten::__getitem__": lambda _, items, index: [items[index]],
    "aten::len": lambda _, items: [len(items)],
    "aten::size": lambda _, tensor, *dim: [tensor.size(*dim) if dim else list(tensor.size())],
    "aten::dim": lambda _, tensor: [tensor.dim()],
}
_CONTROL = ("prim::If", "prim::Loop")
_NAMED_TUPLES = "prim::TupleConstruct"


@functools.lru_cache(maxsize=256)
def unknown_node(graph: Any) -> str | None:
    """Return the kind of a node that `run_graph` cannot run, or None."""
    return next((node.kind() for node in nodes_of_script(graph) if not _is_known(node)), None)


def _is_known(node: Any) -> bool:
    kind = node.kind()
    if kind == _NAMED_TUPLES:
        return str(node.output().type()).startswith("Tuple[")  # else the tuple has names
    if kind in _SIMPLE or kind in _CONTROL:
        return True
    operator, arguments = operator_of_script(node)
    # An operator that changes a list would change a copy.
    return operator is not None and not any(
        each.alias_info is not None and each.alias_info.is_write and "Tensor" not in str(each.type)
        for each in arguments
    )


def run_graph(graph: Any, operands: Sequence[Any]) -> Any:
    """Compute the value of a graph without unknown nodes."""
    found = _run_block(_plan(graph), operands, {})
    return found[0] if len(found) == 1 else tuple(found)


class _Step(NamedTuple):
    """A node, whose names and operator were read once: each read of a node costs as much as a small operator."""

    run: Callable[[list[Any], dict[str, Any]], Sequence[Any]]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class _Block(NamedTuple):
    inputs: tuple[str, ...]
    steps: tuple[_Step, ...]
    outputs: tuple[str, ...]


@functools.lru_cache(maxsize=256)
def _plan(graph: Any) -> _Block:
    return _block(graph)


def _block(block: Any) -> _Block:
    steps = tuple(_Step(_runner(node), _names(node.inputs()), _names(node.outputs())) for node in block.nodes())
    return _Block(_names(block.inputs()), steps, _names(block.outputs()))


def _names(values: Any) -> tuple[str, ...]:
    return tuple(each.debugName() for each in values)


def _run_block(block: _Block, operands: Sequence[Any], values: dict[str, Any]) -> list[Any]:
    """Return the results of a graph or of a part of it, given the values computed before."""
    values = dict(values)
    values.update(zip(block.inputs, operands, strict=True))
    for run, inputs, outputs in block.steps:
        values.update(zip(outputs, run([values[name] for name in inputs], values), strict=True))
    return [values[name] for name in block.outputs]


def _runner(node: Any) -> Callable[[list[Any], dict[str, Any]], Sequence[Any]]:
    """Return the function of a node's inputs, and of the values computed before, that returns its outputs."""
    kind = node.kind()
    if kind == "prim::If":
        chosen, other = map(_block, node.blocks())
        return lambda inputs, values: _run_block(chosen if inputs[0] else other, [], values)
    if kind == "prim::Loop":
        (body,) = map(_block, node.blocks())
        return partial(_run_loop, body)
    if kind in _SIMPLE:
        simple = _SIMPLE[kind]
        return lambda inputs, _: simple(node, *inputs)
    operator, arguments = operator_of_script(node)
    keywords = {place: each.name for place, each in enumerate(arguments) if each.kwarg_only}
    count = len(list(node.outputs()))

    def run(inputs: list[Any], _: dict[str, Any]) -> Sequence[Any]:
        args = [value for place, value in enumerate(inputs) if place not in keywords]
        found = operator(*args, **{name: inputs[place] for place, name in keywords.items()})
        return [found] if count == 1 else found if count else []

    return run


def _run_loop(body: _Block, inputs: list[Any], values: dict[str, Any]) -> Sequence[Any]:
    limit, goes_on, *carried = inputs
    step = 0
    while step < limit and goes_on:
        goes_on, *carried = _run_block(body, [step, *carried], values)
        step += 1
    return carried


def _constant(node: Any) -> Any:
    """Return the value of a constant; None for a function, which was inlined."""
    return None if node.output().type().kind() == "FunctionType" else node.output().toIValue()


# Functions whose only faults are those of the functions that they call, which have rules.
COMPOSITES: dict[Callable[..., Any], str] = {
    F.multi_head_attention_forward: "it calls scaled_dot_product_attention, whose fused kernels have no second "
    "derivative",
    torch.pca_lowrank: "for a sparse matrix, it creates a sparse matrix of means, whose gradient is a constant",
    F.triplet_margin_with_distance_loss: "it calls a distance function, by default torch's own",
    F.multilabel_soft_margin_loss: "it calls logsigmoid, which loses digits in the tails",
    **dict.fromkeys((F.softmin, F.gumbel_softmax), "it calls softmax, which loses digits in the tails"),
    **dict.fromkeys((F.lp_pool1d, F.lp_pool2d, F.lp_pool3d), "it calls abs, whose even powers are smooth at 0"),
}

for _function, _reason in COMPOSITES.items():
    register(
        _function,
        kind="missing",
        routes=ROUTES,
        reason=_reason,
        reference="the same code, with the rules of the functions that it calls",
    )(partial(run_in_the_mode, twin(_function)))


@register(
    call_script,
    name="torch.jit.ScriptFunction",
    routes=ROUTES[1:],
    reason="an optimized graph silently drops tangents, also in first derivatives",
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


@functools.lru_cache(maxsize=256)
def _operators(graph: Any) -> tuple[Any, ...]:
    return tuple({operator_of_script(node)[0]: None for node in nodes_of_script(graph) if not _is_plain_power(node)})


def _is_plain_power(node: Any) -> bool:
    """Return whether a node is a power whose exponent is a constant real number, which the rule of `pow` declines."""
    if operator_of_script(node)[0] is not torch.ops.aten.pow.Tensor_Scalar:
        return False
    exponent = list(node.inputs())[1].node()
    return exponent.kind() == "prim::Constant" and isinstance(_constant(exponent), (int, float))


def _unreachable(entry: Correction, script: Any, unknown: str | None) -> RouteError:
    return RouteError(
        f"{entry.name}, in the graph that torch.jit made of {script.name!r}: hodiff's rules do not reach it there, as "
        f"the graph also has {unknown}, and torch's own derivative is {entry.kind} by {', '.join(entry.routes)}: "
        f"{entry.reason}. Differentiate the module or function from which the graph was made, or take the route "
        "'reverse-over-reverse'."
    )


offer_scripts_to(Corrections)
