r"""Rule for the matrix exponential, whose derivatives lose digits in torch for large tangents and gradients.

A derivative is a corner of the exponential of a block matrix, which is scaled by its norm and squared:

$$ \exp \begin{pmatrix} A & E \\ 0 & A \end{pmatrix} =
   \begin{pmatrix} e^A & L(A, E) \\ 0 & e^A \end{pmatrix}. $$

For an E of norm $10^{20}$, A is halved with it some sixty times and loses all digits. E is divided by its size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hodiff.corrections.mechanism.registry import register
from hodiff.corrections.mechanism.values import save_inputs
from hodiff.corrections.rules.linalg.factored_solves import for_lapack
from hodiff.routes import ROUTES
from hodiff.rules.any_order import AnyOrderFunction
from hodiff.rules.nesting import nestable_jvp
from hodiff.torch_internals.autograd.batching import is_legacy_batched
from hodiff.torch_operators.table import forms_of


class MatrixExponential(AnyOrderFunction):
    r"""$e^A$, with $\dot Y = L(A, \dot A)$ and $\bar A = L(A^H, \bar Y)$. Saves A."""

    @staticmethod
    def forward(matrix: Tensor) -> Tensor:
        """Compute the exponential by torch's scaling and squaring."""
        return torch.linalg.matrix_exp(matrix.contiguous())  # torch calls `view`, which other layouts do not allow

    setup_context = staticmethod(save_inputs)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor | None) -> Tensor | None:
        """Pull back by the adjoint."""
        (matrix,) = ctx.saved_tensors
        return None if cotangent is None else _along(matrix.mT.conj_physical(), cotangent)

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        """Push forward."""
        (matrix,) = ctx.saved_tensors
        return _along(matrix, tangent)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int], matrix: Tensor) -> Any:
        """Leading dimensions are batches."""
        del info
        return MatrixExponential.call(matrix.movedim(in_dims[0], 0)), 0


def _along(matrix: Tensor, direction: Tensor) -> Tensor:
    """L(A, E), which is linear in E at every size."""
    if not direction.numel():
        return direction.clone()
    # Batches of `is_grads_batched` cannot be detached; the derivatives of the size cancel.
    constant = direction if is_legacy_batched(direction) else direction.detach()
    size = constant.abs().amax((-2, -1), keepdim=True)
    size = torch.where((size > 0) & size.isfinite(), size, 1)
    block = torch.cat(
        [torch.cat([matrix, direction / size], -1), torch.cat([torch.zeros_like(matrix), matrix], -1)], -2
    )
    n = matrix.shape[-1]
    corner: Tensor = MatrixExponential.call(block)[..., :n, n:]
    return corner * size


@register(
    *forms_of("linalg.matrix_exp"),
    routes=ROUTES,
    reason="derivatives are not linear: they lose digits if gradients or tangents are large or small",
    reference="N. J. Higham, Functions of matrices (2008), equation 3.16, for a direction of norm one",
    covers=for_lapack,
)
def _matrix_exp(input: Tensor) -> Any:
    exponential: Tensor = MatrixExponential.call(input)
    return exponential
