"""Traces of `make_fx`, operators that take functions, such as `torch.cond`, and compilation by torch's inductor."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, fx
from torch._higher_order_ops import utils
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.utils import _python_dispatch as dispatch

from hodiff.torch_internals.autograd.transforms import in_transform, outside_transforms
from hodiff.torch_internals.compilers.dynamo import give_zeros_memory

aten = torch.ops.aten
# Inductor may write the results of these operators over their first argument. If elements of the argument share
# memory, as in an expanded tensor, a write to one element changes others (pytorch issue 183986).
_WRITERS = {aten.index_add, aten.index_copy, aten.index_fill, aten.index_put, torch.ops.aten._unsafe_index_put}


def compile_captured(
    graph: fx.GraphModule, inputs: Sequence[Tensor], options: dict[str, Any] | None
) -> Callable[..., Any]:
    """Compile a captured graph, whose nodes carry example values, by inductor, which takes seconds to load."""
    from torch._inductor import compile

    give_zeros_memory()
    _unshare(graph)
    return compile(graph, list(inputs), options=options)


def _unshare(graph: fx.GraphModule) -> None:
    """Copy tensors whose elements may share memory, before operators that inductor may run in place."""
    for node in graph.graph.nodes:
        if getattr(node.target, "overloadpacket", None) not in _WRITERS:
            continue
        target = node.args[0]
        value = target.meta["val"]
        if _may_overlap(value):
            with graph.graph.inserting_before(node):
                copied = graph.graph.call_function(
                    aten.clone.default, (target,), {"memory_format": torch.contiguous_format}
                )
            copied.meta["val"] = value.contiguous()
            node.replace_input_with(target, copied)
    graph.recompile()


def _may_overlap(x: Tensor) -> bool:
    """Whether two elements may share memory; True if sizes or strides are symbols."""
    steps = list(zip(x.stride(), x.shape, strict=True))
    if any(type(each) is not int for step in steps for each in step):
        return True
    reach = 0
    for stride, size in sorted(step for step in steps if step[1] != 1):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def run_as_python(asked: Callable[[], bool], ways: Mapping[str, Callable[..., Any] | None]) -> None:
    """Make torch run some of these operators without compiling them first, whenever `asked` returns True.

    In eager code torch traces an operator and its functions with dynamo, and differentiates the trace once. This
    function intercepts that step.

    Args:
        asked: Whether to intercept; evaluated at each call.
        ways: The replacements, by the name of torch's wrapper of the operator; None for the wrapper itself.
    """
    try:
        compiled = utils._hop_compile_and_call
    except AttributeError:  # before torch 2.12
        return

    @functools.wraps(compiled)
    def call(fn: Any, args: Any, kwargs: Any = None) -> Any:
        name = getattr(fn, "__name__", "")
        if name not in ways or not asked():
            return compiled(fn, args, kwargs)
        return (ways[name] or fn)(*args, **(kwargs or {}))

    utils._hop_compile_and_call = call


def graph_so_far() -> tuple[fx.Graph, Any]:
    """Return the graph that is being made, and the module that holds its constants."""
    mode: Any = get_proxy_mode()
    return mode.tracer.graph, mode.tracer.root


def node_of(tensor: Tensor) -> tuple[fx.Node | None, bool]:
    """Return the node that computes a tensor, or None, and whether the tracer knows the tensor's value."""
    mode: Any = get_proxy_mode()
    found: Any = get_proxy_slot(tensor, mode.tracer, None)
    return (None, False) if found is None else (found.proxy.node, found.constant is not None)


@contextmanager
def outside_of_trace() -> Iterator[None]:
    """Compute with real tensors within the context."""
    with dispatch._disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        yield


@contextmanager
def for_later_calls() -> Iterator[None]:
    """Create tensors that may be kept: outside of transforms, traces and inference mode."""
    with (
        dispatch._disable_current_modes(),
        outside_transforms() if in_transform() else nullcontext(),
        torch.inference_mode(False),
        torch.no_grad(),
    ):
        yield
