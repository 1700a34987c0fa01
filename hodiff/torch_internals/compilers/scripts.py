"""Code that `torch.jit` has compiled or traced: its graphs, and its calls, which no mode sees."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.overrides import handle_torch_function

from hodiff.torch_internals.compilers.dynamo import hide_from_dynamo
from hodiff.torch_internals.interception import active_function_modes
from hodiff.torch_internals.tensors import stands_for_tensor

Kernel = Callable[..., Any]

# Calls of scripted functions and of scripted methods.
_CALLS: dict[type, Kernel] = {each: each.__call__ for each in (torch._C.ScriptFunction, torch._C.ScriptMethod)}
_in_modes: Callable[[], bool] = torch._C._is_torch_function_mode_enabled
# The modes that intercept the calls.
_takers: list[type] = []


def call_script(script: Any, *args: Any, **kwargs: Any) -> Any:
    """Call compiled or traced code, after tensor-like arguments and interested modes have had the chance to."""
    for each in (*args, *kwargs.values()):
        if stands_for_tensor(each):
            return each.__torch_function__(call_script, (type(each),), (script, *args), kwargs)
    if _in_modes() and any(isinstance(mode, tuple(_takers)) for mode in active_function_modes()):
        return handle_torch_function(call_script, (), script, *args, **kwargs)
    return _CALLS[type(script)](script, *args, **kwargs)


call_script.__name__ = "torch.jit.ScriptFunction"  # in reports


hide_from_dynamo(call_script)


def offer_scripts_to(mode: type) -> None:
    """Let a class of modes see calls of scripted code, as calls of `call_script`."""
    if not _takers:
        hide_from_dynamo(_offered)
        for kind in _CALLS:
            kind.__call__ = _offered  # type: ignore[method-assign]
    _takers.append(mode)


def _offered(self: Any, *args: Any, **kwargs: Any) -> Any:
    if _in_modes() or any(map(stands_for_tensor, (*args, *kwargs.values()))):
        return call_script(self, *args, **kwargs)
    return _CALLS[type(self)](self, *args, **kwargs)


def operands_of(script: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
    """Return a graph's inputs: the module of a method, arguments and defaults; None if they do not fit."""
    given = [*([script.owner] if isinstance(script, torch._C.ScriptMethod) else []), *args]
    arguments = script.schema.arguments
    others = {each.name: each for each in arguments[len(given) :]}
    if len(given) > len(arguments) or not others.keys() >= kwargs.keys():
        return None
    if not all(name in kwargs or each.has_default_value() for name, each in others.items()):
        return None
    return [*given, *[kwargs.get(name, each.default_value) for name, each in others.items()]]


@functools.lru_cache(maxsize=256)
def inlined(graph: Any) -> Any:
    """Return a graph with the graphs of called functions inlined."""
    copy = graph.copy()
    torch._C._jit_pass_inline(copy)
    return copy


@functools.lru_cache(maxsize=256)
def without_optimizations(graph: Any) -> Kernel:
    """Return an inlined graph as a function that runs without the optimizer, whose fused parts lose tangents."""
    function = torch._C._create_function_from_graph("unoptimized", graph)

    def run(*operands: Any) -> Any:
        with torch.jit.optimized_execution(False):
            return _CALLS[type(function)](function, *operands)

    return run


def nodes_of_script(block: Any) -> Iterator[Any]:
    """Yield the nodes of a graph or block, including nested ones."""
    for node in block.nodes():
        yield node
        for inner in node.blocks():
            yield from nodes_of_script(inner)


def operator_of_script(node: Any) -> tuple[Any, Sequence[Any]]:
    """Return the operator that a node calls, if Python can, and its arguments in the order of the node's inputs."""
    return _operator(node.kind(), node.schema())


@functools.lru_cache(maxsize=4096)
def _operator(kind: str, signature: str) -> tuple[Any, Sequence[Any]]:
    if signature == "(no schema)":
        return None, ()
    schema = torch._C.parse_schema(signature)
    space, _, name = kind.partition("::")
    packet = getattr(getattr(torch.ops, space), name, None)
    return getattr(packet, schema.overload_name or "default", None), tuple(schema.arguments)
