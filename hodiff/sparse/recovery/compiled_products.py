"""Products with a Hessian by one compiled graph, of the gradient and of all vectors together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hodiff.derivatives.bound_function import BoundFunction, bind
from hodiff.derivatives.compilation import Arguments
from hodiff.derivatives.compiled_calls import CompiledCalls
from hodiff.derivatives.recorded_gradient import RecordedGradient
from hodiff.derivatives.route_choice import follow
from hodiff.routes import ROUTES
from hodiff.sparse.recovery.compressed_products import coarsest, in_groups, joined, split


class CompiledHessian:
    """The Hessian of a scalar function, whose products are compiled for each form of its arguments."""

    def __init__(self, caller: str, f: Callable[..., Any], argnums: int | tuple[int, ...], correct: bool):
        self.calls = CompiledCalls(caller, "the product")
        self.f = f
        self._bind = lambda args, kwargs: bind(caller, f, args, kwargs, argnums, correct=correct)
        self._sizes: dict[Any, tuple[int, float]] = {}

    def at(
        self, function: BoundFunction, args: tuple[Any, ...], kwargs: dict[str, Any], chunk_size: int | str | None
    ) -> CompiledAtPoint:
        """The Hessian at a point, for the arguments that the function is bound to."""
        self.calls.require_plain("leave compile=True out there")
        form = Arguments((args, kwargs)).form
        if form not in self._sizes:
            self._sizes[form] = _sizes(function)
        return CompiledAtPoint(self, function, (args, kwargs), chunk_size, *self._sizes[form])

    def compute(self, args: tuple[Any, ...], kwargs: dict[str, Any], vectors: Tensor) -> Sequence[Tensor]:
        """Compute the value and the products with each row of `vectors`; this method is compiled."""
        function = self._bind(args, kwargs)
        recorded = RecordedGradient(function)
        return recorded.value, joined(recorded.products(split(vectors, function.leaves)))


class CompiledAtPoint:
    """Hessian at a point by compiled products, with the attributes and the method of `Hessian`."""

    def __init__(
        self,
        compiled: CompiledHessian,
        function: BoundFunction,
        args: tuple[Any, ...],
        chunk_size: int | str | None,
        bytes_each: int,
        eps: float,
    ):
        self.eps = eps
        self._compiled, self._function, self._args = compiled, function, args
        self._chunk_size, self._bytes_each = chunk_size, bytes_each
        self._value: Tensor | None = None
        self._at_once: int | None = None

    @property
    def value(self) -> Tensor:
        """Value of the function, from the graph that computed the products."""
        if self._value is None:
            leaves = self._function.leaves
            self.products(leaves[0].new_zeros(1, sum(leaf.numel() for leaf in leaves)))
        assert self._value is not None
        return self._value

    def products(self, vectors: Tensor) -> Tensor:
        """Compute the product with each row of (k, n), in groups as large as the first, which was compiled."""
        if self._at_once is None:
            return in_groups(self._product, vectors, self._bytes_each, self._chunk_size)
        count = len(vectors)
        full = torch.cat([vectors, vectors.new_zeros(-count % self._at_once, vectors.shape[1])])
        return torch.cat([self._product(part) for part in full.split(self._at_once)])[:count]

    def _product(self, vectors: Tensor) -> Tensor:
        compiled, self._at_once = self._compiled, len(vectors)
        self._value, products = compiled.calls(compiled.f, compiled.compute, (*self._args, vectors))
        return products


def _sizes(function: BoundFunction) -> tuple[int, float]:
    """Bytes of one product's intermediate results, and the coarsest machine epsilon in use."""
    recorded = follow(ROUTES[0], function.caller, lambda _: RecordedGradient(function))
    return recorded.bytes_each, max(recorded.eps, coarsest(function.leaves))
