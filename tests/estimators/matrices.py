"""Matrices with known spectra, and every kind of operator for the same matrix."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from scipy.sparse import csr_array
from scipy.sparse.linalg import aslinearoperator
from torch import Tensor

from hodiff.operators import MatrixOperator


def symmetric(eigenvalues: Tensor, seed: int = 0) -> Tensor:
    """Return a dense symmetric matrix with these eigenvalues and random eigenvectors."""
    n = len(eigenvalues)
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))[0]
    matrix = (basis * eigenvalues) @ basis.T
    return (matrix + matrix.T) / 2


def decaying(n: int, power: float = 2.0) -> Tensor:
    return torch.arange(1, n + 1, dtype=torch.float64) ** -power


def linspace_spectrum(n: int, low: float = 1e-3, high: float = 1.0) -> Tensor:
    return torch.linspace(low, high, n, dtype=torch.float64)


class Wrapped:
    """A minimal operator, which counts its products and has no transpose."""

    def __init__(self, matrix: Tensor):
        self.matrix = matrix
        self.shape = tuple(matrix.shape)
        self.dtype = matrix.dtype
        self.device = matrix.device
        self.products = 0

    def __matmul__(self, v: Tensor) -> Tensor:
        assert v.dtype == self.dtype
        self.products += v.shape[1] if v.dim() == 2 else 1
        return self.matrix @ v


KINDS: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda matrix: matrix,
    "tensor that requires grad": lambda matrix: matrix.clone().requires_grad_(),
    "NumPy": lambda matrix: matrix.numpy(),
    "NumPy in column order": lambda matrix: np.asfortranarray(matrix.numpy()),
    "SciPy sparse": lambda matrix: csr_array(matrix.numpy()),
    "SciPy operator": lambda matrix: aslinearoperator(matrix.numpy()),
    "torch sparse": lambda matrix: matrix.to_sparse_coo(),
    "torch CSR": lambda matrix: matrix.to_sparse_csr(),
    "torch CSC": lambda matrix: matrix.to_sparse_csc(),
    "operator": lambda matrix: MatrixOperator(matrix.to_sparse_csr(), symmetric=True),
    "user's": Wrapped,
}
