"""Sparse Jacobians of residuals, and solutions by their factors."""

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
from hodiff.implicit.solver_call import Ravel
from hodiff.recompute.recording import Recording
from hodiff.torch_internals.autograd.differentiation import only_reverse_mode


class Gradient:
    """Gradient with respect to the first argument, of an objective that must return one number."""

    def __init__(self, caller: str, objective: Callable[..., Any]):
        self._caller, self._objective = caller, objective
        self._gradient: Callable[..., PyTree] = torch.func.grad(self.value)

    def value(self, *args: Any) -> Tensor:
        """Compute the objective, and raise if it is not one real number."""
        value = self._objective(*args)
        if not isinstance(value, Tensor) or value.shape != () or not value.is_floating_point():
            raise InputError(
                f"{self._caller}: objective: expected one real number, a tensor of shape (), got {describe(value)}; "
                "reduce it with .sum() or .mean(), or pass has_aux=True if it returns (value, aux)."
            )
        return value

    def __call__(self, *args: Any) -> PyTree:
        """Compute the gradient."""
        try:
            return self._gradient(*args)
        except Exception as error:
            if not (unavailable(error) and only_reverse_mode()):
                raise
        # Fall back to torch.autograd, which supports Functions without setup_context.
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
    """Return a function of (x, *params) for the residual's Jacobian as a CSR array; for a `Gradient`, the Hessian."""
    # Functions with patterns and colorings are cached by the structure of x.
    kept: dict[Any, Callable[..., Any]] = {}

    def matrix(x: PyTree, *params: Any) -> Any:
        ravel = Ravel(x)
        structure = str(ravel.spec), tuple(ravel.shapes), tuple(each.dtype for each in ravel.like)
        if structure not in kept:
            kept[structure] = _of_vectors(residual, ravel)
        return kept[structure](ravel.vector(x), *params)

    return matrix


def _of_vectors(residual: Callable[..., PyTree], ravel: Ravel) -> Callable[..., Any]:
    # The residual is corrected already, if at all, and its matrix must match.
    if isinstance(residual, Gradient):
        value = residual.value
        return sparse.hessian(lambda v, *params: value(ravel.tree(v), *params), format="scipy", correct=False)
    return sparse.jacobian(
        lambda v, *params: ravel.vector(residual(ravel.tree(v), *params)), format="scipy", correct=False
    )


def matrix_in_words_of(caller: str, matrix: Callable[..., Any], *args: Any) -> Any:
    """Compute the matrix; errors name the function that the user called."""
    try:
        with torch.no_grad():
            return matrix(*args)
    except InputError as error:
        _, found, rest = str(error).partition(": ")
        message = rest if found else str(error)
        raise InputError(f"{caller}: linear solver 'sparse': {message}") from None


def solve_by_factors(matrix: Any, rhs: Tensor) -> tuple[Tensor, str]:
    """Solve for rows of right-hand sides; also return a description of the matrix's problem, or an empty string."""
    matrix = matrix.astype(np.float64)
    if not np.isfinite(matrix.data).all():
        return torch.full_like(rhs, torch.nan), "the Jacobian is not finite"
    by_factors = _by_cholmod(matrix, rhs)
    return _by_superlu(matrix, rhs) if by_factors is None else (by_factors, "")


def _by_cholmod(matrix: Any, rhs: Tensor) -> Tensor | None:
    """Solve by CHOLMOD; return None unless it is installed and the matrix symmetric and well positive definite."""
    diagonal = matrix.diagonal()
    if cholmod.library() is None or not (diagonal > 0).all() or (matrix != matrix.T).nnz:
        return None
    # The scaled matrix has a diagonal of ones, whatever the units of the unknowns.
    scale = 1 / np.sqrt(diagonal)
    scaled = scipy.sparse.diags_array(scale) @ matrix @ scipy.sparse.diags_array(scale)
    factors = cholmod.cholesky(scipy.sparse.csc_array(scaled))
    if factors is None or not factors.pivots.min() > len(scale) * torch.finfo(rhs.dtype).eps * factors.pivots.max():
        return None
    sides = rhs.detach().to("cpu", torch.float64).numpy().T * scale[:, None]
    return torch.from_numpy((factors.solve(np.asfortranarray(sides)) * scale[:, None]).T.copy()).to(rhs)


def _by_superlu(matrix: Any, rhs: Tensor) -> tuple[Tensor, str]:
    # Equations may have any units, so singularity is tested after scaling the rows.
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
