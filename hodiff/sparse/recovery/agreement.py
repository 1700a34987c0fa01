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
# By how much rows may differ: a power of machine epsilon, and no more than the last, so that in 16 bits it is mostly
# further vectors that tell. Substitution adds up the rounding of a tree's entries.
_POWERS = {"star": 0.75, "columns": 0.75, "rows": 0.75, "bidirectional": 0.75, "acyclic": 0.5}
_LOOSEST = 2.0**-11
# Further vectors where they differ by more; and how far the linear part of the difference must stand out, in 16 bits
# less. Eight differences of rounding alone exceed another eight by as much once in some 10^9 times.
_MORE, _BY_FAR, _BY_FAR_IN_16_BITS = 8, 16, 8
# How much farther for it to be told of digits that substitution lost.
_LOST = 4
# Of these torch multiplies sparse matrices by a library, in half the time.
_FAST = (torch.float32, torch.float64)


@lru_cache(8)
def probe(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A vector of random numbers, (1, size)."""
    return _random(1, size, _SEED).to(device, dtype)


def _random(count: int, size: int, seed: int) -> Tensor:
    """Numbers of either sign, none of them small, which would leave an entry unseen."""
    uniform = torch.rand(count, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) - 0.5
    return uniform.sign() + uniform


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
        unjudged: Those whose products are not finite.
        unseen: Those of them in which the matrix is.
    """

    missing: Tensor
    is_small: bool
    coarse: Tensor
    unjudged: Tensor
    unseen: Tensor

    def __bool__(self) -> bool:
        """Whether another pattern may be needed."""
        return any(len(each) for each in (self.missing, self.coarse, self.unjudged))


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
        vector: v, (n,), whose sizes further ones have, too.
        product: p, the derivative's own product with it, (m,).
        eps: Machine epsilon of the coarsest dtype at work.
        further: The derivative's products with further vectors, and the entries once more, several times, from
            products made with these that round otherwise.

    Returns:
        Their numbers.
    """
    tolerance = min(eps ** _POWERS[coloring.method], _LOOSEST)
    own = _product(coloring, side, values, vector, product.dtype)
    off = (product - own).abs_()
    # Where terms of A v cancel by chance, this picks too many.
    rows = (off > tolerance * product.abs()).nonzero()[:, 0]
    if len(rows):
        scale = product.abs() + _product(coloring, side, values.abs(), vector.abs(), product.dtype)
        is_off = off[rows] > tolerance * scale[rows]
        rows, scale = rows[is_off], scale[rows[is_off]]
    unjudged = (~product.isfinite()).nonzero()[:, 0]
    unseen = unjudged[own[unjudged].isfinite()]
    if not len(rows):
        return Off(rows, True, rows, unjudged, unseen)
    vectors = _vectors(len(vector), vector.dtype, vector.device) * vector.abs()
    sums = vectors + vectors.roll(1, 0)
    products, again = further(torch.cat([vectors, sums]))
    products = products[:, rows]

    def differences(values: Tensor, vectors: Tensor, products: Tensor) -> Tensor:
        found = [_product(coloring, side, values, each, products.dtype)[rows] for each in vectors]
        return products - torch.stack(found)

    far = _BY_FAR if eps < _LOOSEST else _BY_FAR_IN_16_BITS
    first = differences(values, vectors, products[:_MORE])
    of_sums = [differences(each, sums, products[_MORE:]) for each in (values, *again)]
    is_missing = _stands_out(first, _bent(first, of_sums), scale, far)
    # Or the difference is linear in the vector for the rounding of the entries.
    is_coarse = _stands_out(first, _bent(first, of_sums[:1]), scale, _LOST * far) & ~is_missing
    small = off[rows] <= math.sqrt(eps) * max(_largest(values), _largest(product))
    all_small = bool(small[is_missing].all())
    return Off(rows[is_missing], all_small, rows[is_coarse], unjudged, unseen)


def _bent(off: Tensor, off_of_sums: Sequence[Tensor]) -> Tensor:
    """By how much differences fail to be a linear function of the vector, squared: the most of several."""
    return torch.stack([(each - off - off.roll(1, 0)).square().mean(0) for each in off_of_sums]).amax(0)


def _stands_out(off: Tensor, bent: Tensor, scale: Tensor, far: float) -> Tensor:
    """Whether differences are a linear function of the vector by far, in rows of these sizes."""
    # Of many rows, some show no rounding by chance: theirs may be that of others, or of others of the same size.
    sizes = scale.square()
    bent = bent.maximum(bent.nanmedian().minimum((bent / sizes).nanmedian() * sizes) / 4)
    # Of rounding alone `bent` has four times the variance; what is not finite stands out.
    return ~(off.square().mean(0) <= far**2 / 4 * bent)


@lru_cache(8)
def _vectors(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Further vectors of random numbers."""
    return _random(_MORE, size, _SEED + 1).to(device, dtype)


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
