"""Matrices and diagonals as operators."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hodiff.common.trees import describe
from hodiff.errors import InputError
from hodiff.operators.base import LinearOperator
from hodiff.operators.spaces import Space


class DiagonalOperator(LinearOperator):
    r"""The diagonal matrix $\operatorname{diag}(d)$, for instance a preconditioner.

    Args:
        diagonal: The numbers d, as a pytree; a flat vector (n,) makes an operator on flat vectors.

    Example:
        >>> import torch
        >>> DiagonalOperator(torch.tensor([1.0, 2.0])) @ torch.ones(2)
        tensor([1., 2.])
    """

    composed = True

    def __init__(self, diagonal: Any):
        super().__init__(Space.of(diagonal), symmetric=True)
        self.diagonal = self.domain.flatten(diagonal, "DiagonalOperator")

    def multiply(self, block: Tensor) -> Tensor:
        """Each row times its number."""
        return self.diagonal[:, None] * block


class MatrixOperator(LinearOperator):
    """A dense or sparse matrix as an operator on flat vectors.

    Args:
        matrix: Tensor (m, n), real and floating-point; dense, or any layout that torch multiplies.
        symmetric: Whether the matrix is its own transpose.

    Raises:
        InputError: If it is no such matrix.

    Example:
        >>> import torch
        >>> MatrixOperator(torch.tensor([[0.0, 1.0], [2.0, 0.0]])).T @ torch.tensor([1.0, 0.0])
        tensor([0., 1.])
    """

    def __init__(self, matrix: Tensor, *, symmetric: bool = False):
        if not isinstance(matrix, Tensor) or matrix.dim() != 2 or not matrix.is_floating_point():
            raise InputError(
                f"MatrixOperator: matrix: expected a floating-point tensor (m, n), got {describe(matrix)}; "
                "reshape or convert it."
            )
        m, n = matrix.shape
        if symmetric and m != n:
            raise InputError(
                f"MatrixOperator: matrix: expected a square one, as symmetric=True, got {describe(matrix)}; "
                "drop symmetric."
            )
        spaces = (Space.flat(size, matrix.dtype, matrix.device) for size in (n, m))
        super().__init__(*spaces, symmetric=symmetric)
        self.matrix = matrix
        # Torch's products with sparse matrices lack derivatives by some routes.
        self.composed = matrix.layout is torch.strided

    def multiply(self, block: Tensor) -> Tensor:
        """The matrix product."""
        return (self.matrix @ block.to(self.matrix.dtype)).to(self.dtype)

    def multiply_transposed(self, block: Tensor) -> Tensor:
        """The product with the transposed matrix."""
        return (self.matrix.t() @ block.to(self.matrix.dtype)).to(self.dtype)
