"""Compilation of captured graphs, keys for the form of their arguments, and comparison with eager results."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from hodiff.derivatives.capture.refusals import explained
from hodiff.errors import HodiffWarning
from hodiff.kernels.matrix_products import exchange_products
from hodiff.torch_internals.compilers.tracing import compile_captured

# Relative error beyond which two results count as different, by their dtype.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
LOOSE = 5e-2

# Seconds after which a waiting user is told the reason.
PATIENCE = 2.0

Compiled = Callable[..., Sequence[Tensor]]


def compile_graph(graph: fx.GraphModule, inputs: Sequence[Tensor], *, caller: str, relayout: bool = True) -> Compiled:
    """Compile a graph that nothing differentiates further, for inputs of this form; the graph is changed."""
    exchange_products(graph)
    operators = sum(node.op == "call_function" for node in graph.graph.nodes)
    with said_if_long(f"{caller}: compiling {operators} operators, once for arguments of this form ..."):
        # `relayout` lets the compiler choose channels-last layouts, which speed up convolutions.
        return compile_captured(graph, inputs, None if relayout else {"layout_optimization": False})


@contextmanager
def said_if_long(what: str) -> Iterator[None]:
    """Write a message to the terminal if the block takes long."""
    if not sys.stderr.isatty():
        yield
        return
    timer = threading.Timer(PATIENCE, sys.stderr.write, [f"{what}\n"])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class Arguments:
    """Arguments as a captured graph sees them: tensors, which are its inputs, and other values, which are part of it.

    Attributes:
        tensors: The tensors.
        form: Everything that a graph depends on, as a hashable key.
    """

    def __init__(self, args: Any):
        self._values, self._spec = pytree.tree_flatten(args)
        self._places = [i for i, value in enumerate(self._values) if isinstance(value, Tensor)]
        self.tensors = tuple(self._values[i] for i in self._places)
        self.form = (self._spec, tuple(map(_form, self._values)))

    def form_without(self, places: Mapping[int, int]) -> Any:
        """Return the form without some sizes (`places` maps tensor positions to dimensions) and without strides."""
        values = list(self.form[1])
        for i, dim in places.items():
            shape, _, dtype, device = values[self._places[i]]
            values[self._places[i]] = (*shape[:dim], None, *shape[dim + 1 :]), dtype, device
        return self.form[0], tuple(values)

    def filled(self, tensors: Sequence[Tensor]) -> Any:
        """Return the arguments with other tensors in them."""
        filled = list(self._values)
        for place, tensor in zip(self._places, tensors, strict=True):
            filled[place] = tensor
        return pytree.tree_unflatten(filled, self._spec)


def agree(found: Sequence[Tensor], expected: Sequence[Tensor]) -> tuple[bool, float]:
    """Whether two results agree to the precision of their dtype, and their relative distance."""
    pairs = [_where_numbers(a.double(), b.double()) for a, b in zip(found, expected, strict=True)]
    difference = sum(float((a - b).square().sum()) for a, b in pairs)
    size = sum(float(b.square().sum()) for _, b in pairs)
    gap = (difference / size) ** 0.5 if size else difference**0.5
    return gap <= max((TOLERANCE.get(each.dtype, LOOSE) for each in expected), default=0.0), gap


def _where_numbers(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return both tensors, with 0 where both are NaN or the same infinity."""
    same = ~b.isfinite() & ((a == b) | (a.isnan() & b.isnan()))
    return a.masked_fill(same, 0.0), b.masked_fill(same, 0.0)


def warn_of_failure(caller: str, problem: Exception | float) -> None:
    """Warn that a function stays eager, with the compiler's error or the distance of the compiled result."""
    if isinstance(problem, Exception):
        what = f"could not be compiled: {explained(problem)}"
    else:
        what = f"disagreed with eager by {problem:.1e} when compiled"
    warnings.warn(f"{caller} {what}; it runs eagerly, which is slower but right.", HodiffWarning, stacklevel=2)


def _form(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    return type(value), repr(value)
