"""The linearization of an operator at one point by compiled graphs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hodiff.common.chunks import resolve_chunk_size
from hodiff.common.trees import has_strides
from hodiff.operators.compiled.graphs import Graphs
from hodiff.operators.compiled.linear_graphs import Leaves
from hodiff.operators.data.determinism import read_and_changed
from hodiff.torch_internals.tensors import version_of

# How many vectors one compiled call multiplies, and up to how many that are left it does so: few graphs serve blocks of
# every width.
WIDTHS = ((1, 1), (8, 32), (64, 2**63))


class CompiledLinearization:
    """The residuals at a point, and the compiled graphs that make products of them; some are what the graphs read."""

    def __init__(self, graphs: Graphs, residuals: Leaves, read: Leaves):
        self._graphs = graphs
        self._residuals = residuals
        self.bytes_each = 0
        # Another function has another graph.
        self.value: Leaves = (torch.tensor(float(graphs.number)),)
        # Views share storages, each of which counts once.
        # Others are sizes, or have no memory that could be counted.
        tensors = [each for each in residuals if isinstance(each, Tensor) and has_strides(each)]
        storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
        self.nbytes = sum(storages.values())
        # Others are of the old values, and beside them a new one would make a product of neither.
        dense = (each for each in read if has_strides(each) and not each.is_inference())
        kept = (each for each in dense if each.untyped_storage().data_ptr() in storages)
        sparse = (each for each in read if not has_strides(each) and any(each is one for one in residuals))
        self._kept = [(each, version_of(each)) for each in (*kept, *sparse)]

    def products(self, tangents: Leaves) -> Leaves:
        """Products with k vectors, leaves (k, *shape)."""
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
