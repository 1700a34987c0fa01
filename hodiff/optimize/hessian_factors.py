"""Factorisations of Hessians plus a multiple of the identity: dense by torch, sparse by CHOLMOD or SuperLU.

Source: J. Nocedal & S. Wright, *Numerical Optimization*, 2nd ed., section 3.4.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import scipy
import torch
from torch import Tensor

from hodiff.common import cholmod


class Shifted(Protocol):
    """Symmetric matrix that is solved after a multiple of the identity is added."""

    diagonal: Tensor

    def solve(self, shift: float, rhs: Tensor) -> Tensor | None:
        """Solve with H + shift I; return None if it is not positive definite."""


class DenseMatrix:
    """Dense matrix (n, n) on its device."""

    def __init__(self, matrix: Tensor):
        self._matrix = matrix
        self.diagonal = matrix.diagonal()

    def solve(self, shift: float, rhs: Tensor) -> Tensor | None:
        """Solve with H + shift I; return None if it is not positive definite."""
        matrix = self._matrix.clone()
        matrix.diagonal().add_(shift)
        factor, failed = torch.linalg.cholesky_ex(matrix)
        return None if bool(failed) else torch.cholesky_solve(rhs[:, None], factor)[:, 0]


class SparseMatrix:
    """SciPy sparse matrix on the CPU."""

    def __init__(self, matrix: Any):
        # SuperLU requires columns; the rows of a symmetric matrix are its columns.
        by_columns = (matrix.data, matrix.indices, matrix.indptr)
        self._matrix = scipy.sparse.csc_array(by_columns, shape=matrix.shape)
        self.diagonal = torch.from_numpy(matrix.diagonal())

    def solve(self, shift: float, rhs: Tensor) -> Tensor | None:
        """Solve with H + shift I; return None if it is not positive definite."""
        by_factors = _by_superlu if cholmod.library() is None else _by_cholmod
        x = by_factors(self._matrix, shift, rhs.cpu().numpy())
        return None if x is None else torch.from_numpy(x).to(rhs)


def _by_cholmod(matrix: Any, shift: float, rhs: np.ndarray) -> np.ndarray | None:
    factors = cholmod.cholesky(matrix, shift)
    return None if factors is None else factors.solve(rhs)


def _by_superlu(matrix: Any, shift: float, rhs: np.ndarray) -> np.ndarray | None:
    if shift:
        matrix = matrix + shift * scipy.sparse.eye_array(len(rhs), format="csc")
    try:
        # Prefer pivots on the diagonal: their signs are then the signs of the eigenvalues (Sylvester's law).
        factors = scipy.sparse.linalg.splu(
            matrix, permc_spec="MMD_AT_PLUS_A", diag_pivot_thresh=0.0, options={"SymmetricMode": True}
        )
    except RuntimeError:  # a column without a pivot
        return None
    is_positive = np.array_equal(factors.perm_r, factors.perm_c) and bool((factors.U.diagonal() > 0).all())
    solved: np.ndarray = factors.solve(rhs)
    return solved if is_positive else None
