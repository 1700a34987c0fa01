"""Sparse Jacobians of residuals, and solutions with their factors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import scipy
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hodiff import sparse
from hodiff.common import cholmod
from hodiff.common.trees import PyTree, describe
from hodiff.derivatives.route_choice import unavailable
from hodiff.errors import InputError
from hodiff.implicit.ravel import Ravel
from hodiff.recompute.recording import Recording
from hodiff.torch_internals.autograd.differentiation import only_reverse_mode


class Gradient:
    """The gradient in the first argument, of an objective that must return one number."""

    def __init__(self, caller: str, objective: Callable[..., Any]):
        self._caller, self._objective = caller, objective
        self._gradient: Callable[..., PyTree] = torch.func.grad(self.value)

    def value(self, *args: Any) -> Tensor:
        """The objective's value."""
        value = self._objective(*args)
        if not isinstance(value, Tensor) or value.shape != () or not value.is_floating_point():
            raise InputError(
                f"{self._caller}: objective: expected one real number, a tensor of shape (), got {describe(value)}; "
                "reduce it with .sum() or .mean(), or pass has_aux=True if it returns (value, aux)."
            )
        return value

    def __call__(self, *args: Any) -> PyTree:
        """The gradient."""
        try:
            return self._gradient(*args)
        except Exception as error:
            if not (unavailable(error) and only_reverse_mode()):
                raise
        # By torch.autograd, which takes Functions without setup_context.
        leaves, spec = pytree.tree_flatten(args[0])
        recording = Recording(
            lambda operands: self.value(pytree.tree_unflatten(operands, spec), *args[1:]),
            leaves,
            roots=(self._objective,),
        )
        recording.inspect(recording.result)
        found = recording.gradients([recording.result])
        return pytree.tree_unflatten(
            [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)], spec
        )


def sparse_jacobian_of(residual: Callable[..., PyTree]) -> Callable[..., Any]:
    """The Jacobian of `residual(x, *params)` in x, SciPy's CSR array; that of a gradient is the objective's Hessian."""
    # With their patterns and colorings, for all calls with x of the same structure.
    kept: dict[Any, Callable[..., Any]] = {}

    def matrix(x: PyTree, *params: Any) -> Any:
        ravel = Ravel(x)
        structure = str(ravel.spec), tuple(ravel.shapes), tuple(each.dtype for each in ravel.like)
        if structure not in kept:
            kept[structure] = _of_vectors(residual, ravel)
        return kept[structure](ravel.vector(x), *params)

    return matrix


def _of_vectors(residual: Callable[..., PyTree], ravel: Ravel) -> Callable[..., Any]:
    # What is solved may be corrected or not, and so is its matrix.
    if isinstance(residual, Gradient):
        value = residual.value
        return sparse.hessian(lambda v, *params: value(ravel.tree(v), *params), format="scipy", correct=False)
    return sparse.jacobian(
        lambda v, *params: ravel.vector(residual(ravel.tree(v), *params)), format="scipy", correct=False
    )


def matrix_in_words_of(caller: str, matrix: Callable[..., Any], *args: Any) -> Any:
    """The matrix; errors name the function that the user called."""
    try:
        with torch.no_grad():
            return matrix(*args)
    except InputError as error:
        _, found, rest = str(error).partition(": ")
        message = rest if found else str(error)
        raise InputError(f"{caller}: linear solver 'sparse': {message}") from None


def solve_by_factors(matrix: Any, rhs: Tensor) -> tuple[Tensor, str]:
    """The solutions for rows of right-hand sides, and what is wrong with the matrix, if anything."""
    matrix = matrix.astype(np.float64)
    if not np.isfinite(matrix.data).all():
        return torch.full_like(rhs, torch.nan), "the Jacobian is not finite"
    by_factors = _by_cholmod(matrix, rhs)
    return _by_superlu(matrix, rhs) if by_factors is None else (by_factors, "")


def _by_cholmod(matrix: Any, rhs: Tensor) -> Tensor | None:
    """The solutions where scikit-sparse is there and the matrix symmetric and well positive definite."""
    diagonal = matrix.diagonal()
    if cholmod.library() is None or not (diagonal > 0).all() or (matrix != matrix.T).nnz:
        return None
    # Whatever the units of unknowns, the diagonal is one.
    scale = 1 / np.sqrt(diagonal)
    scaled = scipy.sparse.diags_array(scale) @ matrix @ scipy.sparse.diags_array(scale)
    factors = cholmod.cholesky(scipy.sparse.csc_array(scaled))
    if factors is None or not factors.pivots.min() > len(scale) * torch.finfo(rhs.dtype).eps * factors.pivots.max():
        return None
    sides = rhs.detach().to("cpu", torch.float64).numpy().T * scale[:, None]
    return torch.from_numpy((factors.solve(np.asfortranarray(sides)) * scale[:, None]).T.copy()).to(rhs)


def _by_superlu(matrix: Any, rhs: Tensor) -> tuple[Tensor, str]:
    # Equations may have any units: only what is singular after scaling them is singular.
    rows = np.asarray(abs(matrix).max(axis=1).todense()).ravel()
    rows = np.where(rows > 0, rows, 1.0)
    scaled = scipy.sparse.csc_array(scipy.sparse.diags_array(1 / rows) @ matrix)
    try:
        factors = scipy.sparse.linalg.splu(scaled)
    except RuntimeError:
        return torch.full_like(rhs, torch.nan), "the Jacobian is singular: its factors have a pivot that is zero"
    pivots = np.abs(factors.U.diagonal())
    ratio = pivots.min() / pivots.max()
    trouble = ""
    if not ratio > len(rows) * torch.finfo(rhs.dtype).eps:
        trouble = f"the Jacobian is singular: the smallest pivot is {ratio:.1e} of the largest"
    sides = rhs.detach().to("cpu", torch.float64).numpy().T / rows[:, None]
    return torch.from_numpy(factors.solve(np.asfortranarray(sides)).T.copy()).to(rhs), trouble
