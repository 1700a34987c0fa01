"""Products of a matrix with unit directions, which pick columns of it and need no multiplication.

A dense Hessian pulls back the unit directions of each leaf. The first operator that a direction of a weight meets is
the product with that layer's inputs, as large a product as any later one, although each factor holds a single one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hodiff.torch_internals.tensors import share_storage, version_of


class UnitRows:
    """Rows of an identity, each in the shape of a leaf; it finds where the one of each lies in a view of them.

    Args:
        rows: Tensor (k, *shape), contiguous, with nothing but a one in each row; not to be written to.
        first: Where the first row has its one; that of each further row is one place further.
    """

    def __init__(self, rows: Tensor, first: int):
        self._rows, self._first, self._version = rows, first, version_of(rows)

    def places(self, view: Tensor) -> tuple[Tensor, Tensor] | None:
        """Row and column of the one in each matrix of a batch.

        Args:
            view: Tensor (k, p, n).

        Returns:
            Two int64 tensors (k,), or None where the batch is no view of all rows as matrices or their transposes.

        Example:
            >>> rows = torch.eye(6)[2:4].view(2, 2, 3)
            >>> UnitRows(rows, 2).places(rows.mT)
            (tensor([2, 0]), tensor([0, 1]))
        """
        k, p, n = view.shape
        rows = self._rows
        same = share_storage(view, rows) and version_of(rows) == self._version
        if not same or view.storage_offset() != rows.storage_offset() or view.numel() != rows.numel() or k != len(rows):
            return None
        places = torch.arange(self._first, self._first + k, device=view.device)
        if view.stride() == (p * n, n, 1):
            return places // n, places % n
        if view.stride() == (p * n, 1, p):
            return places % p, places // p
        return None


def picked_columns(a: Tensor, rows: Tensor, columns: Tensor, width: int, *, samples_inside: bool) -> Tensor:
    """Products of one matrix with matrices that hold a single one each.

    Args:
        a: The matrix (m, p).
        rows: Where the ones are, (k,), from 0 to p - 1.
        columns: And in which column, (k,), from 0 to `width` - 1.
        width: Columns of each factor.
        samples_inside: Whether each product lies in column-major order.

    Returns:
        Tensor (k, m, width): column `rows[i]` of `a` in column `columns[i]` of product i, and zeros.

    Example:
        >>> picked_columns(torch.tensor([[1.0, 2.0]]), torch.tensor([1]), torch.tensor([0]), 3, samples_inside=False)
        tensor([[[2., 0., 0.]]])
    """
    k, m = len(rows), len(a)
    picked = a.t()[rows]
    if samples_inside:
        products = a.new_zeros(k, width, m)
        products[torch.arange(k, device=a.device), columns] = picked
        return products.transpose(1, 2)
    products = a.new_zeros(k, m, width)
    products[torch.arange(k, device=a.device), :, columns] = picked
    return products
