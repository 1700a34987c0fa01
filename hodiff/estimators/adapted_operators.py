"""Adaptation of matrices and operators of any library to a `View`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from scipy.sparse import issparse
from scipy.sparse.linalg import LinearOperator as ScipyOperator
from torch import Tensor

from hodiff.common.options import require_chunk_size
from hodiff.common.trees import describe
from hodiff.errors import InputError
from hodiff.estimators.view import Apply, View, require_constant
from hodiff.torch_internals.autograd.wrapped_tensors import numbers_in


def view_of(
    A: Any,
    caller: str,
    *,
    square: bool = True,
    chunk_size: int | str | None = "auto",
    sharded_too: bool = False,
) -> View:
    """Adapt a matrix or an operator.

    Args:
        A: A matrix (a tensor, a NumPy array, a SciPy sparse matrix), a SciPy `LinearOperator`, or any object with
            `shape`, `dtype`, `device` and `A @ block`.
        caller: Name of the public function, for error messages.
        square: Whether the operator must be square.
        chunk_size: Columns in a product.
        sharded_too: Whether vectors may be sharded over ranks.

    Returns:
        View without counted products.

    Raises:
        InputError: If `A` is none of these, is empty, complex or not square, or `chunk_size` does not fit.
    """
    require_chunk_size(caller, "chunk_size", chunk_size)
    if not hasattr(A, "__matmul__") or not hasattr(A, "shape"):
        raise InputError(
            f"{caller}: A: expected a matrix, a SciPy LinearOperator or an object with shape, dtype, device and A @ v, "
            f"got {describe(A)}; wrap a function of vectors in scipy.sparse.linalg.LinearOperator."
        )
    shape = tuple(int(size) for size in A.shape)
    # A rank may hold no part of a sharded vector.
    sharded = _is_hodiffs(A) and getattr(A.domain, "shards", None) is not None
    if len(shape) != 2 or (min(shape) == 0 and not sharded):
        raise InputError(f"{caller}: A: expected a matrix with rows and columns, got shape {shape}.")
    if square and shape[0] != shape[1]:
        raise InputError(
            f"{caller}: A: expected a square operator, got shape {shape}; use A.T @ A, the Gauss-Newton operator."
        )
    if isinstance(A, Tensor):
        require_constant(caller, "A", A)
    own = _dtype(A, caller)
    dtype = torch.promote_types(own, torch.float32) if own.is_floating_point else torch.float64
    apply, transposed, device = _products(A, own if own.is_floating_point else dtype, dtype)
    # Matrices are multiplied in the working dtype, other operators in their own dtype.
    matrix = isinstance(A, (Tensor, np.ndarray)) or issparse(A) or not own.is_floating_point
    rounding = torch.finfo(dtype if matrix else own).eps
    spaces = (A.domain, A.codomain) if _is_hodiffs(A) else (None, None)
    view = View(caller, (shape[0], shape[1]), dtype, device, rounding, chunk_size, apply, transposed, *spaces)
    if not sharded_too:
        view.require_whole(caller, "use solve, an estimator of the spectrum, trace or diagonal")
    return view


def _is_hodiffs(A: Any) -> bool:
    return hasattr(A, "domain") and hasattr(A, "multiply")


def _dtype(A: Any, caller: str) -> torch.dtype:
    """Return the operator's dtype as a torch dtype; raise if it is not real."""
    dtype = getattr(A, "dtype", None)
    if not isinstance(dtype, torch.dtype):
        try:
            dtype = torch.from_numpy(np.empty(0, dtype)).dtype
        except TypeError:
            raise InputError(
                f"{caller}: A: expected a real operator, got dtype {dtype}; convert it to float64."
            ) from None
    if dtype.is_complex:
        raise InputError(
            f"{caller}: A: expected a real operator, got dtype {dtype}; pass [[Re A, -Im A], [Im A, Re A]]."
        )
    return dtype


def _products(A: Any, own: torch.dtype, dtype: torch.dtype) -> tuple[Apply, Apply | None, torch.device]:
    """Return the product with `A`, the product with its transpose or None, and the device."""
    if isinstance(A, Tensor):
        matrix = A.detach().to(dtype)
        # Compressed sparse matrices have no .T.
        return matrix.matmul, matrix.t().matmul, A.device
    transpose = getattr(A, "T", None)
    if isinstance(A, (np.ndarray, ScipyOperator)) or issparse(A) or not isinstance(A.dtype, torch.dtype):
        host = torch.device("cpu")
        return _through_numpy(A), None if transpose is None else _through_numpy(transpose), host
    device = torch.device(getattr(A, "device", "cpu"))
    return _in_dtype(A, own), None if transpose is None else _in_dtype(transpose, own), device


def _through_numpy(A: Any) -> Apply:
    """Multiply by NumPy in the working dtype: SciPy's operators report int8 as dtype if none was given."""
    return lambda block: torch.from_numpy(np.ascontiguousarray(A @ numbers_in(block)))


def _in_dtype(A: Any, dtype: torch.dtype) -> Apply:
    # If the only leaf of a hodiff operator has one column, `A @ block` treats a block of one column as a pytree.
    multiply = A.multiply if _is_hodiffs(A) else A.__matmul__
    return lambda block: multiply(block.to(dtype))
