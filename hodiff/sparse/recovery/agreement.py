"""Whether a recovered matrix is the whole derivative: its product with a random vector is the derivative's."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from hodiff.sparse.coloring import Coloring
from hodiff.sparse.coloring.layouts import FORMATS

# Any will do that does not hit an entry's multiple of another by accident; the same one each time.
_SEED = 20_09
# Of these torch multiplies sparse matrices by a library, in half the time.
_FAST = (torch.float32, torch.float64)


@lru_cache(8)
def probe(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A vector of random numbers, (1, size)."""
    generator = torch.Generator().manual_seed(_SEED)
    return torch.randn(1, size, generator=generator, dtype=torch.float64).to(device, dtype)


@lru_cache(8)
def _places(coloring: Coloring, device: torch.device) -> tuple[Tensor, Tensor]:
    pattern = coloring.pattern
    return torch.as_tensor(pattern.rows, device=device).long(), torch.as_tensor(pattern.columns, device=device).long()


def disagreements(coloring: Coloring, side: str, values: Tensor, vector: Tensor, product: Tensor, eps: float) -> Tensor:
    r"""The rows in which the product of a recovered matrix is not that of the derivative.

    $$ |A v - p|_i > \sqrt{\epsilon} \max_{jk} (|A_{jk}|, |p_j|) $$

    Args:
        coloring: The coloring, which holds the pattern.
        side: "columns" for the matrix, or "rows" for its transpose, whose rows are the matrix's columns.
        values: The entries that were recovered.
        vector: v, (n,).
        product: p, the derivative's own product with it, (m,).
        eps: ε, that of the coarsest dtype at work.

    Returns:
        Their numbers; those of products that are not finite are not among them.
    """
    off = _difference(coloring, side, values, vector, product).abs_()
    most = max(_largest(values), _largest(product))
    return (off > math.sqrt(eps) * most).nonzero()[:, 0]


def _difference(coloring: Coloring, side: str, values: Tensor, vector: Tensor, product: Tensor) -> Tensor:
    """By how much the products differ, p - A v."""
    if side == "columns" and values.dtype in _FAST:
        return product - FORMATS["csr"](coloring.pattern, values).mv(vector).to(product.dtype)
    rows, columns = _places(coloring, values.device)[:: 1 if side == "columns" else -1]
    parts = vector.index_select(0, columns).mul_(values).to(product.dtype)
    return product.index_add(0, rows, parts, alpha=-1)


def _largest(x: Tensor) -> float:
    """The largest finite number by its size."""
    if not x.numel():
        return 0.0
    low, high = (float(each) for each in x.aminmax())
    if not math.isfinite(low + high):
        return _largest(x[x.isfinite()])
    return max(-low, high)
