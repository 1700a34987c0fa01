"""Rows of a Hessian at a point, for groups of directions and any route."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.func import vmap
from tqdm.auto import tqdm

from hodiff.common.chunks import ByteCount, in_threads, resolve_chunk_size, spans
from hodiff.common.module_state import untouched
from hodiff.common.trees import PyTree, one_hot_rows, strided
from hodiff.derivatives.bound_function import BoundFunction
from hodiff.derivatives.products_by_route import PRODUCTS, Leaves, gradient, guard_reverse, pull
from hodiff.derivatives.recorded_gradient import RecordedGradient
from hodiff.derivatives.steady import steady
from hodiff.kernels.narrow import NarrowKernels
from hodiff.kernels.unit_directions import UnitRows
from hodiff.recompute.reachable import draw_of, named_modules
from hodiff.routes import ROUTES
from hodiff.torch_internals.autograd.differentiation import only_reverse_mode
from hodiff.torch_internals.autograd.wrapped_tensors import is_wrapped
from hodiff.torch_internals.tensors import has_numbers, in_trace

NARROW_FROM = 32


class RowSource(Protocol):
    """Source of the rows from which a dense Hessian is assembled."""

    aux: PyTree

    def rows(self, index: int, basis: Tensor, wanted: Sequence[int]) -> tuple[Tensor | None, ...]:
        """Compute rows for directions `basis` (k, *leaf shape) in one leaf, for the wanted leaves; None is zero."""


class RoutedRows:
    """Hessian rows by `torch.func` transforms.

    "reverse-over-reverse" linearizes the gradient once and shares it among all directions. The other routes cannot
    share a linearization in eager torch, so they compute the primal once for each group, and would draw other random
    numbers each time; `randomness="same"` replays one draw.
    """

    def __init__(self, function: BoundFunction, route: str, randomness: str):
        self.leaves = function.leaves
        self.randomness = randomness
        # Routes that share nothing between groups evaluate the function again for each group.
        self._draw = draw_of(function.leaves, *function.roots) if randomness == "same" and route != ROUTES[0] else None
        self.aux: PyTree = ()
        if route == ROUTES[0]:
            _, pullback, self.aux = pull(gradient(guard_reverse(function)), self.leaves)
            self._product = lambda tangents: pullback(tangents)[0]
        else:
            product, function = PRODUCTS[route], steady(function)
            if function.has_aux:
                self.aux = function.scalar(self.leaves)[1]
            self._product = lambda tangents: product(function, self.leaves, tangents)[0]

    def rows(self, index: int, basis: Tensor, wanted: Sequence[int]) -> tuple[Tensor | None, ...]:
        """See `RowSource.rows`."""
        if self._draw is not None:
            self._draw.rewind()

        def product(direction: Tensor) -> Leaves:
            tangents = tuple(direction if i == index else torch.zeros_like(p) for i, p in enumerate(self.leaves))
            return self._product(tangents)

        rows = vmap(product, randomness=self.randomness)(basis)
        return tuple(rows[i] for i in wanted)


class LinearizedHessian:
    """Rows of a Hessian in groups, from a single linearization of the gradient if the route allows it.

    Attributes:
        source: The source of the rows.
        plain: Whether no transform surrounds the call, so that results may be written in place.
        magnitude: Size of the function's value, if known.
        eps: Machine epsilon of the coarsest dtype used, if known.

    Args:
        function: The function.
        route: A validated route.
        chunk_size: A validated chunk size.
        randomness: "error" or "same".
        progress: Whether to show a progress bar.
        recorded: The function's recorded gradient, if available and the route is "reverse-over-reverse".
        threads: Number of groups that are computed at once.
    """

    magnitude = eps = 0.0

    def __init__(
        self,
        function: BoundFunction,
        route: str,
        *,
        chunk_size: int | str | None,
        randomness: str,
        progress: bool,
        recorded: RecordedGradient | None = None,
        threads: int = 1,
    ):
        self.function = function
        self.threads = threads
        self.chunk_size = chunk_size
        self.progress = progress
        self.source: RowSource
        self.traced = torch.compiler.is_compiling()
        if self.traced:
            # A graph unrolls the loop over groups; a single group keeps it small.
            self.chunk_size = None if chunk_size == "auto" else chunk_size
            self.plain = False
            self.source = RoutedRows(function, route, randomness)
            self.bytes_each = 0
            return
        if route == ROUTES[0] and only_reverse_mode():
            self._take(recorded or RecordedGradient(function))
            return
        with ByteCount() as count:
            self.source = RoutedRows(function, route, randomness)
            if route != ROUTES[0]:
                # These routes compute nothing ahead; a gradient has the same intermediates as their primal.
                with untouched(list(named_modules(function.f))):
                    gradient(function.scalar)(function.leaves)
        self.plain = False
        # A pullback holds a cotangent for each intermediate result, and at its peak about as much again.
        self.bytes_each = 2 * count.bytes

    def _take(self, recorded: RecordedGradient) -> None:
        self.source = recorded
        self.plain = not recorded.connected
        self.magnitude = abs(float(recorded.value)) if has_numbers(recorded.value) else 0.0
        self.eps = recorded.eps
        self.bytes_each = recorded.bytes_each

    def groups(self, plan: Sequence[tuple[int, Sequence[int]]]) -> Iterator[tuple[int, int, int, tuple[Tensor, ...]]]:
        """Yield rows for all unit directions of the planned leaves.

        Args:
            plan: Pairs of a leaf whose unit directions are used, and the leaves wanted in their rows.

        Yields:
            Leaf, first and last direction, and rows (k, *shape) for each wanted leaf.
        """
        total = sum(self.function.leaves[index].numel() for index, _ in plan)
        # torch.compile traces neither progress bars nor dispatch modes.
        bar = None if self.traced else tqdm(total=total, unit=" directions", disable=not self.progress)
        leaves = self.function.leaves
        for index, wanted in plan:
            leaf = leaves[index]
            # Sizes may be symbols in a graph, which have no bytes.
            bytes_each = self.bytes_each + (0 if self.traced else sum(leaves[i].nbytes for i in wanted))
            size = resolve_chunk_size(self.chunk_size, leaf.numel(), bytes_each, leaf.device)
            groups = list(spans(leaf.numel(), size))
            computed = in_threads(partial(self._group, index, wanted), groups, self.threads)
            for (start, stop), rows in zip(groups, computed, strict=True):
                yield (
                    index,
                    start,
                    stop,
                    tuple(
                        leaf.new_zeros((stop - start, *leaves[i].shape)) if row is None else strided(row)
                        for i, row in zip(wanted, rows, strict=True)
                    ),
                )
                if bar is not None:
                    bar.update(stop - start)
        if bar is not None:
            bar.close()

    def _group(self, index: int, wanted: Sequence[int], span: tuple[int, int]) -> tuple[Tensor | None, ...]:
        start, stop = span
        basis = one_hot_rows(start, stop, self.function.leaves[index])
        # A dispatch mode costs some microseconds for each operator, which pays only for wide groups. A trace must not
        # see the kernels' in-place writes, and wrapped directions have no memory.
        general = self.traced or in_trace() or is_wrapped(basis) or stop - start < NARROW_FROM
        with nullcontext() if general else NarrowKernels(UnitRows(basis, start)):
            return self.source.rows(index, basis, wanted)
