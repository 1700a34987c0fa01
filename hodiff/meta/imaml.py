"""MAML with implicit gradients."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd import Function

from hodiff.authoring.closures import refuse_captured_by
from hodiff.common.options import require_int, require_number
from hodiff.common.trees import describe
from hodiff.corrections import Corrections
from hodiff.derivatives.bound_function import at_the_boundary
from hodiff.errors import HodiffWarning, InputError, RouteError
from hodiff.graphs import inspect_graph
from hodiff.implicit.implicit_solutions import argmin
from hodiff.meta.batch_norms import moving_statistics, stacked
from hodiff.meta.inner_gradients import copied
from hodiff.meta.inverse_products import solve_tasks
from hodiff.meta.learner import Batch, MetaLearner, Parameters
from hodiff.meta.optimizer import Optimizer
from hodiff.recompute.surroundings import Surroundings
from hodiff.torch_internals.autograd.differentiation import only_reverse_mode


@dataclass(frozen=True)
class Minimum:
    """End points of the inner loops of some tasks, with the inputs and states to evaluate their losses again."""

    support: Batch
    query: Batch
    params: Parameters
    buffers: Parameters
    around_support: Surroundings
    around_query: Surroundings


class IMAML(MetaLearner):
    r"""MAML whose meta-gradient depends on the end of the inner loop, not on its path.

    $$ \theta_i' = \arg\min_\phi L_i^{\text{support}}(\phi) + \tfrac\lambda2 \lVert \phi - \theta \rVert^2, \qquad
       g_i = \Bigl(I + \tfrac1\lambda \nabla^2 L_i^{\text{support}}(\theta_i')\Bigr)^{-1}
       \nabla L_i^{\text{query}}(\theta_i') $$

    by conjugate gradients, for all tasks at once. The inner loop keeps no graph, so memory does not grow with the
    number of steps.

    The result can be differentiated to any order, by every route and under `torch.func` transforms, like
    `hodiff.implicit.argmin`: each order solves further systems with the same matrix. All derivatives assume that the
    inner loop ends at the minimum. Their errors are of the size of its gradient there and of `cg_tolerance`. The
    meta-gradient is used even if the inner loop ends before the minimum; for higher derivatives a `HodiffWarning`
    reports the distance.

    Args:
        module: Any `nn.Module`.
        loss: `loss(prediction, target)` of one task.
        lr: Inner learning rate.
        steps: Number of inner steps, enough to come near the minimum.
        strength: $\lambda$; it must exceed the negative curvature of the support loss.
        cg_steps: Maximum number of conjugate gradient steps.
        cg_tolerance: Relative residual at which conjugate gradients stop; a `HodiffWarning` reports if it is not
            reached.
        optimizer: Functional optimizer for the inner steps, in place of `SGD(lr)`; see `MAML` for all further options.
        checkpoint: Recompute inner steps in segments of this length, which saves memory.
        truncate: Number of last inner steps that are differentiated.
        clip: Largest norm of a task's inner gradient.
        route: How inner gradients are differentiated: "auto", "reverse-over-reverse" or "forward-over-reverse".
        batch_norm: Running statistics of batch norm layers in training mode: "per-task", "shared" or "frozen".
        chunk_size: Number of tasks that are evaluated together; all by default.
        generator: Generator that seeds the random numbers of the inner loops.
        check_finite: Whether to raise if numbers in an inner loop are not finite.
        first_order: Whether inner gradients count as constants.

    Attributes:
        residual: Relative residuals of the last call, one for each task.

    Raises:
        InputError: As for `MAML`, and if `strength`, `cg_steps` or `cg_tolerance` is not positive.

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
        optimizer: Optimizer | None = None,
        checkpoint: int | None = None,
        truncate: int | None = None,
        clip: float | Tensor | None = None,
        route: str = "auto",
        batch_norm: str = "per-task",
        chunk_size: int | None = None,
        generator: torch.Generator | None = None,
        check_finite: bool = True,
        first_order: bool = False,
    ):
        super().__init__(
            module,
            loss,
            lr,
            steps,
            optimizer=optimizer,
            checkpoint=checkpoint,
            truncate=truncate,
            clip=clip,
            route=route,
            batch_norm=batch_norm,
            chunk_size=chunk_size,
            generator=generator,
            check_finite=check_finite,
            first_order=first_order,
        )
        require_number("IMAML", "strength", strength, positive=True)
        require_int("IMAML", "cg_steps", cg_steps, 1)
        require_number("IMAML", "cg_tolerance", cg_tolerance, positive=True)
        self.strength, self.cg_steps, self.cg_tolerance = strength, cg_steps, cg_tolerance
        self.residual = torch.zeros(0, device="cpu")

    def make_inner_loss(self, start: Parameters) -> Callable[..., tuple[Tensor, Parameters]]:
        """Return the sum of the losses with their proximal terms."""
        total = super().make_inner_loss(start)

        def proximal(params: Parameters, batch: Batch, buffers: Parameters) -> tuple[Tensor, Parameters]:
            value, buffers = total(params, batch, buffers)
            squares = [(params[name] - start[name]).square().sum() for name in start]
            return value + self.strength / 2 * torch.stack(squares).sum(), buffers

        return proximal

    @at_the_boundary
    def forward(self, tasks: Any) -> Tensor:
        """Return the mean of the tasks' losses after adaptation."""
        if not only_reverse_mode():
            return torch.cat([
                self._at_minimum((support_x, support_y), (query_x, query_y))
                for support_x, support_y, query_x, query_y in self.chunks(tasks)
            ]).mean()
        values, sums, residuals, minima = [], [], [], []
        for support_x, support_y, query_x, query_y in self.chunks(tasks):
            losses, gradients, residual, minimum = self._implicit((support_x, support_y), (query_x, query_y))
            values.append(losses)
            sums.append(gradients)
            residuals.append(residual)
            minima.append(minimum)
        self.keep_statistics([each.buffers for each in minima])
        losses, self.residual = torch.cat(values), torch.cat(residuals)
        worst = float(self.residual.max())
        # NaN fails this test, too.
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
        return _GivenGradient.apply(partial(self._evaluated_again, minima), losses.mean(), *start, *gradients)

    def _implicit(self, support: Batch, query: Batch) -> tuple[Tensor, list[Tensor], Tensor, Minimum]:
        """Compute losses, the sum of the tasks' meta-gradients, residuals, and the minima."""
        with torch.no_grad():
            adapted = self.adapt_all(support)
        with torch.enable_grad(), Corrections():
            params = {name: each.detach().requires_grad_() for name, each in adapted.params.items()}
            leaves = list(params.values())
            around_query = Surroundings(leaves, ())
            losses, buffers = self.losses(params, query, adapted.buffers)
            self.require_reach(losses)
            refuse_other_leaves(losses, leaves)
            of_query = torch.autograd.grad(losses.sum(), leaves, materialize_grads=True)
            around_support = Surroundings(leaves, ())
            total, _ = super().make_inner_loss(params)(params, support, copied(buffers))
            refuse_other_leaves(total, leaves)
            slopes = torch.autograd.grad(total, leaves, create_graph=True, materialize_grads=True)

        def product(v: list[Tensor]) -> list[Tensor]:
            curved = [(s, u) for s, u in zip(slopes, v, strict=True) if s.requires_grad]
            if not curved:
                return v
            outputs, directions = zip(*curved, strict=True)
            Hv = torch.autograd.grad(outputs, leaves, directions, retain_graph=True, materialize_grads=True)
            return [u + each / self.strength for u, each in zip(v, Hv, strict=True)]

        solved, residual = solve_tasks(product, of_query, steps=self.cg_steps, tolerance=self.cg_tolerance)
        plain = {name: each.detach() for name, each in params.items()}
        minimum = Minimum(support, query, plain, buffers, around_support, around_query)
        return losses.detach(), [each.sum(0) for each in solved], residual, minimum

    def _evaluated_again(self, minima: Sequence[Minimum], start: Sequence[Tensor]) -> Tensor:
        """Compute the mean loss as a function of the common start of all tasks, differentiable to any order."""
        losses = []
        for each in minima:
            tasks = len(each.support[0])
            starts = {name: x.expand(tasks, *x.shape) for name, x in zip(self.names, start, strict=True)}
            params = self._minimiser(
                lambda *_, found=each.params: found, starts, each.support, each.buffers, each.around_support
            )
            with each.around_query.restored(), Corrections():
                losses.append(self.losses(params, each.query, copied(each.buffers))[0])
        return torch.cat(losses).mean()

    def _at_minimum(self, support: Batch, query: Batch) -> Tensor:
        """Compute the losses inside transforms and forward mode."""
        buffers = stacked(moving_statistics(self.module, self.batch_norm), len(support[0]))
        if buffers and self.batch_norm == "shared":
            raise RouteError(
                "IMAML: batch_norm='shared' updates the module's statistics, which torch.func transforms and forward "
                "mode do not support; use 'per-task' or 'frozen', or .backward()."
            )
        starts = self.starts(len(support[0]))

        def adapted(
            _: Any, x0: Parameters, start: Parameters, support: Batch, others: Parameters, buffers: Parameters
        ) -> Parameters:
            del x0, buffers
            return self.adapt_all(support, start=start, constants=others).params

        params = self._minimiser(adapted, starts, support, buffers, Surroundings(starts.values(), ()))
        with Corrections():
            return self.losses(params, query, copied(buffers))[0]

    def _minimiser(
        self,
        solver: Callable[..., Parameters],
        starts: Parameters,
        support: Batch,
        buffers: Parameters,
        around: Surroundings,
    ) -> Parameters:
        """Return the adapted parameters of all tasks as a function of their starts."""
        tasks = len(support[0])
        others = {
            name: each.expand(tasks, *each.shape)
            for name, each in self.module.named_parameters()
            if name not in self.names
        }
        refuse_captured_by("IMAML", self.loss)
        # All parameters of the module are arguments; argmin would find and reject those that it reaches through `self`.
        learner = weakref.ref(self)

        def objective(
            params: Parameters, starts: Parameters, support: Batch, others: Parameters, buffers: Parameters
        ) -> Tensor:
            total = cast(IMAML, learner()).make_inner_loss(starts)
            # Every evaluation must be of the same function, including random numbers.
            with around.restored():
                return total({**params, **others}, support, copied(buffers))[0]

        def solve(product: Callable[[Parameters], Parameters], rhs: Parameters) -> Parameters:
            def listed(v: list[Tensor]) -> list[Tensor]:
                return list(product(dict(zip(rhs, v, strict=True))).values())

            b = list(rhs.values())
            solved, _ = solve_tasks(listed, b, steps=self.cg_steps, tolerance=self.cg_tolerance)
            return dict(zip(rhs, solved, strict=True))

        return argmin(objective, solver, linear_solver=solve, tol=self.cg_tolerance)(
            starts, starts, support, others, buffers
        )


def refuse_other_leaves(value: Tensor, leaves: Sequence[Tensor]) -> None:
    """Raise if a loss has derivatives that the implicit meta-gradient would lose."""
    own = set(map(id, leaves))
    others = [each for each in inspect_graph(value)[0] if id(each) not in own]
    if others:
        raise InputError(
            "IMAML: loss: expected a loss that depends only on the adapted parameters, got one that also depends on "
            f"{describe(others[0])}, whose derivative would be lost; use its .detach(), or MAML."
        )


class _GivenGradient(Function):
    """Identity on a number with a precomputed gradient: apply(again, value, *parameters, *gradients).

    `again` computes the number as a function of the parameters, for higher derivatives.
    """

    @staticmethod
    def forward(ctx: Any, again: Callable[[Sequence[Tensor]], Tensor], value: Tensor, *others: Tensor) -> Tensor:
        ctx.count, ctx.again = len(others) // 2, again
        ctx.save_for_backward(*others)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        start, gradients = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :]
        if torch.is_grad_enabled():
            moving = [each for each in start if each.requires_grad]
            found = iter(torch.autograd.grad(ctx.again(start), moving, create_graph=True, materialize_grads=True))
            gradients = [next(found) if each.requires_grad else None for each in start]
        return None, None, *(None if each is None else cotangent * each for each in gradients), *(None,) * ctx.count
