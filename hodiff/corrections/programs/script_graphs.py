"""Graphs of `torch.jit` run node by node in Python, so that a mode sees the operators."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hodiff.torch_internals.compilers.scripts import nodes_of_script, operator_of_script

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


@functools.lru_cache(maxsize=16)
def unknown_node(graph: Any) -> str | None:
    """Return the kind of a node that `run_graph` cannot run, or None."""
    return next((node.kind() for node in nodes_of_script(graph) if not _is_known(node)), None)


def _is_known(node: Any) -> bool:
    kind = node.kind()
    if kind == _NAMED_TUPLES:
        return str(node.output().type()).startswith("(")  # else the tuple has names
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
    found = _run_block(graph, operands, {})
    return found[0] if len(found) == 1 else tuple(found)


def _run_block(block: Any, operands: Sequence[Any], values: dict[str, Any]) -> list[Any]:
    """Return the results of a graph or of a part of it, given the values computed before."""
    values = dict(values)
    values.update(zip((each.debugName() for each in block.inputs()), operands, strict=True))
    for node in block.nodes():
        inputs = [values[each.debugName()] for each in node.inputs()]
        found = _run_node(node, inputs, values)
        values.update(zip((each.debugName() for each in node.outputs()), found, strict=True))
    return [values[each.debugName()] for each in block.outputs()]


def _run_node(node: Any, inputs: list[Any], values: dict[str, Any]) -> Sequence[Any]:
    kind = node.kind()
    if kind == "prim::If":
        chosen, other = node.blocks()
        return _run_block(chosen if inputs[0] else other, [], values)
    if kind == "prim::Loop":
        (body,) = node.blocks()
        limit, goes_on, *carried = inputs
        step = 0
        while step < limit and goes_on:
            goes_on, *carried = _run_block(body, [step, *carried], values)
            step += 1
        return carried
    if kind in _SIMPLE:
        return _SIMPLE[kind](node, *inputs)
    operator, arguments = operator_of_script(node)
    pairs = list(zip(arguments, inputs, strict=True))
    args = [value for argument, value in pairs if not argument.kwarg_only]
    found = operator(*args, **{argument.name: value for argument, value in pairs if argument.kwarg_only})
    count = len(list(node.outputs()))
    return [found] if count == 1 else found if count else []


def _constant(node: Any) -> Any:
    """Return the value of a constant; None for a function, which was inlined."""
    return None if node.output().type().kind() == "FunctionType" else node.output().toIValue()
