"""Products of Hessians and Jacobians with many vectors, in groups: rows of (k, n) to rows of (k, m).

Products with a Hessian by one compiled graph, of the gradient and of all vectors together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap

from hodiff.common.chunks import ByteCount, resolve_chunk_size, spans
from hodiff.common.module_state import untouched
from hodiff.common.trees import PyTree, describe, flatten, tensors_in
from hodiff.derivatives.bound_function import BoundFunction, bind
from hodiff.derivatives.compilation import Arguments
from hodiff.derivatives.compiled_calls import CompiledCalls
from hodiff.derivatives.products_by_route import PRODUCTS, Leaves, pull, push
from hodiff.derivatives.recorded_gradient import RecordedGradient, pull_batch
from hodiff.derivatives.route_choice import follow, takes_unrecorded, unavailable
from hodiff.derivatives.steady import leaving_no_trace, steady
from hodiff.errors import InputError, RouteError
from hodiff.recompute.reachable import named_modules
from hodiff.recompute.recording import Recording
from hodiff.routes import ROUTES
from hodiff.torch_internals.autograd.differentiation import only_reverse_mode

# Maps vectors (k, n) to their products (k, m).
Multiply = Callable[[Tensor], Tensor]


class Hessian:
    """The Hessian of a scalar function at a point.

    Attributes:
        value: The function's value there.
        eps: Machine epsilon of the coarsest dtype in use, as far as it is known.
    """

    def __init__(self, function: BoundFunction, route: str, chunk_size: int | str | None):
        self._function = function
        self._chunk_size = chunk_size
        self.eps = coarsest(function.leaves)
        self._others = ROUTES[1:] if route == "auto" else ()
        self._bytes_each, self._rows, self.value = follow(route, function.caller, self._attempt)

    def _attempt(self, route: str) -> tuple[int, Callable[[Leaves], Leaves], Tensor]:
        function = self._function
        if route == ROUTES[0] and only_reverse_mode():
            recorded = RecordedGradient(function, numbers=True)
            self.eps = max(self.eps, recorded.eps)
            return recorded.bytes_each, partial(_pulled_back, recorded), recorded.value
        rule = PRODUCTS[route]
        with ByteCount() as count, leaving_no_trace(function.f):
            value = function.scalar(function.leaves)[0]
        again = steady(function)

        def rows(tangents: Leaves) -> Leaves:
            with leaving_no_trace(function.f):
                return vmap(lambda *v: rule(again, function.leaves, v)[0], randomness="same")(*tangents)

        if route != ROUTES[-1]:  # a missing rule shows at the first product
            rows(tuple(torch.zeros_like(leaf)[None] for leaf in function.leaves))
        return 4 * count.bytes, rows, value

    def products(self, vectors: Tensor) -> Tensor:
        """Compute the product with each row of (k, n)."""
        try:
            return in_groups(self._joined_products, vectors, self._bytes_each, self._chunk_size)
        except Exception as error:
            # Compiled functions, for example, record a gradient and refuse to differentiate it.
            if not self._others or not unavailable(error):
                raise
        others, self._others = self._others, ()
        self._bytes_each, self._rows, self.value = follow("auto", self._function.caller, self._attempt, others)
        return self.products(vectors)

    def _joined_products(self, vectors: Tensor) -> Tensor:
        return joined(self._rows(split(vectors, self._function.leaves)))


def _pulled_back(recorded: RecordedGradient, tangents: Leaves) -> Leaves:
    """Products of a recorded gradient; a single vector is multiplied without vmap, whose overhead is larger."""
    if len(tangents[0]) != 1:
        return recorded.products(tangents)
    return _one_by_one(lambda v: recorded.product(v, keep=True), tangents)


class Jacobian:
    """The Jacobian of a function at a point, by tangents and by cotangents.

    Attributes:
        outputs: The tensors that the function returns.
        eps: Machine epsilon of the coarsest dtype of the outputs and of the leaves.
        recorded: Whether cotangents are pulled one by one through a graph that plain autograd records, because f has
            parts that transforms do not support. Tangents would be gradients of these, which may be cut silently.
    """

    def __init__(self, function: BoundFunction, chunk_size: int | str | None):
        self._function = function
        self._chunk_size = chunk_size
        self.recorded = False
        self._modules: list[nn.Module] = []
        with ByteCount() as count:
            self.outputs = self._evaluated()
        # Further runs update copies of the modules' buffers.
        self._modules = list(named_modules(function.f))
        for output in self.outputs:
            if not output.is_floating_point():
                remedy = "return torch.view_as_real of it" if output.is_complex() else "leave it out, or convert it"
                raise InputError(
                    f"{function.caller}: f: expected results that are real floating-point tensors, got "
                    f"{describe(output)}; {remedy}."
                )
        self.eps = coarsest((*function.leaves, *self.outputs))
        self._bytes_each = 2 * count.bytes

    def _evaluated(self) -> list[Tensor]:
        function = self._function
        if not only_reverse_mode():
            return _only_tensors(function.caller, function(function.leaves)[0])
        try:
            with torch.no_grad():
                return _only_tensors(function.caller, function(function.leaves)[0])
        except RuntimeError as error:
            if not takes_unrecorded(error):
                raise
        self.recorded = True
        return [y.detach() for y in self._recording().result]

    def products(self, vectors: Tensor) -> Tensor:
        """$J v$ for each row of (k, n): tangents are pushed forward."""
        function = self._function
        leaves = function.leaves
        if self.recorded:
            raise RouteError(
                f"{function.caller}: torch does not implement this derivative: f has parts that torch.func transforms "
                "do not support; use method='rows', which pulls cotangents back without them."
            )

        def along(*tangents: Tensor) -> list[Tensor]:
            return push(self._flat, (leaves,), (tangents,))[1]

        return self._batched(lambda rows: vmap(along, randomness="same")(*rows), vectors, leaves)

    def transposed_products(self, vectors: Tensor) -> Tensor:
        r"""$J^\top v$ for each row of (k, m): cotangents are pulled back, through one recorded pass."""
        if self.recorded:
            return self._recorded_transposed_products(vectors)
        _, pullback, _ = pull(self._flat, self._function.leaves)

        def pulled(rows: Leaves) -> Sequence[Tensor]:
            return pull_batch(lambda *v: pullback(list(v))[0], rows, randomness="same")

        return self._batched(pulled, vectors, self.outputs)

    def _batched(
        self, multiply: Callable[[Leaves], Sequence[Tensor]], vectors: Tensor, like: Sequence[Tensor]
    ) -> Tensor:
        def product(part: Tensor) -> Tensor:
            with leaving_no_trace(self._function.f):
                return joined(multiply(split(part, like)))

        return in_groups(product, vectors, self._bytes_each, self._chunk_size)

    def _recorded_transposed_products(self, vectors: Tensor) -> Tensor:
        leaves = self._function.leaves
        if not len(vectors):
            return vectors.new_zeros(0, sum(leaf.numel() for leaf in leaves))
        recording = self._recording()

        def pulled(cotangents: Leaves) -> Leaves:
            found = recording.gradients(recording.result, cotangents, keep=True)
            return tuple(torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True))

        return joined(_one_by_one(pulled, split(vectors, self.outputs)))

    def _recording(self) -> Recording[list[Tensor]]:
        """Record a run by plain autograd, with a connected graph if products need derivatives, too."""
        function = self._function
        with untouched(self._modules):
            recording = Recording(lambda leaves: tensors_in(function(leaves)[0]), function.leaves, roots=function.roots)
        for each in recording.result:
            recording.inspect(each)
        return recording

    def _flat(self, leaves: Leaves) -> tuple[list[Tensor], tuple[()]]:
        with untouched(self._modules):
            return tensors_in(self._function(leaves)[0]), ()


def _only_tensors(caller: str, results: PyTree) -> list[Tensor]:
    """Return the results that have rows in the matrix; results of None have none."""
    leaves = [leaf for leaf in flatten(results)[0] if leaf is not None]
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            raise InputError(
                f"{caller}: f: expected a tensor or a pytree of tensors as a result, got {describe(leaf)}; remove it, "
                "or convert it by torch.tensor(...)."
            )
    return leaves


def _one_by_one(multiply: Callable[[Leaves], Leaves], vectors: Leaves) -> Leaves:
    if len(vectors[0]) == 1:  # no copy
        return tuple(each[None] for each in multiply(tuple(each[0] for each in vectors)))
    return tuple(map(torch.stack, zip(*map(multiply, zip(*vectors, strict=True)), strict=True)))


def in_groups(multiply: Multiply, vectors: Tensor, bytes_each: int, chunk_size: int | str | None) -> Tensor:
    """Multiply as many vectors at once as memory allows."""
    count = len(vectors)
    if not count:
        return vectors
    size = resolve_chunk_size(chunk_size, count, bytes_each, vectors.device)
    parts = [multiply(vectors[start:stop]) for start, stop in spans(count, size)]
    return torch.cat(parts) if len(parts) != 1 else parts[0]


def coarsest(tensors: Sequence[Tensor]) -> float:
    """Largest machine epsilon of the tensors' dtypes."""
    return max(torch.finfo(each.dtype).eps for each in tensors)


def split(vectors: Tensor, like: Sequence[Tensor]) -> Leaves:
    """Split vectors (k, n) into tensors (k, *shape), one for each leaf."""
    parts = vectors.split([leaf.numel() for leaf in like], 1)
    return tuple(part.reshape(len(part), *leaf.shape).to(leaf.dtype) for part, leaf in zip(parts, like, strict=True))


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Join tensors (k, *shape) into vectors (k, n); the inverse of `split`."""
    flat = [part.reshape(len(part), part[0].numel()) for part in parts]
    return flat[0] if len(flat) == 1 else torch.cat(flat, 1)


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
