"""Whether a recovered matrix is the whole derivative: its product with a random vector is the derivative's."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from hodiff.sparse.coloring import Coloring
from hodiff.sparse.coloring.layouts import FORMATS

# Any will do that does not hit an entry's multiple of another by accident; the same one each time.
_SEED = 20_09
# By how much rows may differ, as a power of machine epsilon. Substitution adds up the rounding of a tree's entries.
_POWERS = {"star": 0.75, "columns": 0.75, "rows": 0.75, "bidirectional": 0.75, "acyclic": 0.5}
# Further vectors where they differ by more; and how far the linear part of the difference must stand out. Eight
# differences of rounding alone exceed another eight by as much once in some 10^9 times.
_MORE, _BY_FAR = 8, 16
# Of these torch multiplies sparse matrices by a library, in half the time.
_FAST = (torch.float32, torch.float64)


@lru_cache(8)
def probe(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A vector of random numbers, (1, size)."""
    generator = torch.Generator().manual_seed(_SEED)
    return torch.randn(1, size, generator=generator, dtype=torch.float64).to(device, dtype)


@lru_cache(8)
def places(coloring: Coloring, device: torch.device) -> tuple[Tensor, Tensor]:
    """The rows and the columns of all entries."""
    pattern = coloring.pattern
    return torch.as_tensor(pattern.rows, device=device).long(), torch.as_tensor(pattern.columns, device=device).long()


class Off(NamedTuple):
    """Rows of a recovered matrix that are not the derivative's, as numbers.

    Attributes:
        missing: Those that lack entries.
        is_small: Whether what they lack is small beside the largest entries, as what rounding may swallow.
        coarse: Those whose entries have lost digits on their way from the products.
    """

    missing: Tensor
    is_small: bool
    coarse: Tensor


def disagreements(
    coloring: Coloring,
    side: str,
    values: Tensor,
    vector: Tensor,
    product: Tensor,
    eps: float,
    further: Callable[[Tensor], tuple[Tensor, list[Tensor]]],
) -> Off:
    r"""The rows in which a recovered matrix is not the whole derivative.

    $$ |A v - p|_i > \tau (|A| |v| + |p|)_i $$

    Where terms of the derivative cancel, rounding alone makes such a difference. It is told from an entry that is
    missing by further products: what an entry adds is linear in the vector, rounding is not.

    Args:
        coloring: The coloring, which holds the pattern.
        side: "columns" for the matrix, or "rows" for its transpose, whose rows are the matrix's columns.
        values: The entries that were recovered.
        vector: v, (n,).
        product: p, the derivative's own product with it, (m,).
        eps: Machine epsilon of the coarsest dtype at work.
        further: The derivative's products with further vectors, and the entries once more, several times, from
            products made with these that round otherwise.

    Returns:
        Their numbers; those of products that are not finite are not among them.
    """
    tolerance = eps ** _POWERS[coloring.method]
    off = (product - _product(coloring, side, values, vector, product.dtype)).abs_()
    # Where terms of A v cancel by chance, this picks too many.
    rows = (off > tolerance * product.abs()).nonzero()[:, 0]
    if len(rows):
        scale = product.abs() + _product(coloring, side, values.abs(), vector.abs(), product.dtype)
        rows = rows[off[rows] > tolerance * scale[rows]]
    if not len(rows):
        return Off(rows, True, rows)
    vectors = _vectors(len(vector), vector.dtype, vector.device)
    sums = vectors + vectors.roll(1, 0)
    products, again = further(torch.cat([vectors, sums]))
    products = products[:, rows]

    def differences(values: Tensor, vectors: Tensor, products: Tensor) -> Tensor:
        own = [_product(coloring, side, values, each, products.dtype)[rows] for each in vectors]
        return products - torch.stack(own)

    first = differences(values, vectors, products[:_MORE])
    of_sums = [differences(each, sums, products[_MORE:]) for each in (values, *again)]
    is_missing = _stands_out(first, _bent(first, of_sums))
    is_linear = _stands_out(first, _bent(first, of_sums[:1]))  # or rounding, but in the entries alone
    is_small = off[rows] <= math.sqrt(eps) * max(_largest(values), _largest(product))
    return Off(rows[is_missing], bool(is_small[is_missing].all()), rows[is_linear & ~is_missing])


def _bent(off: Tensor, off_of_sums: Sequence[Tensor]) -> Tensor:
    """By how much differences fail to be a linear function of the vector, squared: the most of several."""
    return torch.stack([(each - off - off.roll(1, 0)).square().mean(0) for each in off_of_sums]).amax(0)


def _stands_out(off: Tensor, bent: Tensor) -> Tensor:
    """Whether differences are a linear function of the vector by far."""
    # Of many rows, some show no rounding by chance: theirs may be that of others.
    bent = bent.maximum(bent.nanmedian() / 4)
    # Of rounding alone `bent` has four times the variance; what is not finite stands out.
    return ~(off.square().mean(0) <= _BY_FAR**2 / 4 * bent)


@lru_cache(8)
def _vectors(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Further vectors of random numbers."""
    generator = torch.Generator().manual_seed(_SEED + 1)
    return torch.randn(_MORE, size, generator=generator, dtype=torch.float64).to(device, dtype)


def _product(coloring: Coloring, side: str, values: Tensor, vector: Tensor, dtype: torch.dtype) -> Tensor:
    """A v."""
    if side == "columns" and values.dtype in _FAST:
        return FORMATS["csr"](coloring.pattern, values).mv(vector).to(dtype)
    rows, columns = places(coloring, values.device)[:: 1 if side == "columns" else -1]
    parts = vector.index_select(0, columns).mul_(values).to(dtype)
    return parts.new_zeros(coloring.shape[0 if side == "columns" else 1]).index_add_(0, rows, parts)


def _largest(x: Tensor) -> float:
    """The largest finite number by its size."""
    return float(x[x.isfinite()].abs().max()) if x.numel() else 0.0
