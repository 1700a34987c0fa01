"""Compiled products: captured once for each form of the arguments, verified against eager, used at every point."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from hodiff.derivatives.captured import Arguments, Compiled, agree, compile_graph, warn_of_failure
from hodiff.errors import HodiffError
from hodiff.operators.linear_graphs import Leaves, SplitGraph, capture, widen

# Vectors of a block that one compiled call multiplies; graphs exist for one vector and for so many.
WIDTH = 8

Product = Callable[[Leaves, Leaves, tuple[Any, ...]], Sequence[Tensor]]


class CapturedProducts:
    """The compiled products of one operator, one for each form of the arguments.

    Args:
        caller: The operator, for warnings.
    """

    def __init__(self, caller: str):
        self.caller = caller
        self._captured: dict[Any, _Captured | None] = {}

    def linearize(
        self, product: Product, leaves: Leaves, args: tuple[Any, ...], eager: Callable[[], Any]
    ) -> CompiledLinearization | None:
        """Linearize by a captured graph.

        Args:
            product: Maps point, tangents and arguments to the product.
            leaves: The point.
            args: Further arguments.
            eager: Makes the eager linearization that the first one is compared with.

        Returns:
            The linearization, or None where the product cannot be captured or came out differently; a warning says so.
        """
        arguments = Arguments((leaves, args))
        if arguments.form not in self._captured:

            def of_tensors(constants: Leaves, tangents: Leaves) -> Sequence[Tensor]:
                point, rest = arguments.filled(constants)
                return product(point, tangents, rest)

            self._captured[arguments.form] = self._capture(of_tensors, leaves, arguments.tensors, eager)
        captured = self._captured[arguments.form]
        return None if captured is None else captured.at(arguments.tensors)

    def _capture(
        self,
        product: Callable[[Leaves, Leaves], Sequence[Tensor]],
        leaves: Leaves,
        constants: Leaves,
        eager: Callable[[], Any],
    ) -> _Captured | None:
        generator = torch.Generator().manual_seed(0)
        vector = tuple(
            torch.randn(1, *leaf.shape, generator=generator, dtype=torch.float64).to(leaf) for leaf in leaves
        )
        try:
            captured = _Captured(capture(product, constants, tuple(v[0] for v in vector)))
            found = captured.at(constants).products(vector)
        except HodiffError:
            raise
        except Exception as error:
            # Whatever the compiler could not do, eager products can.
            warn_of_failure(f"{self.caller}: the product", error)
            return None
        same, gap = agree(found, eager().products(vector))
        if not same:
            warn_of_failure(f"{self.caller}: the product", gap)
            return None
        return captured


class _Captured:
    """The graphs of one form of the arguments."""

    def __init__(self, halves: SplitGraph):
        self._halves = halves
        self._compiled: dict[bool, Compiled] = {}

    def at(self, constants: Leaves) -> CompiledLinearization:
        """Run the half that depends on the point."""
        return CompiledLinearization(self, tuple(self._halves.point(*constants)))

    def run(self, residuals: Leaves, tangents: Leaves, wide: bool) -> Sequence[Tensor]:
        """Run the compiled linear half, for one vector or for `WIDTH`."""
        if wide not in self._compiled:
            self._compiled[wide] = self._compile(residuals, tangents, wide)
        return self._compiled[wide](*residuals, *tangents)

    def _compile(self, residuals: Leaves, tangents: Leaves, wide: bool) -> Compiled:
        linear = self._halves.linear
        # What is compiled is changed, and the wide graph is made of the narrow one.
        graph = widen(linear, residuals, tangents) if wide else fx.GraphModule({}, copy.deepcopy(linear.graph))
        return compile_graph(graph, [*residuals, *tangents])


class CompiledLinearization:
    """A linearization by compiled graphs.

    Attributes:
        bytes_each: 0, as blocks go through in groups of a fixed width.
        nbytes: Bytes of the residuals.
    """

    def __init__(self, captured: _Captured, residuals: Leaves):
        self._captured = captured
        self._residuals = residuals
        self.bytes_each = 0
        # Views share what they look at.
        storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in residuals}
        self.nbytes = sum(storages.values())

    def products(self, tangents: Leaves) -> Leaves:
        """Products with k vectors, leaves (k, *shape), in groups of `WIDTH`, the last one filled up with zeros."""
        k = tangents[0].shape[0]
        if k == 1:
            found = self._captured.run(self._residuals, tuple(v[0] for v in tangents), wide=False)
            return tuple(each[None] for each in found)
        parts = []
        for start in range(0, k, WIDTH):
            group = tuple(_filled_up(v[start : start + WIDTH]) for v in tangents)
            parts.append(self._captured.run(self._residuals, group, wide=True))
        return tuple(torch.cat(columns)[:k] for columns in zip(*parts, strict=True))


def _filled_up(rows: Tensor) -> Tensor:
    missing = WIDTH - rows.shape[0]
    return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]) if missing else rows.contiguous()
