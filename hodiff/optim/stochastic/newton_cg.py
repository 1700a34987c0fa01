"""Newton's method with conjugate gradients, for a closure's loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hodiff.optim.stochastic.closures import Closure, require_closure
from hodiff.optim.stochastic.conjugate_gradients import iterates
from hodiff.optim.stochastic.found_graphs import explained
from hodiff.optim.stochastic.local_models import LocalModel, put_gradients
from hodiff.optim.stochastic.solver_settings import SolverOptimizer


class NewtonCG(SolverOptimizer):
    r"""Newton's method, its equations solved by conjugate gradients.

    $$ \theta \leftarrow \theta + \gamma\, p, \qquad (B + \mu I)\, p \approx -(g + \lambda \theta), \quad
       B = \nabla^2 f + \lambda I \;\text{ or }\; J^\top \nabla_z^2 \ell\, J + \lambda I $$

    Conjugate gradients stop at the tolerance, or where they meet a direction of curvature zero or less; the step is
    then what they have, and if that is none, the direction itself, of steepest descent. On a positive definite
    quadratic function one step with `lr=1` and enough iterations is exact. There is no line search: far from a minimum
    take `damping`, a smaller `lr`, or `HessianFree`.

    Args:
        params: Parameters, or groups of them with an `lr` of their own; real and floating-point.
        lr: $\gamma$, a number or a tensor of one.
        damping: $\mu$.
        weight_decay: $\lambda$, which stands for $\tfrac\lambda2 \|\theta\|^2$ beside the loss.
        curvature: "hessian" or "gauss-newton".
        cg_iterations: The most products in a step.
        cg_tolerance: Where to stop: norm of the residual over that of the gradient.
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

    Source: J. Nocedal & S. J. Wright, *Numerical Optimization*, 2nd ed., algorithm 7.1; N. N. Schraudolph, "Fast
    curvature matrix-vector products for second-order gradient descent", Neural Computation 14 (2002).
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
        maximize: bool = False,
    ):
        super().__init__(
            params,
            {
                "lr": lr,
                "damping": damping,
                "weight_decay": weight_decay,
                "curvature": curvature,
                "cg_iterations": cg_iterations,
                "cg_tolerance": cg_tolerance,
                "maximize": maximize,
            },
        )

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:
        """One step, which evaluates the closure once, within `hodiff.corrected()`, and sets gradients.

        Args:
            closure: Function without arguments that computes the loss and returns it, with its graph and without
                calling backward; with `curvature="gauss-newton"` it returns the pair (outputs, loss), outputs of the
                model and a function of them that returns one number.

        Returns:
            The loss before the step.

        Raises:
            InputError: If there is no closure, or it does not return that.
            RouteError: If torch does not implement a second derivative.
        """
        require_closure(self.caller, closure)
        assert closure is not None
        model = self.model(closure)
        put_gradients(model.parameters, model.leaves(model.gradient))
        solution = self._solution(model)
        self.add(model.leaves(solution), model.parameters)
        return model.loss

    def _solution(self, model: LocalModel) -> Tensor:
        sign = -1.0 if self.setting("maximize") else 1.0
        decay, damping = self.setting("weight_decay"), self.setting("damping")
        place = model.vector([p.detach() for p in model.parameters])
        right = -(sign * model.gradient + decay * place)
        enough = self.setting("cg_tolerance") * float(torch.linalg.vector_norm(right))

        def product(v: Tensor) -> Tensor:
            return sign * model.product(v) + (decay + damping) * v

        with explained(self.caller):
            for each in iterates(product, right):
                if each.descent is not None and not each.count:
                    return each.descent
                if each.residual <= enough or each.count >= self.setting("cg_iterations"):
                    break
        return each.x
