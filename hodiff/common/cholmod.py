"""Cholesky factors of sparse matrices by CHOLMOD, where scikit-sparse is installed.

Source: Y. Chen, T. Davis, W. Hager & S. Rajamanickam, "Algorithm 887: CHOLMOD, supernodal sparse Cholesky factorization
and update/downdate", ACM Transactions on Mathematical Software 35(3), 2008.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import scipy


@dataclass(frozen=True)
class Factors:
    """A factorised matrix.

    Attributes:
        solve: Solves for right-hand sides (n,) or (n, k).
        pivots: The squares of the factor's diagonal, (n,), all positive.
    """

    solve: Callable[[np.ndarray], np.ndarray]
    pivots: np.ndarray


@cache
def library() -> ModuleType | None:
    """Return scikit-sparse's CHOLMOD module, or None if it cannot be imported."""
    try:
        return importlib.import_module("sksparse.cholmod")
    except (ImportError, OSError):
        return None


def cholesky(matrix: Any, shift: float = 0.0) -> Factors | None:
    """Factorise a symmetric CSC array (n, n) with shift I added; None if the sum is not positive definite."""
    cholmod = library()
    assert cholmod is not None
    factorize = _by_version_5 if hasattr(cholmod, "cho_factor") else _by_version_4
    if shift:
        # CHOLMOD's own shift refuses a matrix without entries.
        matrix = matrix + shift * scipy.sparse.eye_array(matrix.shape[0], format="csc")
    # The check is cheaper than a failed factorization, for which version 0.5 also prints a line.
    if not (matrix.diagonal() > 0).all():
        return None
    try:
        with _silent(cholmod):
            factors = factorize(cholmod, matrix)
    except cholmod.CholmodNotPositiveDefiniteError:
        return None
    # Indefinite matrices have factors L D Lᵀ as well.
    return factors if bool((factors.pivots > 0).all()) else None


@contextmanager
def _silent(cholmod: ModuleType) -> Iterator[None]:
    """Suppress CHOLMOD's warnings, as near singularity is judged by the pivots."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", cholmod.CholmodWarning)
        yield


def _by_version_4(cholmod: ModuleType, matrix: Any) -> Factors:
    factor = cholmod.cholesky(matrix)
    return Factors(factor, factor.D())


def _by_version_5(cholmod: ModuleType, matrix: Any) -> Factors:
    factor = cholmod.cho_factor(matrix)

    def solve(sides: np.ndarray) -> np.ndarray:
        with _silent(cholmod):
            solved: np.ndarray = factor.solve(sides)
        return solved

    return Factors(solve, factor.get_factor().diagonal() ** 2)
