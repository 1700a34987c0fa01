"""Compiled linearizations: graphs captured once for each form of the arguments, and compared with eager products."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from hodiff.common.chunks import resolve_chunk_size
from hodiff.common.trees import has_strides
from hodiff.derivatives.compilation import Arguments, Compiled, agree, compile_graph, warn_of_failure
from hodiff.derivatives.graphs_by_form import GraphsByForm
from hodiff.errors import HodiffError
from hodiff.operators.compiled.linear_graphs import Leaves, SplitGraph, capture, widen
from hodiff.operators.determinism import read_and_changed
from hodiff.recompute.dependencies import Dependencies
from hodiff.torch_internals.tensors import version_of
from hodiff.torch_internals.threads import one_thread_at_a_time

# How many vectors one compiled call multiplies, and up to how many that are left it does so: few graphs serve blocks of
# every width, the last group filled up with zeros.
WIDTHS = ((1, 1), (8, 32), (64, 2**63))
# Vectors go one after the other where that takes less than this part of the time of all together.
CLEARLY = 0.9

_NUMBERS = itertools.count()

Way = Callable[[Leaves, Leaves], Sequence[Tensor]]
Product = Callable[[Leaves, Leaves, tuple[Any, ...]], Sequence[Tensor]]


class CompiledLinearizations:
    """Linearizes one operator by compiled graphs, which are captured once for each form of what they depend on.

    Args:
        caller: The operator, for warnings.
    """

    def __init__(self, caller: str):
        self.caller = caller
        self._graphs: GraphsByForm[_Graphs] = GraphsByForm(f"{caller}: f")

    # Compiled code belongs to its process, and to the functions that it was made of.
    def __getstate__(self) -> dict[str, str]:
        return {"caller": self.caller}

    def __setstate__(self, state: dict[str, str]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def linearize(
        self,
        product: Product,
        functions: tuple[Callable[..., Any], ...],
        leaves: Leaves,
        args: tuple[Any, ...],
        eager: Callable[[], Any],
    ) -> CompiledLinearization | None:
        """The linearization by captured graphs; None where that failed or differed from eager, which is warned of."""
        arguments = Arguments((leaves, args))

        def compared() -> tuple[Leaves, Leaves]:
            generator = torch.Generator().manual_seed(0)
            vector = tuple(
                torch.randn(1, *leaf.shape, generator=generator, dtype=torch.float64).to(leaf) for leaf in leaves
            )
            return vector, eager().products(vector)

        def capture(dependencies: Dependencies, expected: tuple[Leaves, Leaves]) -> _Graphs | None:
            count = len(arguments.tensors)

            def of_tensors(constants: Leaves, tangents: Leaves) -> Sequence[Tensor]:
                point, rest = arguments.filled(constants[:count])
                with dependencies.filled(constants[count:]):
                    return product(point, tangents, rest)

            return self._capture(of_tensors, (*arguments.tensors, *dependencies.tensors), *expected)

        graphs, inputs = self._graphs.find(functions, arguments, compared, capture)
        return None if graphs is None else graphs.at(tuple(each.detach() for each in inputs))

    def _capture(
        self,
        product: Callable[[Leaves, Leaves], Sequence[Tensor]],
        constants: Leaves,
        vector: Leaves,
        expected: Leaves,
    ) -> _Graphs | None:
        constants = tuple(each.detach() for each in constants)
        try:
            graphs = _Graphs(self.caller, capture(product, constants, tuple(v[0] for v in vector)))
            found = graphs.at(constants).products(vector)
        except HodiffError:
            raise
        except Exception as error:
            # Eager products work, whatever the compiler could not do.
            warn_of_failure(f"{self.caller}: the product", error)
            return None
        same, gap = agree(found, expected)
        if not same:
            warn_of_failure(f"{self.caller}: the product", gap)
            return None
        return graphs


class _Graphs:
    """The graphs of one form of the arguments."""

    def __init__(self, caller: str, halves: SplitGraph):
        self.caller = caller
        self._halves = halves
        self._ways: dict[int, Way] = {}
        self.number = next(_NUMBERS)

    def at(self, constants: Leaves) -> CompiledLinearization:
        """Run the half that depends on the point."""
        return CompiledLinearization(self, tuple(self._halves.point(*constants)), constants)

    def run(self, residuals: Leaves, group: Leaves) -> Sequence[Tensor]:
        """Run the compiled linear half for all vectors of a group, leaves (width, *shape)."""
        width = group[0].shape[0]
        if width not in self._ways:
            with one_thread_at_a_time():
                self._ways[width] = self._narrow(residuals, group) if width == 1 else self._wide(residuals, group)
        return self._ways[width](residuals, group)

    def _narrow(self, residuals: Leaves, group: Leaves) -> Way:
        # Compiling changes a graph, and wide graphs are made from this one: a copy is compiled.
        graph = fx.GraphModule({}, copy.deepcopy(self._halves.linear.graph))
        compiled = _compile(graph, [*residuals, *(v[0] for v in group)])
        return lambda residuals, group: [each[None] for each in compiled(*residuals, *(v[0] for v in group))]

    def _wide(self, residuals: Leaves, group: Leaves) -> Way:
        """The graph for a group, compared once with one vector after the other, which remains where it fails."""
        try:
            compiled = _compile(widen(self._halves.linear, residuals, group), [*residuals, *group])
            found = compiled(*residuals, *group)
        except Exception as error:
            # Whatever the compiler could not do for many vectors, it has done for one.
            warn_of_failure(f"{self.caller}: the product with a block", error)
            return self._one_by_one
        apart, expected = _timed(self._one_by_one, residuals, group)
        same, gap = agree(found, expected)
        if not same:
            warn_of_failure(f"{self.caller}: the product with a block", gap)
            return self._one_by_one

        def together(residuals: Leaves, group: Leaves) -> Sequence[Tensor]:
            return compiled(*residuals, *group)

        # On a CPU convolutions of many vectors may take longer than those of one after the other.
        on_cpu = group[0].device.type == "cpu"
        return self._one_by_one if on_cpu and apart < CLEARLY * _timed(together, residuals, group)[0] else together

    def _one_by_one(self, residuals: Leaves, group: Leaves) -> Sequence[Tensor]:
        rows = [self.run(residuals, tuple(v[i : i + 1] for v in group)) for i in range(group[0].shape[0])]
        return [torch.cat(column) for column in zip(*rows, strict=True)]


class CompiledLinearization:
    """The residuals at a point, and the compiled graphs that make products of them; some are what the graphs read."""

    def __init__(self, graphs: _Graphs, residuals: Leaves, read: Leaves):
        self._graphs = graphs
        self._residuals = residuals
        self.bytes_each = 0
        # Another function has another graph.
        self.value: Leaves = (torch.tensor(float(graphs.number)),)
        # Views share storages, each of which counts once.
        storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in residuals}
        self.nbytes = sum(storages.values())
        # Others are of the old values, and beside them a new one would make a product of neither.
        dense = (each for each in read if has_strides(each) and not each.is_inference())
        kept = (each for each in dense if each.untyped_storage().data_ptr() in storages)
        self._kept = [(each, version_of(each)) for each in kept]

    def products(self, tangents: Leaves) -> Leaves:
        """Products with k vectors, leaves (k, *shape)."""
        if any(version_of(each) != version for each, version in self._kept):
            raise read_and_changed(self._graphs.caller)
        k, start = tangents[0].shape[0], 0
        parts: list[Sequence[Tensor]] = []
        while start < k:
            width = self._width(k - start, tangents[0].device)
            group = tuple(_filled_up(v[start : start + width], width) for v in tangents)
            parts.append(self._graphs.run(self._residuals, group))
            start += width
        if len(parts) == 1:
            return tuple(each[:k] for each in parts[0])
        return tuple(torch.cat(columns)[:k] for columns in zip(*parts, strict=True))

    def _width(self, left: int, device: torch.device) -> int:
        # A product with one vector takes about twice the memory of the residuals.
        most = resolve_chunk_size("auto", left, 2 * self.nbytes, device)
        wanted = next(width for width, upto in WIDTHS if left <= upto)
        return wanted if wanted <= max(most, WIDTHS[1][0]) else WIDTHS[1][0]


def _compile(linear: fx.GraphModule, inputs: Sequence[Tensor]) -> Compiled:
    # On a CPU residuals would be laid out anew by each product, which takes longer than convolutions win by it.
    return compile_graph(linear, inputs, relayout=inputs[-1].device.type != "cpu")


def _timed(way: Way, residuals: Leaves, group: Leaves) -> tuple[float, Sequence[Tensor]]:
    start = time.perf_counter()
    found = way(residuals, group)
    return time.perf_counter() - start, found


def _filled_up(rows: Tensor, width: int) -> Tensor:
    missing = width - rows.shape[0]
    return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]) if missing else rows.contiguous()
