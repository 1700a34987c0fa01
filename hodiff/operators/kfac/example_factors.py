"""Base class of operators whose Kronecker factors are moments of the examples' gradients."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from hodiff.operators.data.batches import Size
from hodiff.operators.kfac import moments
from hodiff.operators.kfac.kfac import KFACOperator
from hodiff.operators.kfac.layers import Source

# The factors B and A of each block; None for the identity.
Pairs = Mapping[Source, tuple[Tensor | None, Tensor | None]]


class ExampleFactors(KFACOperator):
    """A Kronecker-factored operator that computes its factors in passes over the data."""

    evaluates_once = False

    def _second_moments(self, pairs: Pairs) -> dict[Source, tuple[Tensor, Tensor]]:
        r"""Compute $\sum_n G_n A G_n^\top$ and $\sum_n G_n^\top B G_n$ for each block, in one pass over the data."""
        sums = {source: self._empty(source) for source in pairs}
        sizes = Size()
        for batch, recorded in self._recorded_batches():
            kept = {source: self._inputs(source, recorded) for source in pairs}
            for _, found in self._pulled(batch, recorded):
                for source, g in found.items():
                    parts = moments.of_products(source, kept[source], g, *pairs[source])
                    for total, part in zip(sums[source], parts, strict=True):
                        total.add_(part, alpha=batch.size.weight)
            sizes += batch.size
        totals = [total for both in sums.values() for total in both]
        self._joint.sum_(totals)
        scale = self._scale(self._joint.sizes(sizes))
        for total in totals:
            total.mul_(scale)
        return sums

    def _empty(self, source: Source) -> tuple[Tensor, Tensor]:
        """Return zeros of the shapes of B and A."""
        groups, _, q = source.layout.shape
        left = self._zeros(source)
        return left, left.new_zeros((groups, q) if source.diagonal or source.one_hot else (groups, q, q))

    def _by_example(self, source: Source) -> bool:
        return True
