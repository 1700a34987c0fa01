"""The generalized Gauss-Newton matrix as an operator."""

from __future__ import annotations

from typing import Any

from hodiff.common.keyword_options import explains
from hodiff.common.trees import PyTree
from hodiff.derivatives.recorded_gradient import RecordedGradient
from hodiff.operators.linearized.curvature_options import CurvatureOptions
from hodiff.operators.linearized.kept_linearizations import Leaves
from hodiff.operators.linearized.model_loss import ModelLossOperator, OutputMatrix


@explains(CurvatureOptions)
class GaussNewtonOperator(ModelLossOperator):
    r"""The generalized Gauss-Newton matrix of a loss on a model's outputs, given by its products.

    $$ A v = J^\top \nabla_z^2 \ell(z, y)\, J v, \qquad z = m(x, \cdot),\; J = \partial z / \partial x $$

    The matrix is positive semi-definite for a loss that is convex in the outputs: cross-entropy, squared error, binary
    cross-entropy on logits, Poisson on log-rates, or any other. The Hessian in the outputs is the exact one of the
    given loss, with its weights, masks and label smoothing. The matrix is the Hessian without the model's curvature,
    and equals the Hessian if the model is linear in x.

    Args:
        model: Function `model(x, inputs)` that returns a tensor or a pytree of tensors; or an `nn.Module`, and `x` a
            dict of its parameters.
        loss: Function `loss(outputs, targets)` that returns a tensor of shape (), convex in the outputs.
        x: The point: a tensor or a pytree of tensors, n numbers in all.
        *args: `inputs, targets`; or one batch of another form, such as a dict, which is passed to both functions.
        **options: Options of all operators at a point.

    Raises:
        InputError: If an argument is invalid; on first use, as for `hodiff.HessianOperator`.

    Example:
        >>> import torch, hodiff
        >>> model = lambda w, inputs: inputs @ w
        >>> inputs = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
        >>> A = hodiff.GaussNewtonOperator(model, torch.nn.functional.mse_loss, torch.zeros(2), inputs, torch.ones(2))
        >>> A.to_dense()
        tensor([[1., 0.],
                [0., 4.]])

    Source: N. N. Schraudolph, "Fast curvature matrix-vector products for second-order gradient descent", Neural
    Computation 14 (2002), section 3.
    """

    def _matrix(self, outputs: PyTree, targets: Any) -> OutputMatrix:
        return _LossHessian(RecordedGradient(self._bound_loss(outputs, targets)))


class _LossHessian:
    def __init__(self, gradient: RecordedGradient):
        self._gradient = gradient

    def product(self, vectors: Leaves) -> Leaves:
        """See `OutputMatrix`."""
        return self._gradient.product(vectors, keep=True)

    def products(self, vectors: Leaves) -> Leaves:
        """See `OutputMatrix`."""
        return self._gradient.products(vectors)
