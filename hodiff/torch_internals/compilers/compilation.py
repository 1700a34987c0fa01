"""Compilation of graphs by torch's inductor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

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
