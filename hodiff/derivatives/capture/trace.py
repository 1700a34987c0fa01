"""One trace of a function of tensors, as a graph of operators that change nothing in place."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from hodiff.derivatives.capture.conditions import CONDITIONS, require
from hodiff.derivatives.capture.origin import line_now
from hodiff.derivatives.capture.reads import Reads
from hodiff.derivatives.capture.refusals import HiddenTensorError
from hodiff.recompute.library_constants import is_library_constant
from hodiff.torch_internals.compilers.dynamic_shapes import OpenSizes
from hodiff.torch_internals.compilers.dynamo import uncompiled_in_traces
from hodiff.torch_internals.interception import EagerDispatchMode
from hodiff.torch_internals.operators import writes


def trace(
    function: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor], sizes: OpenSizes | None = None
) -> fx.GraphModule:
    """The graph of a function at its inputs, for all inputs of this form that take it the same way.

    Args:
        function: Function of tensors.
        inputs: Real ones, whose numbers are looked at where the function reads some.
        sizes: Which of their sizes are left open.

    Returns:
        The graph; where it reads numbers that are others, it raises `OtherBranchError`.

    Raises:
        CaptureError: If a graph would not be right.
        HiddenTensorError: If it would read a tensor that nobody looks at; the message says at which line.
        Exception: Whatever torch raises where it cannot trace.
    """

    def reading(*tensors: Tensor) -> Sequence[Tensor]:
        with Reads(inputs), uncompiled_in_traces():
            return function(*tensors)

    # One that is given twice would be one input.
    inputs = [each.detach() for each in inputs]
    # Tensors without data stand for the real ones, so that what looks at numbers unasked fails, and is not captured.
    mode: Literal["fake", "symbolic"] = "fake" if sizes is None else "symbolic"
    stand_ins = inputs if sizes is None else sizes.stand_ins
    traced = make_fx(reading, tracing_mode=mode, _allow_non_fake_inputs=True)(*stand_ins)
    try:
        _refuse_hidden(traced)
    except HiddenTensorError as error:
        raise HiddenTensorError(error.tensor, _line_that_reads(error.tensor, reading, stand_ins, mode)) from None
    traced.graph.eliminate_dead_code()
    if any(writes(node.target) for node in traced.graph.nodes):
        # What is written through a view is no edge of the graph.
        traced = make_fx(functionalize(traced), tracing_mode=mode, _allow_non_fake_inputs=True)(*stand_ins)
        traced.graph.eliminate_dead_code()
    for node in traced.graph.nodes:
        if node.target is torch.ops.aten.view.default:
            # Strides of a kernel's result may be others than were foreseen.
            node.target = torch.ops.aten.reshape.default
    traced.recompile()
    return traced


class _Watch(EagerDispatchMode):
    """Notes the user's line of the first operator that takes a tensor."""

    supports_higher_order_operators = True

    def __init__(self, tensor: Tensor):
        super().__init__()
        self.place = tensor.data_ptr(), tensor.shape
        self.line = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at the operands, and run the operator."""
        plain = [each for each in pytree.tree_leaves((args, kwargs)) if type(each) in (Tensor, nn.Parameter)]
        if not self.line and any((each.data_ptr(), each.shape) == self.place for each in plain):
            self.line = line_now()
        return func(*args, **(kwargs or {}))


def _line_that_reads(
    tensor: Tensor, function: Callable[..., Any], inputs: Sequence[Tensor], mode: Literal["fake", "symbolic"]
) -> str:
    """The user's line that reads a tensor in a trace, which is made once more for that."""
    watch = _Watch(tensor)

    def watched(*tensors: Tensor) -> Any:
        with watch:
            return function(*tensors)

    try:
        make_fx(watched, tracing_mode=mode, _allow_non_fake_inputs=True)(*inputs)
    except Exception:
        # The line is a help alone.
        return watch.line
    return watch.line


def take_conditions(traced: fx.GraphModule) -> fx.GraphModule | None:
    """Move what compares the numbers that a function read into a graph of its own; None where it read none."""
    conditions = [node for node in traced.graph.nodes if node.target in CONDITIONS]
    if not conditions:
        return None
    alone = fx.GraphModule(traced, copy.deepcopy(traced.graph))
    alone.graph.output_node().args = ((),)
    for node in reversed(alone.graph.nodes):
        if writes(node.target) and not node.users:  # to buffers, which are updated once
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
    """Take the inputs that nothing is made of out of a graph, and say which are left."""
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    for node in inputs:
        if not node.users:
            graph.graph.erase_node(node)
    graph.recompile()
    return [i for i, node in enumerate(inputs) if node.users]


def _refuse_hidden(graph: fx.GraphModule) -> None:
    """Refuse a graph with a tensor that came from somewhere else than its inputs and its own constants."""
    for value in _constants(graph):
        # Globals of packages are taken for constants.
        if not is_library_constant(value):
            raise HiddenTensorError(value)


def _constants(graph: fx.GraphModule) -> Iterator[Tensor]:
    for node in graph.graph.nodes:
        if node.op == "get_attr" and not all("lift_fresh" in str(user.target) for user in node.users):
            value: Any = getattr(graph, node.target, None)
            if isinstance(value, Tensor):
                yield value
