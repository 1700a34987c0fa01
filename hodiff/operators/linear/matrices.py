"""Matrices and diagonals as operators."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from scipy.sparse import csr_array, issparse
from torch import Tensor

from hodiff.common.options import require_bool
from hodiff.common.trees import describe
from hodiff.errors import InputError
from hodiff.operators.linear.conversion import Conversion
from hodiff.operators.linear.linear_operator import LinearOperator
from hodiff.operators.linear.spaces import Space


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
        self.entries = self.domain.flatten(diagonal, "DiagonalOperator")

    def multiply(self, block: Tensor) -> Tensor:
        """Multiply each row by its diagonal entry."""
        return self.entries[:, None] * block

    def converted(self, conversion: Conversion) -> DiagonalOperator:
        """See `LinearOperator.to`."""
        return DiagonalOperator(conversion.tree(self.domain.unflatten(self.entries)))


class MatrixOperator(LinearOperator):
    """A dense or sparse matrix as an operator on flat vectors.

    Args:
        matrix: Tensor (m, n), real and floating-point; dense, or any layout that torch multiplies. NumPy arrays are
            used without a copy, and sparse matrices of SciPy are converted to COO tensors.
        symmetric: Whether the matrix is its own transpose.

    Raises:
        InputError: If `matrix` is not such a matrix.

    Example:
        >>> import torch
        >>> MatrixOperator(torch.tensor([[0.0, 1.0], [2.0, 0.0]])).T @ torch.tensor([1.0, 0.0])
        tensor([0., 1.])
    """

    def __init__(self, matrix: Any, *, symmetric: bool = False):
        require_bool("MatrixOperator", "symmetric", symmetric)
        matrix = _tensor_of(matrix)
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
        """Compute the matrix product."""
        return (self.matrix @ block.to(self.matrix.dtype)).to(self.dtype)

    def multiply_transposed(self, block: Tensor) -> Tensor:
        """Compute the product with the transposed matrix."""
        return (self.matrix.t() @ block.to(self.matrix.dtype)).to(self.dtype)

    def converted(self, conversion: Conversion) -> MatrixOperator:
        """See `LinearOperator.to`."""
        return MatrixOperator(conversion(self.matrix), symmetric=self.symmetric)


def _tensor_of(matrix: Any) -> Any:
    """Convert a floating-point matrix of NumPy or SciPy to a tensor; return anything else unchanged."""
    if isinstance(matrix, np.ndarray) and matrix.dtype in (np.float32, np.float64):
        return torch.from_numpy(matrix)
    if issparse(matrix) and matrix.ndim == 2 and matrix.dtype in (np.float32, np.float64):
        # Not CSR, because torch warns at the first compressed tensor of a process.
        entries = csr_array(matrix).tocoo()
        places = torch.from_numpy(np.stack([entries.row, entries.col]).astype(np.int64))
        numbers = torch.from_numpy(entries.data)
        return torch.sparse_coo_tensor(
            places, numbers, list(entries.shape), device="cpu", check_invariants=True
        ).coalesce()
    return matrix
