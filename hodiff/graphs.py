"""Inspection of an autograd graph before it is differentiated again."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge

from hodiff.torch_internals.autograd.deep_graphs import DEEP, free_one_by_one
from hodiff.torch_internals.autograd.graph_nodes import (
    LOSSES,
    BackwardHookFunction,
    backward_rules,
    function_name,
    function_of,
    is_cpp_function,
    is_of_from_local,
    is_of_higher_order_operator,
    is_of_many_kinds,
    is_of_parallel_loss,
    lacks_kernel,
    record_redistribution,
    results_of,
    written_function,
)

# Every Function marked once_differentiable runs the same wrapper, so its code identifies the mark.
_ONCE = once_differentiable(lambda ctx: None).__code__


# Operators whose gradient torch treats as a constant, by their nodes; they occur only where hodiff's rule did not run.
_CONSTANT_GRADIENTS = {"SparseCooTensorWithDimsAndTensorsBackward0": "torch.sparse_coo_tensor"}
# Functions of hodiff that run rules of users, which may be wrong.
_RUN_RULES_OF_USERS = ("hodiff.authoring.", "hodiff.recompute.")
# Node types known to have correct derivatives, which are not inspected again.
_TRUSTED: set[type] = set()


class Inspection(NamedTuple):
    """Result of a walk over a graph.

    Attributes:
        leaves: The leaves that gradients would accumulate into.
        once: A sentence about a node whose gradient is a constant; None if there is none.
        functions: The nodes of Functions whose rules may lose the graph of the gradient.
    """

    leaves: list[Tensor]
    once: str | None
    functions: list[Any]


def inspect_graph(output: Tensor, operands: Sequence[Tensor] = ()) -> Inspection:
    """Walk over the graph of a tensor to find its leaves, and nodes whose second derivatives may fail.

    Args:
        output: The tensor.
        operands: Tensors from which it was computed; the graph beyond them is ignored.

    Returns:
        The inspection's result.
    """
    # A Function marked once_differentiable, for example, returns constant gradients under `create_graph`. Its second
    # derivative would silently be zero, so code that differentiates twice has to find such nodes.
    leaves = [output] if output.requires_grad and output.grad_fn is None else []
    once: str | None = None
    functions = []
    before = {each.grad_fn for each in operands}
    for node in nodes_from([output.grad_fn], before):
        if type(node) in _TRUSTED:
            continue
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            leaves.append(leaf)
            continue
        function = function_of(node)
        if is_of_from_local(function):
            record_redistribution(node)
            continue
        written = written_function(function)
        if _is_trusted(node, written):
            if written is function:  # otherwise each call has its own type
                _TRUSTED.add(type(node))
            continue
        if (
            once is None
            and (found := _constant_gradient(node)) is not None
            and (not operands or lead_to([node], operands))
        ):
            once = found
        if once is None and (function is not None or is_cpp_function(node)):
            functions.append(node)
    return Inspection(leaves, once, functions)


def runs_code_of_users(*outputs: Tensor | GradientEdge) -> bool:
    """Whether a pullback calls a Function in Python that is neither torch's nor hodiff's own."""
    functions = ((node, written_function(function_of(node))) for node in nodes_of(*outputs))
    return any(function is not None and not _is_trusted(node, function) for node, function in functions)


def lead_to(nodes: Iterable[Any], operands: Sequence[Tensor]) -> bool:
    """Whether any operand is in the graph of at least one of the nodes."""
    ends = {get_gradient_edge(each).node for each in operands if each.requires_grad}
    return not ends.isdisjoint(nodes_from(node for node in nodes if node is not None))


def _is_trusted(node: Any, function: Any) -> bool:
    """Whether the derivative of all nodes of this type is torch's or hodiff's own."""
    if function is not None:
        if function is BackwardHookFunction:  # an identity, which calls the backward hooks of a module
            return True
        own = function.__module__.startswith("hodiff.")
        return own and not function.__module__.startswith(_RUN_RULES_OF_USERS)
    return type(node).__name__ not in (*_CONSTANT_GRADIENTS, *LOSSES) and not is_of_many_kinds(node)


def _constant_gradient(node: Any) -> str | None:
    """Explain why the gradient of a node is a constant to a second derivative; None if it is not."""
    function = function_of(node)
    if lacks_kernel(node):
        return "an operator of a library has no autograd kernel, and torch takes zeros for its gradient"
    if function is None:
        if type(node).__name__ in LOSSES and is_of_parallel_loss(node):
            return "torch's loss_parallel has no second derivative; call full_tensor() of the logits outside of it"
        if type(node).__name__ not in _CONSTANT_GRADIENTS:
            return None
        return f"to torch the gradient of {_CONSTANT_GRADIENTS[type(node).__name__]} is a constant"
    if is_of_higher_order_operator(function):
        return f"to torch the gradient of {function_name(node)}, an operator that takes functions, is a constant"
    if is_once_differentiable(function):
        return f"{function_name(node)}.backward is marked once_differentiable"
    return None


def nodes_of(*outputs: Tensor | GradientEdge) -> Iterator[Any]:
    """Yield every node of the graph that computed some tensors, or that leads to gradient edges, once."""
    return nodes_from([each.grad_fn if isinstance(each, Tensor) else each.node for each in outputs])


def nodes_from(nodes: Iterable[Any], ends: Iterable[Any] = ()) -> Iterator[Any]:
    """Yield nodes and every node that they lead to, once, except `ends` and the nodes only reachable through them."""
    stack = list(nodes)
    seen = {None, *ends}
    try:
        while stack:
            node = stack.pop()
            if node not in seen:
                seen.add(node)
                yield node
                for parent, _ in node.next_functions:
                    stack.append(parent)
    finally:
        if len(seen) > DEEP:
            free_one_by_one(seen)


def held_outside(leaves: list[Tensor]) -> list[bool]:
    """Return for each leaf of a graph whether other code holds it; if not, nothing else can differentiate by it."""
    return [sys.getrefcount(leaves[i]) > _references_alone() for i in range(len(leaves))]


@cache
def _references_alone() -> int:
    """Return the number of references to a leaf that only its graph and a list hold."""
    output = 2 * torch.zeros((), device="cpu", requires_grad=True)
    leaves = [node.variable for node in nodes_of(output) if hasattr(node, "variable")]
    return sys.getrefcount(leaves[0])


def leaves_made_inside(
    outputs: Iterable[Any], again: Callable[[], Iterable[Any]], known: Collection[int] = ()
) -> list[Tensor]:
    """Return leaves that each call creates under its outputs, which cut the outputs off from their inputs."""
    first = {id(leaf): leaf for leaf in _leaves(outputs) if id(leaf) not in known}
    # Leaves that the first run shares are closed over.
    return [leaf for leaf in _leaves(again()) if id(leaf) not in {*known, *first}] if first else []


def _leaves(outputs: Iterable[Any]) -> list[Tensor]:
    recorded = [each for each in outputs if isinstance(each, Tensor) and each.requires_grad]
    return [node.variable for node in nodes_of(*recorded) if hasattr(node, "variable")]


def cotangent_bytes(*outputs: Tensor | GradientEdge) -> int:
    """Return the bytes of the cotangents of all results in a graph; backward holds fewer at any time."""
    return sum(_bytes_of(result) for node in nodes_of(*outputs) for result in results_of(node))


def _bytes_of(result: Any) -> int:
    # Nested tensors have no shape, or a shape with a symbol in it.
    return 0 if result.is_nested_tensor else math.prod(result.shape) * int(result.dtype.itemsize)


def coarsest_eps(*outputs: Tensor | GradientEdge) -> float:
    """Machine epsilon of the coarsest floating-point dtype in a graph, as under autocast; 0 without a graph."""
    dtypes = {result.dtype for node in nodes_of(*outputs) for result in results_of(node)}
    return max((torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point), default=0.0)


def is_once_differentiable(function: type) -> bool:
    """Whether the gradient of a Function is marked `once_differentiable`, also if torch.func made it from another."""
    return any(getattr(rule, "__code__", None) is _ONCE for rule in backward_rules(function))
