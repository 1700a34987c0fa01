"""Rules for determinants and their logarithms."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from hodiff.corrections.mechanism.declining import INVALID, UNNEEDED
from hodiff.corrections.mechanism.registry import register
from hodiff.corrections.mechanism.values import save_inputs, with_value_of
from hodiff.corrections.rules.linalg.factored_solves import FactoredSolve, factors, for_lapack, in_front, named
from hodiff.routes import FORWARD_INSIDE
from hodiff.rules.any_order import AnyOrderFunction
from hodiff.rules.nesting import nestable_jvp
from hodiff.torch_internals.autograd.differentiation import may_be_differentiated
from hodiff.torch_internals.autograd.wrapped_tensors import below_transforms
from hodiff.torch_operators.table import forms_of

# Largest matrix size to eliminate. By solves, a determinant's k-th derivative loses 1 / distance to the power k - 1:
# at the distance below, the third derivative is still good.
_LARGEST = 64


def is_nearly_singular(pair: Tensor) -> bool:
    """Whether any matrix of a batch (L and U in one) is too singular for solves, and small enough to eliminate."""
    # A compiler sees no values: its solves give a determinant that is inaccurate or not finite.
    if torch.compiler.is_compiling() or pair.shape[-1] > _LARGEST or pair.device.type == "meta":
        return False
    pivots = below_transforms(pair).detach().diagonal(dim1=-2, dim2=-1).abs()
    smallest, largest = torch.aminmax(pivots, dim=-1)
    return bool((smallest <= torch.finfo(pair.dtype).eps ** (1 / 3) * largest).any())


def determinant_of_few(matrix: Tensor) -> Tensor:
    """Determinant of matrices (..., n, n) with up to three rows, as a polynomial."""
    rows = [row.unbind(-1) for row in matrix.unbind(-2)]
    return _expanded(rows) if rows else matrix.new_ones(matrix.shape[:-2])


def _expanded(rows: list[tuple[Tensor, ...]]) -> Tensor:
    """Laplace's expansion along the first row."""
    first, *others = rows
    if not others:
        return first[0]
    terms = [each * _expanded([row[:j] + row[j + 1 :] for row in others]) for j, each in enumerate(first)]
    total = terms[0]
    for j, term in enumerate(terms[1:], 1):
        total = total - term if j % 2 else total + term
    return total


def determinant_by_elimination(matrix: Tensor) -> Tensor:
    """Determinant of matrices (..., n, n), by complete pivoting down to four rows, which are expanded."""
    # Where a pivot is 0, the matrix has lost five ranks or more, and derivatives below the fifth are 0. The quotients
    # do not matter there, as long as they are finite.
    result = None
    while matrix.shape[-1] > 4:
        matrix, sign = _largest_first(matrix)
        pivot = matrix[..., 0, 0]
        divisor = pivot.where(pivot != 0, 1)[..., None, None]
        matrix = matrix[..., 1:, 1:] - matrix[..., 1:, :1] * (matrix[..., :1, 1:] / divisor)
        result = sign * pivot if result is None else sign * result * pivot
    rest = _expanded([row.unbind(-1) for row in matrix.unbind(-2)])
    return rest if result is None else result * rest


def _largest_first(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Move the largest element to the corner, and return the matrix with the sign change of the determinant."""
    n = matrix.shape[-1]
    place = matrix.detach().abs().flatten(-2).argmax(-1, keepdim=True)
    row, column = place // n, place % n
    matrix = matrix.take_along_dim(_swap(n, row)[..., :, None], -2).take_along_dim(_swap(n, column)[..., None, :], -1)
    return matrix, (1 - 2 * ((row != 0) ^ (column != 0)).to(matrix.dtype)).squeeze(-1)


def _swap(n: int, place: Tensor) -> Tensor:
    """Return the permutation of n places that swaps the first with another."""
    places = torch.arange(n, device=place.device)
    return torch.where(places == 0, place, torch.where(places == place, 0, places))


_determinant = partial(
    register,
    routes=FORWARD_INSIDE,
    reason="the forward rule solves with factors that second derivatives treat as constants",
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

    setup_context = staticmethod(save_inputs)

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

    setup_context = staticmethod(save_inputs)

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
    *forms_of("linalg.det"),
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


@_determinant(*forms_of("slogdet"), mended="2.15")
def _slogdet(input: Tensor) -> Any:
    return named("slogdet", _sign_and_logarithm(input)) if _is_square(input) else INVALID


@_determinant(*forms_of("logdet"), mended="2.15")
def _logdet(input: Tensor) -> Any:
    if not _is_square(input):
        return INVALID
    sign, size = _sign_and_logarithm(input)
    return size + sign.log() if input.is_complex() else size.where(sign != -1, torch.nan)


def _is_square(matrix: Tensor) -> bool:
    return matrix.dim() >= 2 and matrix.shape[-1] == matrix.shape[-2]
