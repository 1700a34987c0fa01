"""Traces of functions of tensors, as graphs of operators that change nothing in place."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from hodiff.derivatives.capture.reads import CONDITIONS, Reads, require
from hodiff.derivatives.capture.refusals import HiddenTensorError, line_now
from hodiff.recompute.reachable import LIBRARIES, is_users
from hodiff.torch_internals.compilers.dynamic_shapes import OpenSizes
from hodiff.torch_internals.compilers.dynamo import uncompiled_in_traces
from hodiff.torch_internals.interception import EagerDispatchMode
from hodiff.torch_internals.operators import writes


def is_library_constant(tensor: Tensor) -> bool:
    """Whether a package holds a tensor among its globals, directly or in a tuple (also of lists)."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in LIBRARIES or name == "__main__" or is_users(name):
            continue
        if any(_holds(value, tensor) for value in list(getattr(module, "__dict__", {}).values())):
            return True
    return False


def _holds(value: Any, tensor: Tensor) -> bool:
    if isinstance(value, tuple):
        held = list(tuple.__iter__(value))
        held += [one for each in held if type(each) is list for one in each]
        return any(each is tensor for each in held)
    return value is tensor


def trace(
    function: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor], sizes: OpenSizes | None = None
) -> fx.GraphModule:
    """Trace a function as a graph, valid for all inputs of this form that take the same branches.

    Args:
        function: Function of tensors.
        inputs: Real tensors, whose numbers are used where the function reads some.
        sizes: Which of their sizes are left open (symbolic).

    Returns:
        The graph; it raises `OtherBranchError` if the numbers that it reads differ.

    Raises:
        CaptureError: If a graph would be wrong.
        HiddenTensorError: If it would read a tensor that is not an input; the message has the line.
        Exception: Any error of torch's tracer.
    """

    def reading(*tensors: Tensor) -> Sequence[Tensor]:
        with Reads(inputs), uncompiled_in_traces():
            return function(*tensors)

    # A tensor that is passed twice would become a single input.
    inputs = [each.detach() for each in inputs]
    # Tensors without data replace the real ones, so that unexpected reads of numbers fail instead of being captured.
    mode: Literal["fake", "symbolic"] = "fake" if sizes is None else "symbolic"
    stand_ins = inputs if sizes is None else sizes.stand_ins
    traced = make_fx(reading, tracing_mode=mode, _allow_non_fake_inputs=True)(*stand_ins)
    # Code may create a tensor for its shape alone, as e3nn does: its numbers are in no result.
    traced.graph.eliminate_dead_code()
    _read_from_inputs(traced, inputs)
    try:
        _refuse_hidden(traced)
    except HiddenTensorError as error:
        raise HiddenTensorError(error.tensor, _line_that_reads(error.tensor, reading, stand_ins, mode)) from None
    if any(writes(node.target) for node in traced.graph.nodes):
        # The graph has no edge for a write through a view.
        traced = make_fx(functionalize(traced), tracing_mode=mode, _allow_non_fake_inputs=True)(*stand_ins)
        traced.graph.eliminate_dead_code()
    for node in traced.graph.nodes:
        if node.target is torch.ops.aten.view.default:
            # A kernel's result may have other strides than the trace predicted.
            node.target = torch.ops.aten.reshape.default
    traced.recompile()
    return traced


class _Watch(EagerDispatchMode):
    """A mode that notes the user's line of the first operator that takes a tensor."""

    supports_higher_order_operators = True

    def __init__(self, tensor: Tensor):
        super().__init__()
        self.place = tensor.data_ptr(), tensor.shape
        self.line = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note the line if the tensor is among the operands, and run the operator."""
        plain = [each for each in pytree.tree_leaves((args, kwargs)) if type(each) in (Tensor, nn.Parameter)]
        if not self.line and any((each.data_ptr(), each.shape) == self.place for each in plain):
            self.line = line_now()
        return func(*args, **(kwargs or {}))


def _line_that_reads(
    tensor: Tensor, function: Callable[..., Any], inputs: Sequence[Tensor], mode: Literal["fake", "symbolic"]
) -> str:
    """Return the user's line that reads a tensor in a trace, by tracing again."""
    watch = _Watch(tensor)

    def watched(*tensors: Tensor) -> Any:
        with watch:
            return function(*tensors)

    try:
        make_fx(watched, tracing_mode=mode, _allow_non_fake_inputs=True)(*inputs)
    except Exception:
        # The line only helps the reader of the message, so a failed trace does not matter.
        return watch.line
    return watch.line


def take_conditions(traced: fx.GraphModule) -> fx.GraphModule | None:
    """Move the checks of numbers that a function read into a graph of their own; None if it read none."""
    conditions = [node for node in traced.graph.nodes if node.target in CONDITIONS]
    if not conditions:
        return None
    alone = fx.GraphModule(traced, copy.deepcopy(traced.graph))
    alone.graph.output_node().args = ((),)
    for node in reversed(alone.graph.nodes):
        if writes(node.target) and not node.users:  # buffers are updated only once
            alone.graph.erase_node(node)
    alone.graph.eliminate_dead_code()
    alone.recompile()
    for node in conditions:
        if node.target is require:
            traced.graph.erase_node(node)
    traced.graph.eliminate_dead_code()
    traced.recompile()
    return alone


def drop_unused(graph: fx.GraphModule) -> list[int]:
    """Remove unused inputs from a graph, and return the positions of those left."""
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    for node in inputs:
        if not node.users:
            graph.graph.erase_node(node)
    graph.recompile()
    return [i for i, node in enumerate(inputs) if node.users]


def _read_from_inputs(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> None:
    """Replace constants that are inputs by the inputs: scripted modules hold their tensors in C++."""
    places: dict[Any, list[fx.Node]] = {}
    for node, value in zip((each for each in graph.graph.nodes if each.op == "placeholder"), inputs, strict=True):
        if value.numel():
            places.setdefault(_place_of(value), []).append(node)
    for node in list(graph.graph.nodes):
        constant: Any = getattr(graph, node.target, None) if node.op == "get_attr" else None
        if isinstance(constant, Tensor) and constant.numel():
            found = places.get(_place_of(constant), [])
            # The point of differentiation may be closed over, too, as a constant.
            if len(found) == 1:
                node.replace_all_uses_with(found[0])
                graph.graph.erase_node(node)


def _place_of(tensor: Tensor) -> Any:
    plain = tensor.layout is torch.strided and not tensor.is_meta
    return (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device) if plain else id(tensor)


def _refuse_hidden(graph: fx.GraphModule) -> None:
    """Raise if a graph holds a tensor that is neither an input nor a constant of its own."""
    for value in _constants(graph):
        # Globals of packages count as constants.
        if not is_library_constant(value):
            raise HiddenTensorError(value)


def _constants(graph: fx.GraphModule) -> Iterator[Tensor]:
    for node in graph.graph.nodes:
        if node.op == "get_attr" and not all("lift_fresh" in str(user.target) for user in node.users):
            value: Any = getattr(graph, node.target, None)
            if isinstance(value, Tensor):
                yield value
