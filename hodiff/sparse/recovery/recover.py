"""All entries of a matrix from its products, and whether these are the whole of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from hodiff.errors import InputError
from hodiff.sparse.coloring import Coloring
from hodiff.sparse.recovery.agreement import disagreeing_rows, probe
from hodiff.sparse.recovery.products import Multiply


def recover(
    coloring: Coloring, multiply: Mapping[str, Multiply], leaves: Sequence[Tensor], *, check: bool
) -> tuple[Tensor, Tensor]:
    """The values of the entries, and the rows in which the matrix is not the whole derivative.

    Args:
        coloring: The coloring.
        multiply: By side, "columns" or "rows", what multiplies the rows of a tensor with the matrix or its transpose.
        leaves: What is differentiated, which gives the dtype and the device.
        check: Whether one more product is made, for the second result.

    Returns:
        Tensor (entries,), in the order of compressed rows, and the numbers of the rows.
    """
    dtype, device = _promoted(leaves), leaves[0].device
    products, off = {}, leaves[0].new_empty(0)
    for side in coloring.sides:
        # The one product more goes with the others where that can be.
        chosen = _with_probe if check and side == "columns" else Coloring.vectors
        products[side] = multiply[side](chosen(coloring, side, dtype, device))
    if check:
        vector = probe(coloring.shape[1], dtype, device)
        own = products["columns"][-1] if "columns" in products else multiply["columns"](vector)[0]
        products |= {side: each[:-1] for side, each in products.items() if side == "columns"}
    values = coloring.entries(products)
    if check:
        with torch.no_grad():
            off = disagreeing_rows(coloring, values.detach(), vector[0], own.detach())
    return values, off


@lru_cache(8)
def _with_probe(coloring: Coloring, side: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The vectors of a coloring, and after them a random one."""
    vectors = coloring.vectors(side, dtype, device)
    return torch.cat([vectors, probe(vectors.shape[1], dtype, device)])


def require_whole(caller: str, argument: str, rows: Tensor) -> None:
    """Refuse a pattern that lacks entries, in rows with these numbers."""
    if not len(rows):
        return
    shown = ", ".join(str(int(row)) for row in rows[:3])
    raise InputError(
        f"{caller}: {argument}: expected a pattern with all entries of the derivative, got one without some in "
        f"{len(rows):,} row(s), such as {shown}, as a product with a random vector shows. Let the pattern be found, by "
        f"hessian_pattern or jacobian_pattern; where the function is not smooth or rounds coarsely, check=False leaves "
        f"the comparison out."
    )


def _promoted(leaves: Sequence[Tensor]) -> torch.dtype:
    dtype = leaves[0].dtype
    for leaf in leaves[1:]:
        dtype = torch.promote_types(dtype, leaf.dtype)
    return dtype
