"""Recovery of all entries of a matrix from products, and comparison with the derivative."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial, reduce

import torch
from torch import Tensor

from hodiff.errors import HodiffWarning, InputError, levels_to_the_caller
from hodiff.sparse.coloring import Coloring
from hodiff.sparse.recovery.agreement import Off, disagreements, places, probe
from hodiff.sparse.recovery.compressed_products import Multiply

# Scaling of vectors for products that round differently: one of these factors, and a small change of each number.
_FACTORS = (0.7, 1.1, 1.7)
_MOVED = 2.0**-10


def recover(
    coloring: Coloring, multiply: Mapping[str, Multiply], leaves: Sequence[Tensor], eps: float | None
) -> tuple[Tensor, Off | None]:
    """Recover the entries, in the order of compressed rows; with `eps` also the rows, or columns, that were off."""
    dtype, device = reduce(torch.promote_types, (leaf.dtype for leaf in leaves)), leaves[0].device
    probed = coloring.sides[0]
    if eps is None or probed == "rows":
        products = {side: multiply[side](coloring.vectors(side, dtype, device)) for side in coloring.sides}
        values = coloring.entries(products)
        if eps is None:
            return values, None
        vector = _evened(coloring, values.detach()) * probe(coloring.shape[0], dtype, device)[0]
        return values, compare(coloring, multiply, values, vector, multiply[probed](vector[None])[0], eps)
    # Compute the additional product together with the other products of its side.
    products = {}
    for side in coloring.sides:
        chosen = _with_probe if side == probed else Coloring.vectors
        products[side] = multiply[side](chosen(coloring, side, dtype, device))
    own = products[probed][-1]
    values = coloring.entries(products | {probed: products[probed][:-1]})
    vector = probe(coloring.shape[1], dtype, device)[0]
    return values, compare(coloring, multiply, values, vector, own, eps)


def _evened(coloring: Coloring, values: Tensor) -> Tensor:
    """Weights that give all rows the same size: a large row would hide a missing entry of a small row."""
    rows, _ = places(coloring, values.device)
    sizes = values.new_zeros(coloring.shape[0]).scatter_reduce(0, rows, values.abs().nan_to_num(0, 0, 0), "amax")
    smallest = sizes[sizes > 0].amin() if bool((sizes > 0).any()) else 1
    # Powers of two scale without rounding.
    return torch.exp2(-sizes.where(sizes > 0, smallest).log2().round())


def compare(
    coloring: Coloring, multiply: Mapping[str, Multiply], values: Tensor, vector: Tensor, product: Tensor, eps: float
) -> Off:
    """Compare the product of a recovered matrix with a vector to the derivative's own; without a graph."""
    probed = coloring.sides[0]
    with torch.no_grad():
        further = partial(_further, coloring, multiply, probed)
        return disagreements(coloring, probed, values.detach(), vector, product.detach(), eps, further)


def _further(
    coloring: Coloring, multiply: Mapping[str, Multiply], probed: str, vectors: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Products with vectors, and entries recovered from D A E, for diagonal D and E, which round differently."""
    dtype, device = vectors.dtype, vectors.device
    # Scales are not quite proportional, so that entries outside of the pattern, which are added to others, do not scale
    # with them. D equals E where A is symmetric, because D A E must be symmetric, too.
    scales = [
        {size: factor * (1 + _MOVED * probe(size, dtype, device)[0].sin()) for size in coloring.shape}
        for factor in _FACTORS
    ]
    nothing = {side: vectors.new_zeros(0, coloring.shape[0 if side == "columns" else 1]) for side in coloring.sides}
    products = [dict(nothing) for _ in scales]
    for side in coloring.sides:
        into, out = coloring.shape[:: -1 if side == "columns" else 1]
        seeds = coloring.vectors(side, dtype, device)
        if not len(seeds) and side != probed:
            continue
        # Compute all products at once, because each number may round differently in a separate call.
        given = [vectors if side == probed else seeds[:0], *(seeds * each[into] for each in scales)]
        first, *found = multiply[side](torch.cat(given)).detach().split([len(each) for each in given])
        if side == probed:
            own = first
        for into_products, each, scale in zip(products, found, scales, strict=True):
            into_products[side] = each * scale[out]
    rows, columns = places(coloring, device)
    height, width = coloring.shape
    return own, [
        coloring.entries(each) / (scale[height][rows] * scale[width][columns])
        for each, scale in zip(products, scales, strict=True)
    ]


@lru_cache(8)
def _with_probe(coloring: Coloring, side: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Vectors of a coloring, followed by a random vector."""
    vectors = coloring.vectors(side, dtype, device)
    return torch.cat([vectors, probe(vectors.shape[1], dtype, device)])


def require_whole(caller: str, argument: str, coloring: Coloring, off: Off | None) -> None:
    """Raise an error if the given or found pattern lacks entries; warn of lost digits."""
    if off is None:
        return
    missing, coarse = _named(coloring, off.missing), _named(coloring, off.coarse)
    if len(off.coarse) and coloring.method == "acyclic":
        doubt = "" if argument == "f" else ", or the pattern lacks entries there"
        warnings.warn(
            f"{caller}: method: substitution lost digits of entries in {coarse}, such as next to much larger "
            f"entries{doubt}; method='star' keeps them.",
            HodiffWarning,
            stacklevel=2,
        )
    if len(off.unseen):
        warnings.warn(
            f"{caller}: {argument}: products are not finite in {_named(coloring, off.unseen)}, where the matrix is: "
            "the pattern may miss entries there, or f masks numbers that are not finite, such as by torch.where.",
            HodiffWarning,
            stacklevel=2,
        )
    if not len(off.missing):
        return
    if argument == "f" and off.is_small:  # every operator was followed
        warnings.warn(
            f"{caller}: f: its derivative loses digits, according to products with random vectors: small entries in "
            f"{missing}, may be wrong; use a higher precision, or avoid differences of large numbers.",
            HodiffWarning,
            stacklevel=2,
        )
        return
    if argument == "f":
        what = f"derivatives within the pattern that was found, got further entries in {missing}"
        remedy = (
            "Make sure that f is the same function in each call and its derivatives are right, as hodiff.check shows; "
            "pattern= takes one by hand"
        )
    else:
        what = f"a pattern with all entries of the derivative, got one without some in {missing}"
        remedy = "Detect the pattern by hessian_pattern or jacobian_pattern"
    if caller.startswith("sparse."):  # minimisers and solvers have no such option
        remedy += "; check=False skips the comparison"
    raise InputError(f"{caller}: {argument}: expected {what}, according to products with random vectors. {remedy}.")


def warn_of_infinite(caller: str, coloring: Coloring, off: Off | None) -> None:
    """Warn of rows that could not be compared, because the matrix is not finite there."""
    if off is None:
        return
    # `require_whole` warns of the rest.
    unjudged = off.unjudged[~torch.isin(off.unjudged, off.unseen)]
    if len(unjudged):
        warnings.warn(
            f"{caller}: x: products are not finite in {_named(coloring, unjudged)}, which cannot be compared: finite "
            "entries there may be NaN, as 0 times infinity is, and missing ones are not noticed; pass another point.",
            HodiffWarning,
            stacklevel=levels_to_the_caller(),
        )
    if len(off.reached):
        warnings.warn(
            f"{caller}: x: expected a point where the derivative is finite, got one where it is not, which makes "
            f"finite entries NaN in {_named(coloring, off.reached)}; pass another point.",
            HodiffWarning,
            stacklevel=levels_to_the_caller(),
        )


def _named(coloring: Coloring, numbers: Tensor) -> str:
    shown = ", ".join(str(int(number)) for number in numbers[:3])
    return f"{len(numbers):,} {'row' if coloring.sides[0] == 'columns' else 'column'}(s), such as {shown}"
