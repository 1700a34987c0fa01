"""Products of a matrix with unit directions, which pick columns of it and need no multiplication.

A dense Hessian pulls back the unit directions of each leaf. The first operator that a direction of a weight meets is
the product with that layer's inputs. This product is as large as any later one, although each factor holds a single
one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hodiff.torch_internals.tensors import share_storage, version_of


class UnitRows:
    """Rows of an identity, each in the shape of a leaf; locates the one of each row in a view of the rows.

    Args:
        rows: Tensor (k, *shape), contiguous, with a single one and zeros in each row; must not be written to.
        first: Position of the one in the first row; in each further row it is one place further.
    """

    def __init__(self, rows: Tensor, first: int):
        self._rows, self._first, self._version = rows, first, version_of(rows)

    def places(self, view: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return row and column of the one in each matrix (k, p, n); None if they are not a view of all rows."""
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
    """Multiply a matrix with matrices whose only one is at `rows[i]`, `columns[i]`: products (k, m, width)."""
    k, m = len(rows), len(a)
    picked = a.t()[rows]
    if samples_inside:
        products = a.new_zeros(k, width, m)
        products[torch.arange(k, device=a.device), columns] = picked
        return products.transpose(1, 2)
    products = a.new_zeros(k, m, width)
    products[torch.arange(k, device=a.device), :, columns] = picked
    return products
