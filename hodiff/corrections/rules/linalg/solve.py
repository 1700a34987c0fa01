"""Rules for solves with general, triangular and Cholesky-factored matrices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hodiff.corrections.mechanism.declining import INVALID, UNNEEDED, Declined
from hodiff.corrections.mechanism.registry import register
from hodiff.corrections.mechanism.values import with_value, with_value_of
from hodiff.corrections.rules.linalg.factored_solves import FactoredSolve, factors, for_lapack, named
from hodiff.routes import FORWARD_INSIDE, ROUTES
from hodiff.torch_internals.autograd.differentiation import carry_derivatives, may_be_differentiated
from hodiff.torch_operators.table import forms_of

_solves = partial(
    register,
    routes=FORWARD_INSIDE,
    reason="the forward rule solves with factors that second derivatives treat as constants",
    reference="Giles, Collected matrix derivative results (2008), sec. 2.2",
    covers=for_lapack,
)


# torch 2.15 differentiates solves correctly, but refuses some that broadcast in a `vmap`.
@_solves(torch.linalg.solve)
def _solve(A: Tensor, B: Tensor, *, left: bool = True) -> Any:
    result = _solve_ex(A, B, left=left, check_errors=True)
    return result if isinstance(result, Declined) else result[0]


@_solves(torch.linalg.solve_ex)
def _solve_ex(A: Tensor, B: Tensor, *, left: bool = True, check_errors: bool = False) -> Any:
    vector = B.dim() == 1 or (B.dim() == A.dim() - 1 and B.shape == A.shape[:-1])
    # torch raises the errors for invalid arguments.
    if A.dim() < 2 or A.dtype != B.dtype or A.shape[-1] != A.shape[-2] or (vector and not left):
        return INVALID
    pair, pivots, info = factors(A, check_errors=check_errors)
    if vector:
        solution = FactoredSolve.call(A, B.unsqueeze(-1), pair, pivots, False).squeeze(-1)
    elif left:
        solution = FactoredSolve.call(A, B, pair, pivots, False)
    else:
        solution = _adjoint(FactoredSolve.call(A, _adjoint(B), pair, pivots, True))
    return named("linalg_solve_ex", (solution, info))


def _adjoint(matrix: Tensor) -> Tensor:
    # Lazy conjugates are no results, as views as real numbers do not support them.
    return matrix.mT.conj_physical() if matrix.is_complex() else matrix.mT


@register(
    torch.linalg.lstsq,
    routes=ROUTES,
    reason="the singular values are constants in every derivative",
    reference="torch.linalg.svdvals",
)
def _lstsq(A: Tensor, B: Tensor, rcond: float | None = None, *, driver: str | None = None) -> Any:
    if driver not in ("gelsd", "gelss") or not carry_derivatives((A,)):
        return UNNEEDED
    solution, residuals, rank, values = torch.linalg.lstsq(A, B, rcond, driver=driver)
    return named("linalg_lstsq", (solution, residuals, rank, with_value(torch.linalg.svdvals(A), values)))


@_solves(torch.linalg.tensorsolve, mended="2.15")
def _tensorsolve(A: Tensor, B: Tensor, dims: Sequence[int] | None = None) -> Any:
    if dims is not None:
        A = A.movedim(tuple(dims), tuple(range(A.dim() - len(dims), A.dim())))
    shape = A.shape[B.dim() :]
    if math.prod(shape) != B.numel():
        return INVALID
    result = _solve(A.reshape(B.numel(), B.numel()), B.flatten())
    return result if isinstance(result, Declined) else result.reshape(shape)


@register(
    *forms_of("triangular_solve"),
    routes=ROUTES[1:],
    reason="with transpose=True, as in the backward pass, the forward rule does not transpose the tangent; it also "
    "reads entries that the value ignores",
    reference="torch.linalg.solve_triangular",
    covers=for_lapack,
)
def _triangular_solve(
    input: Tensor, A: Tensor, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> Any:
    matrix = A.mT if transpose else A
    solution = torch.linalg.solve_triangular(matrix, input, upper=upper != transpose, unitriangular=unitriangular)
    batch = solution.shape[:-2]
    return named("triangular_solve", (solution, A.expand(*batch, *A.shape[-2:]).clone()))


@register(
    *forms_of("cholesky_solve"),
    routes=ROUTES[1:],
    reason="if L is batched and the shape of B is that of L without its last dimension, the forward rule reads B as a "
    "batch of vectors; the gradient of L is not triangular",
    reference="two triangular solves, by torch.linalg.solve_triangular",
    covers=for_lapack,
)
def _cholesky_solve(input: Tensor, input2: Tensor, upper: bool = False) -> Any:
    factor = input2
    fits = min(input.dim(), factor.dim()) >= 2 and factor.shape[-1] == factor.shape[-2] == input.shape[-2]
    if not fits or input.dtype != factor.dtype:
        return INVALID
    between = torch.linalg.solve_triangular(factor.mH if upper else factor, input, upper=False)
    return torch.linalg.solve_triangular(factor if upper else factor.mH, between, upper=True)


@register(
    *forms_of("cholesky_inverse"),
    routes=ROUTES[1:],
    reason="the forward rule has two factors in the wrong order, so the first forward derivative is already wrong; the "
    "gradient is not triangular",
    reference="two triangular factors, by torch.linalg.solve_triangular",
    covers=for_lapack,
)
def _cholesky_inverse(input: Tensor, upper: bool = False) -> Any:
    if not may_be_differentiated((input,)):
        return UNNEEDED
    identity = torch.eye(input.shape[-1], dtype=input.dtype, device=input.device).expand(input.shape)
    inverse = torch.linalg.solve_triangular(input, identity, upper=upper)
    y = inverse @ inverse.mH if upper else inverse.mH @ inverse
    return with_value_of(y, torch.cholesky_inverse, input, upper)
