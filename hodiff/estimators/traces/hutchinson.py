"""Means over random vectors: trace (Girard; Hutchinson), diagonal (Bekas et al.), squared Frobenius norm."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from hodiff.common.chunks import resolve_chunk_size, spans
from hodiff.estimators.precision import precise
from hodiff.estimators.probes import draw
from hodiff.estimators.results import mean_and_error
from hodiff.estimators.view import View


def probed(view: View, count: int, kind: str, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """Iterate over groups of test vectors with their products, `count` columns in all."""
    size = resolve_chunk_size(view.chunk_size, count, sum(view.shape) * view.dtype.itemsize, view.device)
    for start, stop in spans(count, size):
        probes = draw(view, kind, stop - start, generator)
        yield probes, view.matmat(probes)


def trace(view: View, count: int, kind: str, generator: torch.Generator) -> tuple[float, float]:
    r"""Compute the mean of $z^T A z$ and its standard error."""
    return _mean(view, count, kind, generator, lambda z, product: z * product)


def squared_norm(view: View, count: int, kind: str, generator: torch.Generator) -> tuple[float, float]:
    r"""Compute the mean of $\|A z\|^2$ and its standard error."""
    return _mean(view, count, kind, generator, lambda z, product: product.square())


def _mean(
    view: View, count: int, kind: str, generator: torch.Generator, terms: Callable[[Tensor, Tensor], Tensor]
) -> tuple[float, float]:
    groups = [terms(precise(z), precise(product)).sum(0) for z, product in probed(view, count, kind, generator)]
    return mean_and_error(torch.cat(groups))


def diagonal(view: View, count: int, kind: str, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    r"""Compute the ratio $\sum z \circ A z / \sum z \circ z$ of each entry, and its standard error to first order."""
    sums = torch.zeros(5, view.n, dtype=precise(torch.empty(0, device=view.device)).dtype, device=view.device)
    for z, product in probed(view, count, kind, generator):
        z, product = precise(z), precise(product)
        square, cross = z * z, z * product
        for total, term in zip(sums, (square, cross, square**2, cross * square, cross**2), strict=True):
            total += term.sum(1)
    weight, cross, square_square, cross_square, cross_cross = sums
    value = cross / weight
    spread = (cross_cross - 2 * value * cross_square + value**2 * square_square).clamp(min=0)
    return value, (spread * count / (count - 1)).sqrt() / weight
