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
