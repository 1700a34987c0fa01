"""MAML with implicit gradients."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from hodiff.corrections import corrected
from hodiff.derivatives.trees import describe
from hodiff.errors import HodiffWarning, InputError, RouteError
from hodiff.meta.conjugate_gradients import conjugate_gradients
from hodiff.meta.learner import Batch, MetaLearner, Parameters


class IMAML(MetaLearner):
    r"""MAML whose meta-gradient depends on where the inner loop ends, not on how it got there.

    $$ \theta_i' = \arg\min_\phi L_i^{\text{support}}(\phi) + \tfrac\lambda2 \lVert \phi - \theta \rVert^2, \qquad
       g_i = \Bigl(I + \tfrac1\lambda \nabla^2 L_i^{\text{support}}(\theta_i')\Bigr)^{-1}
       \nabla L_i^{\text{query}}(\theta_i') $$

    by conjugate gradients, for all tasks at once. The inner loop keeps no graph, so memory does not grow with its
    steps. The result can be differentiated once.

    Args:
        module: Any `nn.Module`.
        loss: `loss(prediction, target)` of one task.
        lr: Inner learning rate.
        steps: Number of inner steps, enough to come near the minimum.
        strength: $\lambda$; it must outweigh negative curvature of the support loss.
        cg_steps: Most steps of conjugate gradients.
        cg_tolerance: Relative residual at which they stop; if they do not get there, a `HodiffWarning` says so.
        **options: As for `MAML`.

    Attributes:
        residual: Relative residuals of the last call, one a task.

    Raises:
        InputError: As for `MAML`, and if `strength` is not positive.

    Example:
        >>> import torch
        >>> x = torch.randn(3, 5, 1)
        >>> imaml = IMAML(torch.nn.Linear(1, 1), torch.nn.functional.mse_loss, lr=0.1, steps=20)
        >>> imaml((x, 2 * x, x, 2 * x)).backward()
        >>> bool((imaml.residual < 1e-3).all())
        True

    Source: A. Rajeswaran, C. Finn, S. Kakade, S. Levine, "Meta-learning with implicit gradients", 2019, eq. 6 and
    algorithm 2.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: Callable[[Any, Tensor], Tensor],
        lr: Any = 0.01,
        steps: int = 10,
        *,
        strength: float = 2.0,
        cg_steps: int = 20,
        cg_tolerance: float = 1e-3,
        **options: Any,
    ):
        super().__init__(module, loss, lr, steps, **options)
        if isinstance(strength, bool) or not isinstance(strength, (int, float)) or strength <= 0:
            raise InputError(f"IMAML: strength: expected a positive number, got {describe(strength)}.")
        self.strength, self.cg_steps, self.cg_tolerance = strength, cg_steps, cg_tolerance
        self.residual = torch.zeros(0)

    def make_inner_loss(self, start: Parameters) -> Callable[..., tuple[Tensor, Parameters]]:
        """The losses with their proximal terms."""
        total = super().make_inner_loss(start)

        def proximal(params: Parameters, batch: Batch, buffers: Parameters) -> tuple[Tensor, Parameters]:
            value, buffers = total(params, batch, buffers)
            squares = [(params[name] - start[name]).square().sum() for name in params]
            return value + self.strength / 2 * torch.stack(squares).sum(), buffers

        return proximal

    def forward(self, tasks: Any) -> Tensor:
        """The mean of the tasks' losses after adaptation."""
        values, sums, residuals = [], [], []
        for support_x, support_y, query_x, query_y in self.chunks(tasks):
            losses, gradients, residual = self._implicit((support_x, support_y), (query_x, query_y))
            values.append(losses)
            sums.append(gradients)
            residuals.append(residual)
        losses, self.residual = torch.cat(values), torch.cat(residuals)
        worst = float(self.residual.max())
        # A NaN is no success either.
        if not worst <= self.cg_tolerance:
            warnings.warn(
                f"IMAML: conjugate gradients stopped at a relative residual of {worst:.1e} after at most "
                f"{self.cg_steps} steps, above cg_tolerance={self.cg_tolerance:g}; raise cg_steps or strength.",
                HodiffWarning,
                stacklevel=3,
            )
        count = len(losses)
        gradients = [torch.stack(parts).sum(0) / count for parts in zip(*sums, strict=True)]
        start = list(self.adapted_parameters().values())
        return _GivenGradient.apply(losses.mean(), *start, *gradients)

    def _implicit(self, support: Batch, query: Batch) -> tuple[Tensor, list[Tensor], Tensor]:
        """Losses, the sum of the tasks' meta-gradients, and residuals."""
        with torch.no_grad():
            adapted = self.adapt_all(support)
        with torch.enable_grad(), corrected():
            params = {name: each.detach().requires_grad_() for name, each in adapted.params.items()}
            leaves = list(params.values())
            losses, buffers = self.losses(params, query, adapted.buffers)
            self.require_reach(losses)
            of_query = torch.autograd.grad(losses.sum(), leaves, materialize_grads=True)
            total, _ = super().make_inner_loss(params)(params, support, {k: v.clone() for k, v in buffers.items()})
            slopes = torch.autograd.grad(total, leaves, create_graph=True, materialize_grads=True)
        self.keep_statistics(buffers)

        def product(v: list[Tensor]) -> list[Tensor]:
            curved = [(s, u) for s, u in zip(slopes, v, strict=True) if s.requires_grad]
            if not curved:
                return v
            outputs, directions = zip(*curved, strict=True)
            Hv = torch.autograd.grad(outputs, leaves, directions, retain_graph=True, materialize_grads=True)
            return [u + each / self.strength for u, each in zip(v, Hv, strict=True)]

        solved = conjugate_gradients(product, of_query, steps=self.cg_steps, tolerance=self.cg_tolerance, systems=1)
        return losses.detach(), [each.sum(0) for each in solved.value], solved.residual


class _GivenGradient(Function):
    """A number with a gradient that was computed elsewhere: apply(value, *parameters, *gradients)."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, *others: Tensor) -> Tensor:
        ctx.count = len(others) // 2
        ctx.save_for_backward(*others[ctx.count :])
        return value.clone()

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise RouteError("IMAML: the implicit meta-gradient can be differentiated once; use MAML beyond that.")
        return None, *(cotangent * each for each in ctx.saved_tensors), *(None,) * ctx.count
