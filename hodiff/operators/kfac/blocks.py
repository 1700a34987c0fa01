r"""Blocks $B \otimes A$ and $(Q_B \otimes Q_A) \Lambda (Q_B \otimes Q_A)^\top$, one for each group, in closed form.

A factor is a stack of symmetric matrices (groups, n, n), or of diagonals (groups, n). Vectors are matrices V,
(k, groups, p, q), on which a block acts as $B V A$.

Positions of a block's numbers in the leaves: matrices (groups, p, q), rows for outputs and columns for inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True)
class Piece:
    """One parameter's part of a block.

    Attributes:
        index: Index of the leaf of the point.
        shape: (groups, p, q), or (groups, q, p) if transposed.
        transposed: Whether the parameter has its inputs first, as the rows of an embedding.
    """

    index: int
    shape: tuple[int, int, int]
    transposed: bool = False


@dataclass(frozen=True)
class Layout:
    """Pieces joined along `dim`: -1 for a bias as the last column, -2 for the parameters of a norm."""

    pieces: tuple[Piece, ...]
    dim: int = -1

    @property
    def shape(self) -> tuple[int, int, int]:
        """The block's (groups, p, q)."""
        groups, p, q = self._sides(self.pieces[0])
        for piece in self.pieces[1:]:
            _, more, wider = self._sides(piece)
            p, q = (p, q + wider) if self.dim == -1 else (p + more, q)
        return groups, p, q

    def gather(self, leaves: Sequence[Tensor], count: int) -> Tensor:
        """Return leaves (`count`, ...) as matrices (count, groups, p, q)."""
        found = [leaves[piece.index].reshape(count, *piece.shape) for piece in self.pieces]
        found = [each.mT if piece.transposed else each for each, piece in zip(found, self.pieces, strict=True)]
        return found[0] if len(found) == 1 else torch.cat(found, self.dim)

    def scatter(self, matrices: Tensor, leaves: list[Tensor | None]) -> None:
        """Write matrices (k, groups, p, q) to their leaves, as (k, numbers)."""
        sizes = [self._sides(piece)[self.dim] for piece in self.pieces]
        for piece, part in zip(self.pieces, matrices.split(sizes, self.dim), strict=True):
            leaves[piece.index] = (part.mT if piece.transposed else part).flatten(1)

    @staticmethod
    def _sides(piece: Piece) -> tuple[int, int, int]:
        groups, rows, columns = piece.shape
        return (groups, columns, rows) if piece.transposed else piece.shape


@dataclass(frozen=True, eq=False)
class EigenBlock:
    r"""A block given by its eigenvectors and eigenvalues.

    Attributes:
        layout: The positions of the block's numbers in the leaves.
        left: $Q_B$, (groups, p, p), or None for the identity.
        right: $Q_A$, (groups, q, q), or None for the identity.
        values: The diagonal of $\Lambda$, (groups, p, q).
    """

    layout: Layout
    left: Tensor | None
    right: Tensor | None
    values: Tensor

    def to_basis(self, V: Tensor) -> Tensor:
        """Return the coordinates of a vector in the eigenvectors."""
        V = V if self.left is None else self.left.mT @ V
        return V if self.right is None else V @ self.right

    def from_basis(self, V: Tensor) -> Tensor:
        """Return the vector with given coordinates in the eigenvectors."""
        V = V if self.left is None else self.left @ V
        return V if self.right is None else V @ self.right.mT

    def multiply(self, V: Tensor) -> Tensor:
        """Compute the product of the block with V."""
        return self.from_basis(self.values * self.to_basis(V))

    def trace(self) -> Tensor:
        """The sum of the eigenvalues."""
        return self.values.sum()

    def squared_norm(self) -> Tensor:
        """The sum of the squared eigenvalues."""
        return self.values.square().sum()

    def diagonal(self) -> Tensor:
        """The diagonal of the block, (groups, p, q)."""
        rows = self.values if self.left is None else self.left.square() @ self.values
        return rows if self.right is None else rows @ self.right.square().mT

    @property
    def eigen(self) -> EigenBlock:
        """The block itself."""
        return self

    def converted(self, conversion: Callable[[Tensor], Tensor]) -> EigenBlock:
        """Return the block in another dtype, or on another device."""
        left, right = (None if each is None else conversion(each) for each in (self.left, self.right))
        return EigenBlock(self.layout, left, right, conversion(self.values))


@dataclass(frozen=True, eq=False)
class KroneckerBlock:
    """A block given by its Kronecker factors.

    Attributes:
        layout: The positions of the block's numbers in the leaves.
        A: The factor of the inputs, (groups, q, q) or (groups, q).
        B: The factor of the gradients, (groups, p, p) or (groups, p).
    """

    layout: Layout
    A: Tensor
    B: Tensor

    def multiply(self, V: Tensor) -> Tensor:
        """Compute the product of the block with V."""
        return between(*self._aligned, V)

    def trace(self) -> Tensor:
        """The product of the factors' traces."""
        return (diagonal_of(self.A).sum(-1) * diagonal_of(self.B).sum(-1)).sum()

    def squared_norm(self) -> Tensor:
        """The product of the factors' squared Frobenius norms."""
        return (self.A.square().flatten(1).sum(1) * self.B.square().flatten(1).sum(1)).sum()

    def diagonal(self) -> Tensor:
        """The diagonal of the block, (groups, p, q)."""
        return diagonal_of(self.B)[:, :, None] * diagonal_of(self.A)[:, None, :]

    @cached_property
    def _aligned(self) -> tuple[Tensor, Tensor]:
        # With few rows of V, products are as cheap as the copy.
        rows, padded = self.B.shape[1], aligned(self.B)
        return padded, aligned(self.A) if rows >= _ALIGNMENT else self.A

    @cached_property
    def spectra(self) -> tuple[tuple[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]:
        """Eigenvalues and eigenvectors of B and of A."""
        return spectrum(self.B), spectrum(self.A)

    @cached_property
    def eigen(self) -> EigenBlock:
        """The block in terms of its eigenvectors."""
        (b, left), (a, right) = self.spectra
        return EigenBlock(self.layout, left, right, b[:, :, None] * a[:, None, :])

    def inverse_by_factors(self, damping: float) -> EigenBlock:
        r"""The inverse of $(B + \sqrt\lambda/\pi I) \otimes (A + \pi \sqrt\lambda I)$."""
        (b, left), (a, right) = self.spectra
        ratio = balance(a.mean(-1, keepdim=True), b.mean(-1, keepdim=True))
        damped_b, damped_a = b + damping**0.5 / ratio, a + damping**0.5 * ratio
        return EigenBlock(self.layout, left, right, 1 / (damped_b[:, :, None] * damped_a[:, None, :]))


@dataclass(frozen=True, eq=False)
class DenseBlock:
    """A block given by its matrix.

    Attributes:
        layout: The positions of the block's numbers in the leaves; vectors are (k, 1, p, 1).
        matrix: The symmetric matrix, (p, p).
    """

    layout: Layout
    matrix: Tensor

    def multiply(self, V: Tensor) -> Tensor:
        """Compute the product of the block with V."""
        return self.matrix @ V

    def trace(self) -> Tensor:
        """The trace of the matrix."""
        return self.matrix.trace()

    def squared_norm(self) -> Tensor:
        """The squared Frobenius norm of the matrix."""
        return self.matrix.square().sum()

    def diagonal(self) -> Tensor:
        """The diagonal of the block, (1, p, 1)."""
        return self.matrix.diagonal()[None, :, None]

    @cached_property
    def eigen(self) -> EigenBlock:
        """The block in terms of its eigenvectors."""
        values, vectors = symmetric_eigen(self.matrix)
        return EigenBlock(self.layout, vectors[None], None, values[None, :, None])


Block = KroneckerBlock | EigenBlock | DenseBlock


# BLAS is fast if rows are padded to multiples of the first number; a copy pays from the second size on.
_ALIGNMENT, _WORTH = 16, 64


def aligned(factor: Tensor) -> Tensor:
    """Pad a stack of matrices with zeros: rows of 785, for 784 inputs and a bias, cost a third more."""
    n = factor.shape[-1]
    padding = -n % _ALIGNMENT if factor.dim() == 3 and n >= _WORTH else 0
    return F.pad(factor, (0, padding, 0, padding)) if padding else factor


def between(B: Tensor, A: Tensor, V: Tensor) -> Tensor:
    """Compute the product $B V A$ of matrices (k, groups, p, q) with factors that may be padded."""
    p, q = V.shape[-2:]
    padding = 0, A.shape[-1] - q, 0, B.shape[-1] - p
    if any(padding):
        V = F.pad(V, padding)
    V = B @ V if B.dim() == 3 else B[:, :, None] * V
    V = V @ A if A.dim() == 3 else V * A[:, None, :]
    return V[..., :p, :q]


def balance(a: Tensor, b: Tensor) -> Tensor:
    r"""Return $\pi$, the root of the ratio of mean eigenvalues, to damp both factors equally; 1 for a zero factor."""
    ratio = (a / b).sqrt()
    return torch.where(ratio.isfinite() & (ratio > 0), ratio, torch.ones_like(ratio))


def diagonal_of(factor: Tensor) -> Tensor:
    """Return the diagonals of a factor, (groups, n)."""
    return factor if factor.dim() == 2 else factor.diagonal(dim1=-2, dim2=-1)


def spectrum(factor: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return eigenvalues (groups, n), with negative rounding errors set to 0, and eigenvectors (None if diagonal)."""
    if factor.dim() == 2:
        return factor, None
    values, vectors = symmetric_eigen(factor)
    return values.clamp(min=0), vectors


def symmetric_eigen(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Compute eigenvalues and eigenvectors, also if `torch.linalg.eigh` fails to converge on finite numbers."""
    try:
        return torch.linalg.eigh(matrix)
    except torch.linalg.LinAlgError:
        if not bool(matrix.isfinite().all()):
            raise
    # The algorithm on a GPU or in 32 bits differs from that on the CPU in 64 bits, and NumPy has its own.
    precise = matrix.cpu().double()
    try:
        values, vectors = torch.linalg.eigh(precise)
    except torch.linalg.LinAlgError:
        values, vectors = map(torch.from_numpy, np.linalg.eigh(precise.numpy()))
    return values.to(matrix), vectors.to(matrix)
