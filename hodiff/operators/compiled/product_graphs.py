"""The graphs of one captured product: a half that depends on the point, and a linear half, compiled for blocks."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, fx

from hodiff.derivatives.capture.reads import OtherBranchError
from hodiff.derivatives.compilation import Compiled, agree, compile_graph, warn_of_failure
from hodiff.operators.compiled.linear_graphs import Leaves, SplitGraph, stand_ins, widen
from hodiff.torch_internals.threads import one_thread_at_a_time

# Vectors are processed one by one if that takes less than this fraction of the time of the whole block.
CLEARLY = 0.9
# Largest expected speedup from compiling the graph of one vector.
GAIN = 5.0
# Number of calls that are timed; the shortest counts.
REPEATS = 2
# Largest size of a product that is only rounding, in units of rounding of a typical product.
SOME = 100.0

_NUMBERS = itertools.count()

Way = Callable[[Leaves, Leaves], Sequence[Tensor]]


class Graphs:
    """The halves of a product; the linear half is compiled for a block width when it is first needed.

    Args:
        caller: The operator, for warnings.
        halves: The captured product.

    Attributes:
        number: A different number for each capture.
    """

    def __init__(self, caller: str, halves: SplitGraph):
        self.caller = caller
        self._halves = halves
        self._ways: dict[int, Way] = {}
        self.number = next(_NUMBERS)

    def residuals(self, constants: Leaves) -> Leaves:
        """Run the half that depends on the point; raise `OtherBranchError` if the graph is for other branches."""
        return tuple(self._halves.point(*constants))

    def serve(self, constants: Leaves, vector: Leaves, expected: Sequence[Tensor]) -> bool:
        """Whether all graphs are right for constants of other sizes, by comparison with `expected`."""
        if not self._halves.serves(constants, tuple(v[0] for v in vector)):
            return False
        try:
            residuals = self.residuals(constants)
            found = [self.uncompiled(residuals, vector)]
            for width, way in self._ways.items():
                block = tuple(v.expand(width, *v.shape[1:]).contiguous() for v in vector)
                found.append([each[:1] for each in way(residuals, block)])
        except OtherBranchError:
            raise
        except Exception:
            # On any error another graph is made instead.
            return False
        return all(agree(each, expected)[0] for each in found)

    def run(self, residuals: Leaves, group: Leaves, width: int) -> Sequence[Tensor]:
        """Run the compiled linear half for the vectors of a group, leaves (k, *shape), by the graph for `width`."""
        if width not in self._ways:
            full = _filled_up(group, width)
            with one_thread_at_a_time():
                self._ways[width] = self._narrow(residuals, full) if width == 1 else self._wide(residuals, full)
        way, count = self._ways[width], group[0].shape[0]
        # A graph for a whole block needs groups filled up with zeros; the other ways accept fewer vectors.
        if count == width or way == self._one_by_one:
            return way(residuals, group)
        return [each[:count] for each in way(residuals, _filled_up(group, width))]

    def uncompiled(self, residuals: Leaves, group: Leaves) -> Sequence[Tensor]:
        """Run the captured linear half uncompiled, for one vector after another."""
        rows = [self._halves.linear(*residuals, *(v[i] for v in group)) for i in range(group[0].shape[0])]
        return [torch.stack(column) for column in zip(*rows, strict=True)]

    def _narrow(self, residuals: Leaves, group: Leaves) -> Way:
        def compiled() -> Way:
            # Compilation changes a graph, and other graphs are made from this one, so compile a copy.
            graph = fx.GraphModule({}, copy.deepcopy(self._halves.linear.graph))
            run = self._compile(graph, [*residuals, *(v[0] for v in group)])
            return lambda residuals, group: [each[None] for each in run(*residuals, *(v[0] for v in group))]

        return self._verified(compiled, residuals, group, "the product")[0] or self.uncompiled

    def _wide(self, residuals: Leaves, group: Leaves) -> Way:
        """Return the graph for a group, or the one-by-one graph if it is faster or the only one that works."""
        if self._halves.sizes is not None:
            # Torch's batching rules would fix the open sizes.
            return self._one_by_one

        def compiled() -> Way:
            run = self._compile(widen(self._halves.linear, residuals, group), [*residuals, *group])
            return lambda residuals, group: run(*residuals, *group)

        way, apart = self._verified(compiled, residuals, group, "the product with a block")
        if way is None:
            return self._one_by_one
        # On a CPU, batched convolutions of many vectors may take longer than one after another.
        if group[0].device.type != "cpu":
            return way
        together = _timed(way, residuals, group)[0]
        if apart > GAIN * together:
            return way
        self._one_by_one(residuals, group)  # compiles
        return self._one_by_one if _timed(self._one_by_one, residuals, group)[0] < CLEARLY * together else way

    def _one_by_one(self, residuals: Leaves, group: Leaves) -> Sequence[Tensor]:
        rows = [self.run(residuals, tuple(v[i : i + 1] for v in group), 1) for i in range(group[0].shape[0])]
        return [torch.cat(column) for column in zip(*rows, strict=True)]

    def _verified(
        self, make: Callable[[], Way], residuals: Leaves, group: Leaves, what: str
    ) -> tuple[Way | None, float]:
        """Return a compiled way, or None if it failed or disagrees with the captured graph, and the graph's time."""
        try:
            way = make()
            found = way(residuals, group)
        except Exception as error:
            # The captured graph runs whatever the compiler fails at.
            warn_of_failure(f"{self.caller}: {what}", error)
            return None, 0.0
        seconds, expected = _timed(self.uncompiled, residuals, group)
        same, gap = agree(found, expected)
        if not same and not self._is_rounding(way, residuals, group, found, expected):
            warn_of_failure(f"{self.caller}: {what}", gap)
            return None, 0.0
        return way, seconds

    def _is_rounding(
        self, way: Way, residuals: Leaves, group: Leaves, found: Sequence[Tensor], expected: Sequence[Tensor]
    ) -> bool:
        """Whether both results are only rounding, relative to products with random vectors, which must agree."""
        generator = torch.Generator().manual_seed(0)
        others = tuple(
            torch.randn(v.shape, generator=generator, dtype=torch.float64, device=generator.device).to(v) for v in group
        )
        typical = self.uncompiled(residuals, others)
        if not agree(way(residuals, others), typical)[0]:
            return False
        length = _length(typical) / _length(others) * _length(group)
        rounding = max(torch.finfo(each.dtype).eps for each in expected)
        return max(_length(found), _length(expected)) <= SOME * rounding * length

    def _compile(self, graph: fx.GraphModule, inputs: Sequence[Tensor]) -> Compiled:
        # On a CPU every product would convert the layout of the residuals, which costs more than convolutions gain.
        relayout = inputs[-1].device.type != "cpu"
        # Code for open sizes is compiled from the symbolic inputs of the trace.
        given = inputs if self._halves.sizes is None else stand_ins(graph)
        return compile_graph(graph, given, caller=self.caller, relayout=relayout)


def _filled_up(group: Leaves, width: int) -> Leaves:
    missing = width - group[0].shape[0]
    return tuple(torch.cat([v, v.new_zeros(missing, *v.shape[1:])]) if missing else v for v in group)


def _length(tensors: Sequence[Tensor]) -> float:
    """Return the Euclidean norm of all tensors together."""
    return float(torch.stack([each.double().norm() for each in tensors]).norm())


def _timed(way: Way, residuals: Leaves, group: Leaves) -> tuple[float, Sequence[Tensor]]:
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        found = way(residuals, group)
        seconds.append(time.perf_counter() - start)
    return min(seconds), found
