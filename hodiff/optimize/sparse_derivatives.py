"""Sparse Hessians and Jacobians for minimisers, as SciPy matrices in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import scipy
import torch
from torch import Tensor

from hodiff import sparse
from hodiff.common.trees import PyTree, describe, tensors_in
from hodiff.errors import InputError
from hodiff.operators.linear.spaces import Space

# Maps the arguments of a function to the matrix of a derivative.
Matrix = Callable[..., Any]


def require_sparse(caller: str, given: Any) -> None:
    """Raise if the value is neither a bool nor a coloring."""
    if not isinstance(given, (bool, sparse.Coloring)):
        raise InputError(
            f"{caller}: sparse: expected True, False or a hodiff.sparse.Coloring, got {describe(given)}; "
            "hodiff.sparse.color(pattern) creates one."
        )


def sparse_hessian(caller: str, f: Callable[..., Any], given: Any, x0: PyTree, space: Space) -> Matrix:
    """Return the Hessian as a function of the flat unknowns; the first call finds a coloring if none is given."""
    if any(leaf.is_complex() for leaf in tensors_in(x0)):
        raise InputError(
            f"{caller}: sparse: expected False for complex x0, got {given!r}; pass torch.view_as_real(x0), and "
            "convert it in f by torch.view_as_complex."
        )

    def of_vector(x: Tensor, *args: Any) -> Any:
        return f(space.unflatten(x), *args)

    coloring = given if isinstance(given, sparse.Coloring) else None
    with _in_words_of(caller, "sparse"):
        return _matrices(caller, "sparse", sparse.hessian(of_vector, coloring=coloring, format="scipy"))


def sparse_weighted_hessian(caller: str, f: Callable[..., Any]) -> Matrix:
    """Return the Hessian of a constraint times its weights, as a function of x and the weights."""
    return _matrices(caller, "constraints", sparse.hessian(f, format="scipy"))


def sparse_jacobian(caller: str, f: Callable[..., Any]) -> Matrix:
    """Return the Jacobian of a constraint as a function of x."""
    return _matrices(caller, "constraints", sparse.jacobian(f, format="scipy"))


def _matrices(caller: str, argument: str, matrix: Matrix) -> Matrix:
    def of(*args: Any) -> Any:
        with torch.no_grad(), _in_words_of(caller, argument):
            return matrix(*args).astype("float64", copy=False)

    return of


@contextmanager
def _in_words_of(caller: str, argument: str) -> Iterator[None]:
    """Rewrite errors of `hodiff.sparse` to name the function and the argument that the user knows."""
    try:
        yield
    except InputError as error:
        _, found, rest = str(error).partition(": ")
        raise InputError(f"{caller}: {argument}: {rest}" if found else str(error)) from None


def unknown_matrix(n: int) -> Any:
    """Return a sparse matrix with a diagonal of NaN, for a point where the gradient is not finite."""
    return scipy.sparse.diags_array([float("nan")] * n, format="csr")
