"""Rules for eigenvalues and eigenvectors of symmetric matrices, and for Cholesky factors."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hodiff.corrections.mechanism.declining import INVALID, UNNEEDED
from hodiff.corrections.mechanism.registry import register
from hodiff.corrections.mechanism.values import numbers_of, with_value
from hodiff.corrections.rules.linalg.factored_solves import for_lapack, named
from hodiff.errors import HodiffWarning, RouteError
from hodiff.routes import ROUTES
from hodiff.rules.any_order import AnyOrderFunction
from hodiff.rules.nesting import nestable_jvp
from hodiff.torch_internals.autograd.batching import is_legacy_batched
from hodiff.torch_internals.autograd.differentiation import carry_derivatives, may_be_differentiated
from hodiff.torch_internals.autograd.grad_mode import in_forward_mode
from hodiff.torch_internals.autograd.wrapped_tensors import below_one, is_wrapped
from hodiff.torch_operators.table import forms_of


def hermitian_part(matrix: Tensor) -> Tensor:
    """Compute (A + Aᴴ) / 2."""
    return (matrix + matrix.mH) / 2


def whole_of(matrix: Tensor, *, upper: bool) -> Tensor:
    """Return the Hermitian matrix with one triangle of A, differentiated as if it were A's Hermitian part."""
    constant, part = matrix.detach(), hermitian_part(matrix)
    half = constant.triu(1) if upper else constant.tril(-1)
    whole = half + half.mH + diagonal(hermitian_part(constant)).diag_embed()
    # The other triangle may hold anything, also NaN. A compiler cannot take the value of another tensor: it adds 0.
    return whole + (part - part.detach()) if torch.compiler.is_compiling() else with_value(part, whole)


def _whole_if_needed(matrix: Tensor, *, upper: bool) -> Tensor:
    # Torch's reverse mode of real matrices is that of the Hermitian part; of complex ones it is not Hermitian.
    needed = matrix.is_complex() or torch.compiler.is_compiling() or in_forward_mode()
    return whole_of(matrix, upper=upper) if needed and matrix.dim() >= 2 else matrix


_is_no_transpose = partial(
    register,
    routes=ROUTES[1:],
    reason="tangents that are not symmetric: forward mode is not the transpose of reverse mode",
    reference="derivatives by the Hermitian part, as in torch's reverse mode",
    covers=for_lapack,
)


@_is_no_transpose(torch.linalg.cholesky)
def _cholesky(A: Tensor, *, upper: bool = False) -> Any:
    return torch.linalg.cholesky(_whole_if_needed(A, upper=upper), upper=upper)


def _is_hermitian(A: Tensor, rcond: Any = None, hermitian: bool = False, *, out: Any = None, **_: Any) -> bool:
    return hermitian and A.dim() >= 2 and for_lapack(A, out=out)


@register(
    torch.linalg.pinv,
    routes=ROUTES,
    reason="with hermitian=True the value reads one triangle, and the derivatives read both",
    reference="derivatives by the Hermitian part",
    covers=_is_hermitian,
)
def _pinv(A: Tensor, rcond: Any = None, hermitian: bool = False, *, atol: Any = None, rtol: Any = None) -> Any:
    if not may_be_differentiated((A,)):
        return UNNEEDED
    tolerances = {"atol": atol, "rtol": rtol} if rcond is None else {"rcond": rcond}
    return torch.linalg.pinv(whole_of(A, upper=False), **tolerances, hermitian=hermitian)


# torch 2.14 removed torch.cholesky.
if torch.__version__ < "2.14":

    @register(
        *forms_of("cholesky"),
        kind="missing",
        routes=ROUTES[1:],
        reason="there is no forward rule",
        reference="torch.linalg.cholesky",
        covers=for_lapack,
    )
    def _old_cholesky(input: Tensor, upper: bool = False) -> Tensor:
        return torch.linalg.cholesky(_whole_if_needed(input, upper=upper), upper=upper)


@register(
    torch.linalg.cholesky_ex,
    routes=ROUTES,
    reason="a matrix without a Cholesky factor (info > 0) gets derivatives as if it had one",
    reference="NaN for such a matrix, torch's derivatives otherwise",
    covers=for_lapack,
)
def _cholesky_ex(input: Tensor, *, upper: bool = False, check_errors: bool = False) -> Any:
    if not may_be_differentiated((input,)):
        return UNNEEDED
    whole = _whole_if_needed(input, upper=upper)
    factor, info = torch.linalg.cholesky_ex(whole, upper=upper, check_errors=check_errors)
    failed = (info != 0)[..., None, None]
    # 0 with derivatives NaN where there is no factor. The constant 1 elsewhere keeps NaN out of the other matrices.
    unknown = (0 * input.where(input.isfinite(), 0)).where(failed, 1).sqrt()
    return named("linalg_cholesky_ex", (torch.where(failed, factor + unknown, factor), info))


def inverse_gaps(eigenvalues: Tensor) -> Tensor:
    """1 / (l_j - l_i), (..., n, n), with zeros on the diagonal; infinite where eigenvalues are repeated."""
    # Avoid infinities on the diagonal, whose derivatives would be NaN.
    same = torch.eye(eigenvalues.shape[-1], dtype=torch.bool, device=eigenvalues.device)
    differences = eigenvalues.unsqueeze(-2) - eigenvalues.unsqueeze(-1)
    return (1 / differences.where(~same, 1)).where(~same, 0)


def are_nearly_equal(eigenvalues: Tensor) -> bool:
    r"""Whether some eigenvalues differ by less than $\sqrt\varepsilon$ of the largest, mostly by rounding."""
    numbers = numbers_of(eigenvalues)
    if numbers is None or numbers.shape[-1] < 2:
        return False
    same = torch.eye(numbers.shape[-1], dtype=torch.bool, device=numbers.device)
    gaps = (numbers.unsqueeze(-2) - numbers.unsqueeze(-1)).abs().masked_fill(same, torch.inf).amin((-2, -1))
    return bool((gaps <= torch.finfo(numbers.dtype).eps ** 0.5 * numbers.abs().amax(-1)).any())


def warn_of_equal(eigenvalues: Tensor) -> None:
    """Warn if derivatives divide by a difference of eigenvalues that is mostly rounding."""
    if are_nearly_equal(eigenvalues):
        warnings.warn(
            "eigenvalues: got eigenvalues that are equal, or differ by less than "
            f"{torch.finfo(eigenvalues.dtype).eps ** 0.5:.1e} of the largest. Derivatives of eigenvectors, and second "
            "derivatives of eigenvalues, divide by the difference: they lose digits, or are NaN. For a function of a "
            "symmetric matrix, such as its logarithm or the sum of f(eigenvalues), use "
            "hodiff.functions.spectral_function(A, f), or its trace.",
            HodiffWarning,
            stacklevel=2,
        )


def are_differentiated_again(tensor: Tensor) -> bool:
    """Whether another derivative passes through a tensor of a rule while the rule runs."""
    return torch.is_grad_enabled() and carry_derivatives((below_one(tensor) if is_wrapped(tensor) else tensor,))


def refuse_phases(eigenvectors: Tensor, vectors_bar: Tensor) -> None:
    """Raise if a loss depends on the phases of complex eigenvectors, in the cases in which torch raises."""
    if (
        not eigenvectors.is_complex()
        or torch.compiler.is_compiling()
        or is_wrapped(vectors_bar)
        or is_legacy_batched(vectors_bar)
    ):
        return
    turning = diagonal(eigenvectors.mH @ vectors_bar).imag
    # The tolerance is relative for large gradients, whose rounding exceeds torch's bound.
    size = float(vectors_bar.detach().abs().max()) if vectors_bar.numel() else 0.0
    if not torch.allclose(turning, torch.zeros_like(turning), atol=1e-2 * max(size, 1.0), rtol=1e-2):
        raise RouteError(
            "eigenvectors: expected a loss that does not depend on the phases of complex eigenvectors, which are not "
            f"determined; got a gradient along them of up to {float(turning.detach().abs().max()):.2g}."
        )


def diagonal(matrix: Tensor) -> Tensor:
    """Return the diagonal of the last two dimensions."""
    return matrix.diagonal(dim1=-2, dim2=-1)


class SymmetricEigen(AnyOrderFunction):
    r"""Eigenvalues and eigenvectors of a symmetric or Hermitian matrix. Saves the matrix and the result.

    $$ \dot \lambda = \operatorname{Re} \operatorname{diag} E, \quad \dot V = V (E \circ G), \quad
       \bar A = V (\operatorname{diag} \bar \lambda + \operatorname{herm}((V^H \bar V) \circ G)) V^H, \quad
       E = \operatorname{herm}(V^H \dot A V), \quad G_{ij} = 1 / (\lambda_j - \lambda_i) $$

    The derivatives are those by the Hermitian part $\operatorname{herm} A = (A + A^H) / 2$, so that all routes agree.
    """

    @staticmethod
    def forward(matrix: Tensor, triangle: str) -> tuple[Tensor, Tensor]:
        """Compute eigenvalues and eigenvectors by LAPACK; compiled code refines them for its derivatives."""
        if torch.compiler.is_compiling():
            return _refined(matrix, triangle)
        eigenvalues, eigenvectors = torch.linalg.eigh(matrix, triangle)
        return eigenvalues, eigenvectors

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        """Save the result for backward, as only the sum of all its gradients is independent of signs and phases."""
        matrix, ctx.triangle = inputs
        ctx.save_for_backward(*output)
        ctx.save_for_forward(matrix)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, values_bar: Tensor | None, vectors_bar: Tensor | None) -> Any:
        """Compute the gradient in the basis of eigenvectors."""
        if values_bar is None and vectors_bar is None:
            return None, None
        eigenvalues, eigenvectors = ctx.saved_tensors
        # To first order, repeated eigenvalues do no harm without a cotangent of the eigenvectors.
        if vectors_bar is not None or are_differentiated_again(eigenvectors):
            warn_of_equal(eigenvalues)
        inner: Any = None if values_bar is None else values_bar.diag_embed()
        if vectors_bar is not None:
            refuse_phases(eigenvectors, vectors_bar)
            turned = hermitian_part((eigenvectors.mH @ vectors_bar) * inverse_gaps(eigenvalues))
            inner = turned if inner is None else turned + inner
        return eigenvectors @ inner.to(eigenvectors.dtype) @ eigenvectors.mH, None

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, matrix_t: Tensor, _: None) -> tuple[Tensor, Tensor]:
        """Compute the tangents by first-order perturbation theory."""
        (matrix,) = ctx.saved_tensors
        eigenvalues, eigenvectors = SymmetricEigen.call(matrix, ctx.triangle)
        if are_differentiated_again(matrix):
            warn_of_equal(eigenvalues)
        inner = hermitian_part(eigenvectors.mH @ matrix_t @ eigenvectors)
        shifts = diagonal(inner).real if inner.is_complex() else diagonal(inner)
        return shifts.clone(), eigenvectors @ (inner * inverse_gaps(eigenvalues))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], matrix: Tensor, triangle: str) -> Any:
        """Leading dimensions are batches."""
        del info
        return SymmetricEigen.call(matrix.movedim(in_dims[0], 0), triangle), (0, 0)


def _refined(matrix: Tensor, triangle: str, steps: int = 3) -> tuple[Tensor, Tensor]:
    """Compute the decomposition by operators that a compiler differentiates correctly up to seven times."""
    # Start from constant eigenvectors. Each step doubles the number of correct derivatives. Ogita & Aishima,
    # Iterative refinement for symmetric eigenvalue decomposition (2018), alg. 1.
    _, vectors = torch.linalg.eigh(matrix.detach(), triangle)
    matrix = whole_of(matrix, upper=triangle in "Uu")
    identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    for _ in range(steps):
        residual = identity - vectors.mH @ vectors
        lengths = diagonal(residual)
        inner = vectors.mH @ matrix @ vectors
        eigenvalues = _real_part(diagonal(inner) / (1 - lengths))
        turned = (inner + residual * eigenvalues.unsqueeze(-2)) * inverse_gaps(eigenvalues)
        vectors = vectors + vectors @ (turned + (lengths / 2).diag_embed())
    return _real_part(diagonal(vectors.mH @ matrix @ vectors) / diagonal(vectors.mH @ vectors)), vectors


def _real_part(x: Tensor) -> Tensor:
    return x.real if x.is_complex() else x


@register(
    torch.linalg.eigh,
    routes=("reverse-over-forward",),
    reason="the derivative of the eigenvectors is NaN",
    reference="Giles, Collected matrix derivative results (2008), sec. 3.1",
    covers=for_lapack,
)
def _eigh(A: Tensor, UPLO: str = "L") -> Any:
    if A.dim() < 2 or A.shape[-1] != A.shape[-2]:
        return INVALID
    return named("linalg_eigh", SymmetricEigen.call(A, UPLO))


@register(
    torch.linalg.eigvalsh,
    reason="third derivatives through forward-over-reverse or forward-over-forward are NaN or wrong",
    reference="Giles, Collected matrix derivative results (2008), sec. 3.1",
    covers=for_lapack,
)
def _eigvalsh(A: Tensor, UPLO: str = "L") -> Any:
    if not may_be_differentiated((A,)):
        return UNNEEDED
    if A.dim() < 2 or A.shape[-1] != A.shape[-2]:
        return INVALID
    return SymmetricEigen.call(A, UPLO)[0]
