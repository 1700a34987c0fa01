"""Compiled linearizations: graphs captured once for each form of the arguments, and compared with eager products."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hodiff.common.chunks import resolve_chunk_size
from hodiff.common.trees import has_strides
from hodiff.derivatives.capture.reads import OtherBranchError
from hodiff.derivatives.capture.refusals import CaptureError
from hodiff.derivatives.compilation import Arguments, agree, warn_of_failure
from hodiff.derivatives.graphs_by_form import GraphsByForm
from hodiff.errors import HodiffError
from hodiff.operators.compiled.linear_graphs import Leaves, SplitGraph, capture
from hodiff.operators.compiled.product_graphs import Graphs
from hodiff.operators.data.determinism import read_and_changed
from hodiff.recompute.dependencies import Dependencies
from hodiff.recompute.surroundings import settings
from hodiff.torch_internals.compilers.dynamic_shapes import LEAST
from hodiff.torch_internals.tensors import version_of

# Pairs of the number of vectors in one compiled call, and the most remaining vectors for which it is used. A few
# graphs then suffice for blocks of every width.
WIDTHS = ((1, 1), (8, 32), (64, 2**63))


class CompiledLinearization:
    """Residuals at a point, computed from the tensors `read`, and the compiled graphs that multiply with them."""

    def __init__(self, graphs: Graphs, residuals: Leaves, read: Leaves):
        self._graphs = graphs
        self._residuals = residuals
        self.bytes_each = 0
        # Another function has another graph, so the graph's number serves as the value to compare.
        self.value: Leaves = (torch.tensor(float(graphs.number)),)
        # Views share storages, and each storage counts once. Residuals that are sizes or have no strides are skipped.
        tensors = [each for each in residuals if isinstance(each, Tensor) and has_strides(each)]
        storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
        self.nbytes = sum(storages.values())
        # Residuals may share memory with tensors that the graph read; if one of these changes, products would be wrong.
        dense = (each for each in read if has_strides(each) and not each.is_inference())
        kept = (each for each in dense if each.untyped_storage().data_ptr() in storages)
        sparse = (each for each in read if not has_strides(each) and any(each is one for one in residuals))
        self._kept = [(each, version_of(each)) for each in (*kept, *sparse)]

    def products(self, tangents: Leaves) -> Leaves:
        """Compute products with k vectors, leaves (k, *shape)."""
        if any(version_of(each) != version for each, version in self._kept):
            raise read_and_changed(self._graphs.caller)
        k, start = tangents[0].shape[0], 0
        parts: list[Sequence[Tensor]] = []
        while start < k:
            width = self._width(k - start, tangents[0].device)
            group = tuple(v[start : start + width].contiguous() for v in tangents)
            parts.append(self._graphs.run(self._residuals, group, width))
            start += width
        if len(parts) == 1:
            return tuple(parts[0])
        return tuple(torch.cat(columns) for columns in zip(*parts, strict=True))

    def _width(self, left: int, device: torch.device) -> int:
        # A product with one vector takes about twice the memory of the residuals.
        most = resolve_chunk_size("auto", left, 2 * self.nbytes, device)
        wanted = next(width for width, upto in WIDTHS if left <= upto)
        return wanted if wanted <= max(most, WIDTHS[1][0]) else WIDTHS[1][0]


Product = Callable[[Leaves, Leaves, tuple[Any, ...]], Sequence[Tensor]]


class CompiledLinearizations:
    """Linearizes one operator by compiled graphs, which are captured once for each form of their dependencies.

    Args:
        caller: The operator, for warnings.
        dynamic: Whether one graph supports other batch sizes, as far as the function allows it.
    """

    def __init__(self, caller: str, *, dynamic: bool = False):
        self.caller = caller
        self.dynamic = dynamic
        self._graphs: GraphsByForm[Graphs] = GraphsByForm(f"{caller}: f")
        # Graphs with open sizes, by everything else that they depend on.
        self._open: dict[Any, list[Graphs]] = {}

    # Compiled code belongs to its process and to its functions, so it is not pickled or copied.
    def __getstate__(self) -> dict[str, Any]:
        return {"caller": self.caller, "dynamic": self.dynamic}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def linearize(
        self,
        product: Product,
        functions: tuple[Callable[..., Any], ...],
        leaves: Leaves,
        args: tuple[Any, ...],
        eager: Callable[[], Any],
    ) -> CompiledLinearization | None:
        """Linearize by captured graphs; return None, with a warning, if that failed or differed from eager."""
        arguments = Arguments((leaves, args))

        def compared() -> tuple[Leaves, Leaves]:
            generator = torch.Generator().manual_seed(0)
            vector = tuple(
                torch.randn(1, *leaf.shape, generator=generator, dtype=torch.float64, device=generator.device).to(leaf)
                for leaf in leaves
            )
            return vector, eager().products(vector)

        def capture(dependencies: Dependencies, expected: tuple[Leaves, Leaves]) -> Graphs | None:
            count = len(arguments.tensors)

            def of_tensors(constants: Leaves, tangents: Leaves) -> Sequence[Tensor]:
                point, rest = arguments.filled(constants[:count])
                with dependencies.filled(constants[count:]):
                    return product(point, tangents, rest)

            constants = (*arguments.tensors, *dependencies.tensors)
            if not self.dynamic:
                return self._capture(of_tensors, constants, *expected)
            places = _batch_places(arguments.tensors, len(leaves))
            kind = arguments.form_without(places), dependencies.form, settings(arguments.tensors)
            known = self._open.setdefault(kind, [])
            plain = tuple(each.detach() for each in constants)
            found = next((graphs for graphs in known if _serves(graphs, plain, *expected)), None)
            if found is None:
                found = self._capture(of_tensors, constants, *expected, places)
                known += [] if found is None else [found]
            return found

        return self._graphs.run(functions, arguments, compared, capture, _linearized)

    def _capture(
        self,
        product: Callable[[Leaves, Leaves], Sequence[Tensor]],
        constants: Leaves,
        vector: Leaves,
        expected: Leaves,
        places: Mapping[int, int] | None = None,
    ) -> Graphs | None:
        try:
            constants = tuple(each.detach() for each in constants)
            halves = self._halves(product, constants, tuple(v[0].clone() for v in vector), places)
            graphs = Graphs(self.caller, halves)
            residuals = graphs.residuals(constants)
            numbers = int if halves.sizes is not None else Tensor
            if not all(isinstance(each, (Tensor, numbers)) for each in residuals):
                raise CaptureError("it reads a number from a tensor; keep the number in a tensor")
            found = graphs.uncompiled(residuals, vector)
        except HodiffError:
            raise
        except Exception as error:
            # Eager products work whatever could not be traced.
            warn_of_failure(f"{self.caller}: the product", error)
            return None
        same, gap = agree(found, expected)
        if not same:
            warn_of_failure(f"{self.caller}: the product", gap)
            return None
        return graphs

    @staticmethod
    def _halves(
        product: Callable[[Leaves, Leaves], Sequence[Tensor]],
        constants: Leaves,
        tangents: Leaves,
        places: Mapping[int, int] | None,
    ) -> SplitGraph:
        if places:
            try:
                return capture(product, constants, tangents, places)
            except CaptureError:
                raise
            except Exception:
                # A trace may fail with open sizes and work with fixed ones.
                return capture(product, constants, tangents)
        return capture(product, constants, tangents)


def _batch_places(tensors: Leaves, point: int) -> dict[int, int]:
    """First dimensions after the point that equal the first batch size, as {tensor index: 0}; {} for small batches."""
    rows = next((each.shape[0] for each in tensors[point:] if each.dim()), 0)
    if rows < LEAST:
        return {}
    return {i: 0 for i, each in enumerate(tensors) if i >= point and each.dim() and each.shape[0] == rows}


def _serves(graphs: Graphs, constants: Leaves, vector: Leaves, expected: Leaves) -> bool:
    try:
        return graphs.serve(constants, vector, expected)
    except OtherBranchError:
        return False


def _linearized(graphs: Graphs, inputs: Leaves) -> CompiledLinearization:
    constants = tuple(each.detach() for each in inputs)
    return CompiledLinearization(graphs, graphs.residuals(constants), constants)
