"""Comparison of a recovered matrix with the derivative, by their products with a random vector."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from hodiff.sparse.coloring import Coloring
from hodiff.sparse.coloring.compressed_patterns import FORMATS
from hodiff.sparse.coloring.entries import substituted_sizes
from hodiff.sparse.coloring.substitution import Substitution

# Any seed works for which no entry is a multiple of another by accident. It is fixed, so that results repeat.
_SEED = 20_09
# Tolerance of rows: a power of machine epsilon, at most `_LOOSEST`, so that in 16 bits mostly further vectors decide.
_POWER, _LOOSEST = 0.75, 2.0**-11
# Substitution adds up the rounding errors of a tree's entries. Its rows are compared with these errors, but no row may
# differ by more than the square root of machine epsilon; digits that are lost beyond it are reported.
_POWER_OF_LOST_DIGITS = 0.5
# Number of further vectors for rows that differ by more, and the factor by which the linear part of the difference must
# exceed the rest; it is smaller in 16 bits. Eight differences of rounding alone exceed another eight by this factor
# once in some 10^9 times.
_MORE, _BY_FAR, _BY_FAR_IN_16_BITS = 8, 16, 8
# Additional factor for reporting digits that substitution lost.
_LOST = 4
# For these dtypes torch multiplies sparse matrices by a library, in half the time.
_FAST = (torch.float32, torch.float64)


@lru_cache(8)
def probe(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A vector of random numbers, (1, size)."""
    return _random(1, size, _SEED).to(device, dtype)


def _random(count: int, size: int, seed: int) -> Tensor:
    """Random numbers of either sign; none is small, because a small number could hide an entry."""
    uniform = (
        torch.rand(count, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64, device="cpu") - 0.5
    )
    return uniform.sign() + uniform


@lru_cache(8)
def places(coloring: Coloring, device: torch.device) -> tuple[Tensor, Tensor]:
    """The rows and the columns of all entries."""
    pattern = coloring.pattern
    return torch.as_tensor(pattern.rows, device=device).long(), torch.as_tensor(pattern.columns, device=device).long()


class Off(NamedTuple):
    """Rows, by number, in which a recovered matrix differs from the derivative.

    Attributes:
        missing: Rows that lack entries.
        is_small: Whether the missing parts are so small beside the largest entries that rounding may cause them.
        coarse: Rows whose entries lost digits in the recovery from products.
        unjudged: Rows whose products are not finite.
        unseen: Rows whose products are not finite, although the matrix is.
        reached: Rows whose products are finite, although the matrix is not: recovery from sums of entries carries
            infinite numbers into them.
    """

    missing: Tensor
    is_small: bool
    coarse: Tensor
    unjudged: Tensor
    unseen: Tensor
    reached: Tensor

    def __bool__(self) -> bool:
        """Whether another pattern may be needed."""
        return any(len(each) for each in (self.missing, self.coarse, self.unjudged, self.reached))


def disagreements(
    coloring: Coloring,
    side: str,
    values: Tensor,
    vector: Tensor,
    product: Tensor,
    eps: float,
    further: Callable[[Tensor], tuple[Tensor, list[Tensor]]],
) -> Off:
    r"""Find the rows in which a recovered matrix is not the whole derivative.

    $$ |A v - p|_i > \tau (|A| |v| + |p|)_i $$

    For substitution, |A| has instead the sizes of all entries from which an entry was computed.

    Where terms of the derivative cancel, rounding alone makes such a difference. Further products distinguish
    it from a missing entry: the contribution of an entry is linear in the vector, rounding is not.

    Args:
        coloring: The coloring, which holds the pattern.
        side: "columns" for the matrix, or "rows" for its transpose, whose rows are the matrix's columns.
        values: The entries that were recovered.
        vector: v, (n,); further vectors have the same magnitudes.
        product: p, the derivative's own product with v, (m,).
        eps: Machine epsilon of the coarsest dtype in use.
        further: Returns the derivative's products with further vectors, and several recoveries of the entries, from
            products that round differently.

    Returns:
        The rows.
    """
    tolerance, loose = (min(eps**power, _LOOSEST) for power in (_POWER, _POWER_OF_LOST_DIGITS))
    own = _product(coloring, side, values, vector, product.dtype)
    off = (product - own).abs_()
    # This picks too many rows where terms of A v cancel by chance.
    rows = (off > product.abs().mul_(tolerance)).nonzero()[:, 0]
    if len(rows):
        scale = product[rows].abs() + _product_of_sizes(coloring, side, values, vector, rows, product.dtype)
        is_off = off[rows] > tolerance * scale
        rows, scale = rows[is_off], scale[is_off]
    if len(rows) and coloring.method == "acyclic":
        sizes = _product_of_sizes(coloring, side, _sizes(coloring, values.device)(values), vector, rows, product.dtype)
        is_off = off[rows] > (tolerance * (product[rows].abs() + sizes)).minimum(loose * scale)
        rows, scale = rows[is_off], scale[is_off]
    unjudged = reached = rows[:0]
    if not math.isfinite(float(off.sum())):  # one pass; the sum is finite if all products are, unless it overflows
        is_finite = product.isfinite()
        unjudged = (~is_finite).nonzero()[:, 0]
        infinite = places(coloring, values.device)[0 if side == "columns" else 1][~values.isfinite()].unique()
        reached = infinite[is_finite[infinite]]
    unseen = unjudged[own[unjudged].isfinite()]
    if not len(rows):
        return Off(rows, True, rows, unjudged, unseen, reached)
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
    # Otherwise the rounding of the entries may make the difference linear in the vector.
    is_coarse = _stands_out(first, _bent(first, of_sums[:1]), scale, _LOST * far) & ~is_missing
    if coloring.method == "acyclic":
        is_coarse &= ~(off[rows] <= loose * scale)
    small = off[rows] <= math.sqrt(eps) * max(_largest(values), _largest(product))
    all_small = bool(small[is_missing].all())
    return Off(rows[is_missing], all_small, rows[is_coarse], unjudged, unseen, reached)


def _bent(off: Tensor, off_of_sums: Sequence[Tensor]) -> Tensor:
    """Mean squared deviation of differences from a linear function of the vector; the largest of several."""
    return torch.stack([(each - off - off.roll(1, 0)).square().mean(0) for each in off_of_sums]).amax(0)


def _stands_out(off: Tensor, bent: Tensor, scale: Tensor, far: float) -> Tensor:
    """Whether the linear part of differences far exceeds the deviation from it, in rows of these sizes."""
    # Some of many rows show no rounding by chance. Use at least a fraction of the median over rows, also relative to
    # size.
    sizes = scale.square()
    bent = bent.maximum(bent.nanmedian().minimum((bent / sizes).nanmedian() * sizes) / 4)
    # With rounding alone `bent` has four times the variance. Numbers that are not finite stand out.
    return ~(off.square().mean(0) <= far**2 / 4 * bent)


@lru_cache(8)
def _sizes(coloring: Coloring, device: torch.device) -> Callable[[Tensor], Tensor]:
    assert isinstance(coloring.plan, Substitution)
    return substituted_sizes(coloring.plan, device)


@lru_cache(8)
def _vectors(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return _random(_MORE, size, _SEED + 1).to(device, dtype)


def _product(coloring: Coloring, side: str, values: Tensor, vector: Tensor, dtype: torch.dtype) -> Tensor:
    """Product of the recovered matrix, or of its transpose, with a vector."""
    if side == "columns" and values.dtype in _FAST:
        return FORMATS["csr"](coloring.pattern, values).mv(vector).to(dtype)
    rows, columns = places(coloring, values.device)[:: 1 if side == "columns" else -1]
    parts = vector.index_select(0, columns).mul_(values).to(dtype)
    return parts.new_zeros(coloring.shape[0 if side == "columns" else 1]).index_add_(0, rows, parts)


def _product_of_sizes(
    coloring: Coloring, side: str, values: Tensor, vector: Tensor, rows: Tensor, dtype: torch.dtype
) -> Tensor:
    """Some rows of the product of absolute values, |A| |v|; usually few."""
    if side != "columns":
        return _product(coloring, side, values.abs(), vector.abs(), dtype)[rows]
    starts = torch.as_tensor(coloring.pattern.starts, device=rows.device)
    ends = starts[rows + 1].long()
    counts = ends - starts[rows]
    row = torch.repeat_interleave(counts)
    entries = torch.arange(len(row), device=rows.device) + (ends - counts.cumsum(0))[row]
    parts = (values[entries] * vector[places(coloring, rows.device)[1][entries]]).abs_().to(dtype)
    return parts.new_zeros(len(rows)).index_add_(0, row, parts)


def _largest(x: Tensor) -> float:
    """Largest absolute value among the finite numbers; 0 for an empty tensor."""
    return float(x[x.isfinite()].abs().max()) if x.numel() else 0.0
