"""The generalized Gauss-Newton matrix as an operator."""

from __future__ import annotations

from typing import Any

from hodiff.common.trees import PyTree
from hodiff.derivatives.recorded_gradient import RecordedGradient
from hodiff.operators.gauss_newton.exact_diagonal import ModelDiagonal
from hodiff.operators.linearized.kept_linearizations import Leaves
from hodiff.operators.linearized.model_loss import OutputMatrix


class GaussNewtonOperator(ModelDiagonal):
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
        data: Batches to sum over, instead of `args`; `hodiff.HessianOperator` explains this and the further options.
        reduction: Reduction of the loss over the examples of a batch, "mean" or "sum".
        batch_size: Function that returns the number of examples in a batch; by default the divisor of torch's loss.
        compile: Whether to compile the products, with "dynamic" for batches of any size.
        process_group: Process group of `torch.distributed` over whose ranks the operator is summed.
        cache: Whether to keep the linearizations of batches: "auto" within `memory_budget`, True or False.
        memory_budget: Memory for kept linearizations in bytes, 1 GiB by default; see `hodiff.HessianOperator`.
        chunk_size: Number of columns of a block that are multiplied together: a positive int, None for all, or "auto".
        check_deterministic: Whether to evaluate the function twice at the first use, and to refuse values that differ.
            Later operators of a module evaluate it twice only if its training mode has changed or it draws random
            numbers.
        randomness: Treatment of random numbers in the function: "error", or "fixed" for the curvature of one draw.
        progress: Whether to show a progress bar for each pass over the data.
        correct: Whether hodiff's rules replace torch's wrong and missing ones.

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
