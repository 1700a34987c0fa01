"""All entries of a matrix from its products, and whether these are the whole of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from hodiff.errors import InputError
from hodiff.sparse.coloring import Coloring
from hodiff.sparse.recovery.agreement import disagreements, probe
from hodiff.sparse.recovery.products import Multiply


def recover(
    coloring: Coloring, multiply: Mapping[str, Multiply], leaves: Sequence[Tensor], eps: float | None
) -> tuple[Tensor, Tensor]:
    """The values of the entries, and where the matrix is not the whole derivative.

    Args:
        coloring: The coloring.
        multiply: By side, "columns" or "rows", what multiplies the rows of a tensor with the matrix or its transpose.
        leaves: What is differentiated, which gives the dtype and the device.
        eps: Machine epsilon of the coarsest dtype at work, by which one product more is compared; None for none.

    Returns:
        Tensor (entries,), in the order of compressed rows, and the numbers of the rows, or columns, that lack entries.
    """
    dtype, device = _promoted(leaves), leaves[0].device
    # The one product more goes with the others, of the kind that there is anyhow.
    probed = coloring.sides[0]
    products = {}
    for side in coloring.sides:
        chosen = _with_probe if eps is not None and side == probed else Coloring.vectors
        products[side] = multiply[side](chosen(coloring, side, dtype, device))
    if eps is None:
        return coloring.entries(products), leaves[0].new_empty(0)
    own = products[probed][-1]
    values = coloring.entries(products | {probed: products[probed][:-1]})
    with torch.no_grad():
        vector = probe(coloring.shape[1 if probed == "columns" else 0], dtype, device)[0]
        return values, disagreements(coloring, probed, values.detach(), vector, own.detach(), eps)


@lru_cache(8)
def _with_probe(coloring: Coloring, side: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The vectors of a coloring, and after them a random one."""
    vectors = coloring.vectors(side, dtype, device)
    return torch.cat([vectors, probe(vectors.shape[1], dtype, device)])


def require_whole(caller: str, argument: str, coloring: Coloring, off: Tensor) -> None:
    """Refuse a pattern that lacks entries, in the rows, or columns, with these numbers."""
    if not len(off):
        return
    shown = ", ".join(str(int(number)) for number in off[:3])
    where = "row" if coloring.sides[0] == "columns" else "column"
    raise InputError(
        f"{caller}: {argument}: expected a pattern with all entries of the derivative, got one without some in "
        f"{len(off):,} {where}(s), such as {shown}, as a product with a random vector shows. Let the pattern be found, "
        f"by hessian_pattern or jacobian_pattern; where the function is not smooth or rounds coarsely, check=False "
        f"leaves the comparison out."
    )


def _promoted(leaves: Sequence[Tensor]) -> torch.dtype:
    dtype = leaves[0].dtype
    for leaf in leaves[1:]:
        dtype = torch.promote_types(dtype, leaf.dtype)
    return dtype
