"""Positions of a block's numbers in the leaves: matrices (groups, p, q), rows for outputs and columns for inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
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
