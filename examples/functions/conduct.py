"""Checks for errors that autograd's engine tolerates: wrong gradient shapes, writes to cotangents, no Function."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction


def about_backward(outputs: list[Tensor], name: str) -> str | None:
    """Return a complaint about a Function's own `backward` that the engine would correct, or None."""
    nodes = list(functions_behind(outputs))
    if not nodes:
        return (
            f"{name} is made without a Function: expected one with a backward of its own, not torch's operators alone"
        )
    return next((found for node in nodes if (found := about_node(node))), None)


def functions_behind(outputs: list[Tensor]) -> Iterator[Any]:
    """Yield the nodes of custom Functions in a graph."""
    waiting, seen = [y.grad_fn for y in outputs if y.grad_fn is not None], set[Any]()
    while waiting:
        node: Any = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if isinstance(node, BackwardCFunction):
            yield node
        waiting += [each for each, _ in node.next_functions if each is not None]


def about_node(node: Any) -> str | None:
    """Call backward directly: the engine would sum a gradient of a larger shape to the shape of its input."""
    name = type(node).__name__.removesuffix("Backward")
    cotangents = [torch.ones(each.shape, dtype=each.dtype, device=each.device) for each in node._input_metadata]
    with torch.no_grad():
        found = node.apply(*cotangents)
    if any(each._version or bool((each != 1).any()) for each in cotangents):
        return f"the backward of {name} writes to the incoming gradient, which others may read: compute a new tensor"
    gradients = found if isinstance(found, tuple) else (found,)
    needed = [k for k, each in enumerate(node.needs_input_grad) if each]
    reached = [(each, place) for each, place in node.next_functions if each is not None]
    for k, (before, place) in zip(needed, reached, strict=True):
        gradient, shape = gradients[k], tuple(before._input_metadata[place].shape)
        if isinstance(gradient, Tensor) and tuple(gradient.shape) != shape:
            return (
                f"the backward of {name} returns a gradient of shape {tuple(gradient.shape)} for input {k} of shape "
                f"{shape}: sum it to that shape"
            )
    return None
