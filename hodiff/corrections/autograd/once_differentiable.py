"""Errors in place of second derivatives that would come out as zero without a word."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hodiff.corrections.declining import UNNEEDED
from hodiff.corrections.registry import register
from hodiff.errors import RouteError
from hodiff.graphs import inspect_graph
from hodiff.routes import ROUTES
from hodiff.torch_internals.autograd.transforms import differentiating_count, in_transform

_silent = partial(
    register,
    kind="missing",
    routes=ROUTES,
    reason="a Function marked once_differentiable has a gradient that is a constant, in silence",
    reference="an error in its place",
)


@_silent(torch.autograd.grad)
def _grad(outputs: Tensor | Sequence[Tensor], inputs: Any, grad_outputs: Any = None, *args: Any, **kwargs: Any) -> Any:
    del inputs, grad_outputs
    create_graph = args[1] if len(args) > 1 else kwargs.get("create_graph", False)
    if create_graph:
        _refuse_constant_gradients(outputs)
    # Torch's function runs once, and its errors, which may be the user's, are raised as they are.
    return UNNEEDED


@_silent(torch.Tensor.backward)
def _tensor_backward(
    self: Tensor, gradient: Any = None, retain_graph: Any = None, create_graph: bool = False, inputs: Any = None
) -> Any:
    del gradient, retain_graph, inputs
    if create_graph:
        _refuse_constant_gradients(self)
    return UNNEEDED


def _refuse_constant_gradients(outputs: Tensor | Sequence[Tensor]) -> None:
    """Raise where the gradient is about to be differentiated, and a Function on the way has a constant for one."""
    if not _will_be_differentiated():
        return
    for output in _tensors(outputs):
        once = inspect_graph(output).once
        if once is not None:
            raise RouteError(
                f"{once}: a second derivative would be wrong without a word. Write the backward of a Function with "
                "torch operators or other Functions and remove the mark, put plain Python in the place of an operator "
                "that takes functions, or take the gradient without create_graph."
            )


def _will_be_differentiated() -> bool:
    """In plain torch create_graph says so. torch.func always records, so there a transform around has to be seen."""
    return not in_transform() or differentiating_count() > 1


def _tensors(outputs: Tensor | Sequence[Tensor]) -> Iterator[Tensor]:
    candidates = (outputs,) if isinstance(outputs, Tensor) else outputs
    yield from (each for each in candidates if isinstance(each, Tensor))  # others are edges of a graph
