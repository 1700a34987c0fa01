"""Rules for determinants and their logarithms."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from hodiff.corrections.declining import INVALID, UNNEEDED
from hodiff.corrections.linalg.elimination import determinant_by_elimination, determinant_of_few, is_nearly_singular
from hodiff.corrections.linalg.factored import FactoredSolve, factors, for_lapack, in_front, named
from hodiff.corrections.registry import register
from hodiff.corrections.values import with_value_of
from hodiff.routes import FORWARD_INSIDE
from hodiff.rules.any_order import AnyOrderFunction
from hodiff.rules.nesting import nestable_jvp
from hodiff.torch_internals.autograd.differentiation import may_be_differentiated

_determinant = partial(
    register,
    routes=FORWARD_INSIDE,
    reason="the forward rule solves with factors that are constants to a second derivative",
    reference="Giles, Collected matrix derivative results (2008), sec. 2.2.4",
    covers=for_lapack,
)


def _parity(pivots: Tensor) -> Tensor:
    """Return the sign of the permutation: +1 or -1."""
    places = torch.arange(1, pivots.shape[-1] + 1, dtype=pivots.dtype, device=pivots.device)
    return 1 - 2 * ((pivots != places).sum(-1) % 2)


def _inverse_adjoint(matrix: Tensor, pair: Tensor, pivots: Tensor) -> Tensor:
    identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    return FactoredSolve.call(matrix, identity, pair, pivots, True)


def _relative_slope(matrix_t: Tensor, matrix: Tensor, pair: Tensor, pivots: Tensor) -> Tensor:
    """Derivative of the logarithm: the trace of a solve."""
    return FactoredSolve.call(matrix, matrix_t, pair, pivots, False).diagonal(dim1=-2, dim2=-1).sum(-1)


class LogDeterminant(AnyOrderFunction):
    r"""$\log \det A$ for complex A, $\log |\det A|$ for a real one, by its factors. Saves A and the factors.

    $$ \bar A = \bar y A^{-H}, \qquad \dot y = \operatorname{tr}(A^{-1} \dot A) $$
    """

    @staticmethod
    def forward(matrix: Tensor, pair: Tensor, pivots: Tensor) -> Tensor:
        """Sum the logarithms of the pivots."""
        del matrix
        diagonal = pair.diagonal(dim1=-2, dim2=-1)
        size = diagonal.abs().log().sum(-1)
        if not pair.is_complex():
            return size
        return torch.complex(size, diagonal.angle().sum(-1) + torch.pi * (_parity(pivots) < 0).to(size.dtype))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save the inputs."""
        del output
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, y_bar: Tensor | None) -> Any:
        r"""Return $\bar y A^{-H}$."""
        if y_bar is None:
            return None, None, None
        return y_bar[..., None, None] * _inverse_adjoint(*ctx.saved_tensors), None, None

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, matrix_t: Tensor, *_: None) -> Tensor:
        """Return the trace of a solve."""
        return _relative_slope(matrix_t, *ctx.saved_tensors)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *tensors: Tensor) -> tuple[Tensor, int]:
        """Leading dimensions are batches."""
        del info
        return LogDeterminant.call(*in_front(in_dims, tensors, (2, 2, 1))), 0


class Determinant(AnyOrderFunction):
    r"""$\det A$ of a matrix far from singular, by its factors. Saves A and the factors.

    $$ \bar A = \bar y \, \overline{\det A} \, A^{-H}, \qquad \dot y = \det A \operatorname{tr}(A^{-1} \dot A) $$
    """

    @staticmethod
    def forward(matrix: Tensor, pair: Tensor, pivots: Tensor) -> Tensor:
        """Multiply the pivots."""
        del matrix
        return pair.diagonal(dim1=-2, dim2=-1).prod(-1) * _parity(pivots)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save the inputs."""
        del output
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, y_bar: Tensor | None) -> Any:
        """Return the cofactors times the cotangent."""
        if y_bar is None:
            return None, None, None
        scale = y_bar * Determinant.call(*ctx.saved_tensors).conj()
        return scale[..., None, None] * _inverse_adjoint(*ctx.saved_tensors), None, None

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, matrix_t: Tensor, *_: None) -> Tensor:
        """Return the determinant times the trace of a solve."""
        return Determinant.call(*ctx.saved_tensors) * _relative_slope(matrix_t, *ctx.saved_tensors)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *tensors: Tensor) -> tuple[Tensor, int]:
        """Leading dimensions are batches."""
        del info
        return Determinant.call(*in_front(in_dims, tensors, (2, 2, 1))), 0


# torch 2.15 differentiates this correctly only where the matrix is far from singular.
@_determinant(
    torch.det,
    torch.Tensor.det,
    torch.linalg.det,
)
def _det(A: Tensor) -> Any:
    if not _is_square(A):
        return INVALID
    if not A.numel() or not may_be_differentiated((A,)):
        return UNNEEDED
    if A.shape[-1] <= 3:
        return with_value_of(determinant_of_few(A), torch.linalg.det, A)
    pair, pivots, _ = factors(A)
    if is_nearly_singular(pair):
        return with_value_of(determinant_by_elimination(A), torch.linalg.det, A)
    return Determinant.call(A, pair, pivots)


def _sign_and_logarithm(matrix: Tensor) -> tuple[Tensor, Tensor]:
    pair, pivots, _ = factors(matrix)
    logarithm = LogDeterminant.call(matrix, pair, pivots)
    if matrix.is_complex():
        direction = torch.complex(torch.zeros_like(logarithm.imag), logarithm.imag).exp()
        return direction.where(logarithm.real > -torch.inf, 0), logarithm.real
    return (pair.detach().diagonal(dim1=-2, dim2=-1).sign().prod(-1) * _parity(pivots)), logarithm


@_determinant(torch.linalg.slogdet, mended="2.15")
def _linalg_slogdet(A: Tensor) -> Any:
    return named("linalg_slogdet", _sign_and_logarithm(A)) if _is_square(A) else INVALID


@_determinant(torch.slogdet, torch.Tensor.slogdet, name="torch.slogdet", mended="2.15")
def _slogdet(input: Tensor) -> Any:
    return named("slogdet", _sign_and_logarithm(input)) if _is_square(input) else INVALID


@_determinant(torch.logdet, torch.Tensor.logdet, name="torch.logdet", mended="2.15")
def _logdet(input: Tensor) -> Any:
    if not _is_square(input):
        return INVALID
    sign, size = _sign_and_logarithm(input)
    return size + sign.log() if input.is_complex() else size.where(sign != -1, torch.nan)


def _is_square(matrix: Tensor) -> bool:
    return matrix.dim() >= 2 and matrix.shape[-1] == matrix.shape[-2]
