"""Rules for eigenvalues and eigenvectors of general matrices."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hodiff.corrections.mechanism.declining import INVALID, UNNEEDED
from hodiff.corrections.mechanism.registry import register
from hodiff.corrections.rules.linalg.factored_solves import for_lapack, named, solve
from hodiff.corrections.rules.linalg.symmetric import (
    are_differentiated_again,
    diagonal,
    inverse_gaps,
    refuse_phases,
    warn_of_equal,
)
from hodiff.rules.any_order import AnyOrderFunction
from hodiff.rules.nesting import nestable_jvp
from hodiff.torch_internals.autograd.differentiation import may_be_differentiated


def _without_growth(vectors: Tensor, change: Tensor) -> Tensor:
    """Remove the change in length of eigenvectors: an orthogonal projection, which is its own adjoint."""
    growth = diagonal(vectors.mH @ change).real
    return change - vectors * growth.unsqueeze(-2)


class GeneralEigen(AnyOrderFunction):
    r"""Eigenvalues and eigenvectors of unit length. Saves the matrix and the result.

    $$ \dot \lambda = \operatorname{diag} E, \quad \dot V = \Pi \, V (E \circ G), \quad
       \bar A = V^{-H} (\operatorname{diag} \bar \lambda + (V^H \Pi \bar V) \circ \overline G) V^H, \quad
       E = V^{-1} \dot A V, \quad G_{ij} = 1 / (\lambda_j - \lambda_i), $$

    where $\Pi$ removes the change in length.
    """

    @staticmethod
    def forward(matrix: Tensor) -> tuple[Tensor, Tensor]:
        """Compute eigenvalues and eigenvectors by LAPACK."""
        eigenvalues, eigenvectors = torch.linalg.eig(matrix)
        return eigenvalues, eigenvectors

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        """Save the result for backward, as only the sum of all its gradients is independent of phases."""
        ctx.save_for_backward(*output)
        ctx.save_for_forward(*inputs)
        ctx.is_real = not inputs[0].is_complex()
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, values_bar: Tensor | None, vectors_bar: Tensor | None) -> Any:
        """Compute the gradient in the basis of eigenvectors."""
        if values_bar is None and vectors_bar is None:
            return None
        eigenvalues, vectors = ctx.saved_tensors
        if vectors_bar is not None or are_differentiated_again(vectors):
            warn_of_equal(eigenvalues)
        inner = None
        if vectors_bar is not None:
            refuse_phases(vectors, vectors_bar)
            inner = (vectors.mH @ _without_growth(vectors, vectors_bar)) * inverse_gaps(eigenvalues).conj()
        if values_bar is not None:
            spread = values_bar.diag_embed()
            inner = spread if inner is None else inner + spread
        matrix_bar = solve(vectors.mH, inner @ vectors.mH)
        return matrix_bar.real if ctx.is_real else matrix_bar

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, matrix_t: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the tangents by first-order perturbation theory."""
        (matrix,) = ctx.saved_tensors
        eigenvalues, vectors = GeneralEigen.call(matrix)
        if are_differentiated_again(matrix):
            warn_of_equal(eigenvalues)
        inner = solve(vectors, matrix_t.to(vectors.dtype) @ vectors)
        return diagonal(inner).clone(), _without_growth(vectors, vectors @ (inner * inverse_gaps(eigenvalues)))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], matrix: Tensor) -> Any:
        """Leading dimensions are batches."""
        del info
        return GeneralEigen.call(matrix.movedim(in_dims[0], 0)), (0, 0)


@register(
    torch.linalg.eig,
    routes=("reverse-over-forward",),
    reason="the derivative of the eigenvectors is NaN",
    reference="Giles, Collected matrix derivative results (2008), sec. 3.1",
    covers=for_lapack,
)
def _eig(A: Tensor) -> Any:
    if A.dim() < 2 or A.shape[-1] != A.shape[-2]:
        return INVALID
    return named("linalg_eig", GeneralEigen.call(A))


@register(
    torch.linalg.eigvals,
    reason="third derivatives through forward-over-reverse or forward-over-forward are wrong or NaN",
    reference="Giles, Collected matrix derivative results (2008), sec. 3.1",
    covers=for_lapack,
)
def _eigvals(A: Tensor) -> Any:
    # A compiler would differentiate the kernel.
    if torch.compiler.is_compiling() or not may_be_differentiated((A,)):
        return UNNEEDED
    if A.dim() < 2 or A.shape[-1] != A.shape[-2]:
        return INVALID
    return GeneralEigen.call(A)[0]
