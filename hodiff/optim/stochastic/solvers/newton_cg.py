"""Newton's method with conjugate gradients, for a closure's loss."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hodiff.optim.stochastic.local_models import CURVATURES, LocalModel
from hodiff.optim.stochastic.settings import settings_in
from hodiff.optim.stochastic.solvers.truncated_newton import TruncatedNewtonOptimizer


class NewtonCG(TruncatedNewtonOptimizer):
    r"""Newton's method with equations solved by conjugate gradients.

    $$ \theta \leftarrow \theta + \gamma\, p, \qquad (B + \mu I)\, p \approx -(g + \lambda \theta), \quad
       B = \nabla^2 f + \lambda I \;\text{ or }\; J^\top \nabla_z^2 \ell\, J + \lambda I $$

    Conjugate gradients stop at the tolerance, or at a direction of curvature zero or less. The step is then the current
    iterate, or, if there is none yet, the direction itself, that of steepest descent. On a positive definite quadratic
    function one step with `lr=1` and enough iterations is exact. Far from a minimum use `damping`, a smaller `lr`, a
    line search, or `HessianFree`. If the loss draws dropout or other random numbers anew in each step, the step solves
    the equations of one draw and is far too long for the next. Without a large `damping` it then diverges, and with a
    line search it makes no progress.

    Args:
        params: Parameters, or groups of them with separate `lr`; real and floating-point.
        lr: $\gamma$, a number or a tensor with one number.
        damping: $\mu$.
        weight_decay: $\lambda$, which adds $\tfrac\lambda2 \|\theta\|^2$ to the loss, for the parameters on which the
            loss depends.
        curvature: "hessian" or "gauss-newton".
        cg_iterations: Maximum number of products in a step.
        cg_tolerance: Norm of the residual, relative to the gradient, at which conjugate gradients end.
        line_search_fn: "backtracking" halves the step, from `lr` on, until the loss falls by 1e-4 of the decrease that
            the slope predicts, with one evaluation of the closure for each trial. If that fails, the parameters do not
            change. None takes the full step.
        maximize: Whether to ascend.

    Raises:
        InputError: If a setting is out of its range, or a parameter complex.

    Example:
        >>> import torch, hodiff
        >>> w = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
        >>> optimizer = hodiff.optim.NewtonCG([w])
        >>> loss = optimizer.step(lambda: w[0] ** 2 + 10 * (w[1] - w[0] - 1) ** 2)
        >>> torch.allclose(w, torch.tensor([0.0, 1.0]), atol=1e-5)
        True

    Source: J. Nocedal & S. J. Wright, *Numerical Optimization*, 2nd ed., algorithms 3.1 and 7.1; N. N. Schraudolph,
    "Fast curvature matrix-vector products for second-order gradient descent", Neural Computation 14 (2002).
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1.0,
        damping: float = 0.0,
        weight_decay: float = 0.0,
        *,
        curvature: str = "hessian",
        cg_iterations: int = 100,
        cg_tolerance: float = 1e-6,
        line_search_fn: str | None = None,
        maximize: bool = False,
    ):
        super().__init__(params, settings_in(locals()))

    def _models(self, returned: Any) -> list[LocalModel]:
        return [self.model(returned, self.reached(returned))]

    @property
    def kind(self) -> type[LocalModel]:
        """See `SolverOptimizer`."""
        return CURVATURES[self.setting("curvature")]
