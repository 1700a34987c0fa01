r"""Determinants of matrices that may be singular, by formulas without division by vanishing terms."""

from __future__ import annotations

import torch
from torch import Tensor

from hodiff.torch_internals.autograd.wrapped_tensors import below_transforms

# Largest matrix size to eliminate. By solves, a determinant's k-th derivative loses 1 / distance to the power k - 1:
# at the distance below, the third derivative is still good.
_LARGEST = 64


def is_nearly_singular(pair: Tensor) -> bool:
    """Whether any matrix of a batch (L and U in one) is too singular for solves, and small enough to eliminate."""
    # A compiler sees no values: its solves give a determinant that is inaccurate or not finite.
    if torch.compiler.is_compiling() or pair.shape[-1] > _LARGEST or pair.device.type == "meta":
        return False
    pivots = below_transforms(pair).detach().diagonal(dim1=-2, dim2=-1).abs()
    smallest, largest = torch.aminmax(pivots, dim=-1)
    return bool((smallest <= torch.finfo(pair.dtype).eps ** (1 / 3) * largest).any())


def determinant_of_few(matrix: Tensor) -> Tensor:
    """Determinant of matrices (..., n, n) with up to three rows, as a polynomial."""
    rows = [row.unbind(-1) for row in matrix.unbind(-2)]
    return _expanded(rows) if rows else matrix.new_ones(matrix.shape[:-2])


def _expanded(rows: list[tuple[Tensor, ...]]) -> Tensor:
    """Laplace's expansion along the first row."""
    first, *others = rows
    if not others:
        return first[0]
    terms = [each * _expanded([row[:j] + row[j + 1 :] for row in others]) for j, each in enumerate(first)]
    total = terms[0]
    for j, term in enumerate(terms[1:], 1):
        total = total - term if j % 2 else total + term
    return total


def determinant_by_elimination(matrix: Tensor) -> Tensor:
    """Determinant of matrices (..., n, n), by complete pivoting down to four rows, which are expanded."""
    # Where a pivot is 0, the matrix has lost five ranks or more, and derivatives below the fifth are 0. The quotients
    # do not matter there, as long as they are finite.
    result = None
    while matrix.shape[-1] > 4:
        matrix, sign = _largest_first(matrix)
        pivot = matrix[..., 0, 0]
        divisor = pivot.where(pivot != 0, 1)[..., None, None]
        matrix = matrix[..., 1:, 1:] - matrix[..., 1:, :1] * (matrix[..., :1, 1:] / divisor)
        result = sign * pivot if result is None else sign * result * pivot
    rest = _expanded([row.unbind(-1) for row in matrix.unbind(-2)])
    return rest if result is None else result * rest


def _largest_first(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Move the largest element to the corner, and return the matrix with the sign change of the determinant."""
    n = matrix.shape[-1]
    place = matrix.detach().abs().flatten(-2).argmax(-1, keepdim=True)
    row, column = place // n, place % n
    matrix = matrix.take_along_dim(_swap(n, row)[..., :, None], -2).take_along_dim(_swap(n, column)[..., None, :], -1)
    return matrix, (1 - 2 * ((row != 0) ^ (column != 0)).to(matrix.dtype)).squeeze(-1)


def _swap(n: int, place: Tensor) -> Tensor:
    """Return the permutation of n places that swaps the first with another."""
    places = torch.arange(n, device=place.device)
    return torch.where(places == 0, place, torch.where(places == place, 0, places))
