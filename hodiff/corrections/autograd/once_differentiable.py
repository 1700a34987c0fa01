"""Rules that raise where a Function marked once_differentiable would silently make second derivatives zero."""

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
from hodiff.recompute.cut_graphs import UnrecordedGradientError, refuse_cuts_of
from hodiff.routes import ROUTES
from hodiff.torch_internals.autograd.transforms import differentiating_count, in_transform
from hodiff.torch_internals.autograd.wrapped_tensors import is_wrapped

_silent = partial(
    register,
    kind="missing",
    routes=ROUTES,
    reason="a Function marked once_differentiable has a gradient that is a constant, in silence",
    reference="an error in its place",
)


@_silent(torch.autograd.grad)
def _grad(outputs: Tensor | Sequence[Tensor], inputs: Any, grad_outputs: Any = None, *args: Any, **kwargs: Any) -> Any:
    del grad_outputs
    create_graph = args[1] if len(args) > 1 else kwargs.get("create_graph", False)
    if create_graph:
        _refuse_constant_gradients(outputs, inputs)
    # Torch's function runs once, outside the rule, so that its errors are raised unchanged.
    return UNNEEDED


@_silent(torch.Tensor.backward)
def _tensor_backward(
    self: Tensor, gradient: Any = None, retain_graph: Any = None, create_graph: bool = False, inputs: Any = None
) -> Any:
    del gradient, retain_graph
    if create_graph:
        _refuse_constant_gradients(self, inputs)
    return UNNEEDED


def _refuse_constant_gradients(outputs: Tensor | Sequence[Tensor], inputs: Any) -> None:
    """Raise if the gradient will be differentiated and a Function in the graph returns a constant gradient."""
    # In plain torch create_graph shows it. torch.func always records, so it takes an outer transform there.
    transformed = in_transform()
    if transformed and differentiating_count() < 2:
        return
    for output in _tensors(outputs):
        if not transformed and is_wrapped(output):  # a pullback of torch.func.vjp, which has ended
            continue
        found = inspect_graph(output)
        if found.once is not None:
            raise RouteError(
                f"{found.once}: a second derivative would be wrong without a word. Write the backward of a Function "
                "with torch operators or other Functions and remove the mark, put plain Python in the place of an "
                "operator that takes functions, or take the gradient without create_graph."
            )
        # Inside transforms, the rules of Functions check this themselves.
        if found.functions and not transformed and not torch.compiler.is_compiling():
            operands = found.leaves if inputs is None else list(_tensors(inputs))
            try:
                refuse_cuts_of(output, found.functions, operands)
            except UnrecordedGradientError as error:
                raise RouteError(f"{error}; or take the gradient without create_graph.") from error


def _tensors(outputs: Tensor | Sequence[Tensor]) -> Iterator[Tensor]:
    candidates = (outputs,) if isinstance(outputs, Tensor) else outputs
    yield from (each for each in candidates if isinstance(each, Tensor))  # others are edges of a graph
