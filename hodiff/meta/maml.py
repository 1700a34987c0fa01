"""Meta-learners that differentiate through the inner loop: MAML, FOMAML, ANIL and Meta-SGD."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hodiff.common.options import require_number
from hodiff.common.trees import describe
from hodiff.errors import InputError
from hodiff.meta.learner import MetaLearner
from hodiff.meta.optimizer import Optimizer, Setting
from hodiff.meta.sgd import SGD


class MAML(MetaLearner):
    r"""Model-agnostic meta-learning.

    $$ \min_\theta \frac1n \sum_{i=1}^n L_i^{\text{query}}(\theta_i'), \qquad
       \theta_i' = \theta - \alpha \nabla L_i^{\text{support}}(\theta) \quad \text{(and further steps)} $$

    A call returns this mean, differentiable in `parameters()` to any order. Tasks are a tuple `(support_x, support_y,
    query_x, query_y)` of tensors with the tasks along the first dimension, which go through the module together under
    `torch.func.vmap`; or a list of such tuples, one for each task.

    Args:
        module: Any `nn.Module`, unchanged. Parameters that are frozen now do not change; tied parameters stay tied.
        loss: `loss(prediction, target)` of one task, a tensor of shape `()`.
        lr: Inner learning rate $\alpha$, which may be a tensor with gradient.
        steps: Number of inner steps.
        optimizer: Functional optimizer for the inner steps, in place of `SGD(lr)`; `MetaSGD` has its own.
        checkpoint: Recompute inner steps in segments of this length, which saves memory; see `adapt`.
        truncate: Number of last inner steps that are differentiated; see `adapt`.
        clip: Largest norm of a task's inner gradient.
        route: How inner gradients are differentiated: "auto", "reverse-over-reverse" or "forward-over-reverse"; see
            `adapt`.
        batch_norm: Running statistics of batch norm layers in training mode: "per-task", each task updates a copy,
            which is discarded; "shared", the module's statistics become the mean of these copies; "frozen", the layers
            normalize by their running statistics, as in evaluation mode, and do not update them.
        chunk_size: Number of tasks that are evaluated together; all by default.
        generator: Generator that seeds the random numbers of the inner loops, such as dropout's; torch's global state
            by default.
        check_finite: Whether to raise if numbers in an inner loop are not finite.
        first_order: Whether inner gradients count as constants.

    Raises:
        InputError: If an argument is invalid; when called, also if the tasks are invalid, or the loss does not depend
            on the parameters.

    Example:
        >>> import torch
        >>> maml = MAML(torch.nn.Linear(1, 1), torch.nn.functional.mse_loss, lr=0.1)
        >>> optimizer = torch.optim.Adam(maml.parameters())
        >>> x = torch.randn(3, 5, 1)  # three tasks of five examples
        >>> loss = maml((x, 2 * x, x + 1, 2 * x + 2))
        >>> loss.backward()
        >>> optimizer.step()

    Source: C. Finn, P. Abbeel, S. Levine, "Model-agnostic meta-learning for fast adaptation of deep networks", 2017,
    algorithm 2.
    """

    def forward(self, tasks: Any) -> Tensor:
        """Return the mean of the tasks' losses after adaptation."""
        kept: list[dict[str, Tensor]] = []
        losses = [
            self.query_losses((support_x, support_y), (query_x, query_y), kept)
            for support_x, support_y, query_x, query_y in self.chunks(tasks)
        ]
        self.keep_statistics(kept)
        return torch.cat(losses).mean()


class FOMAML(MAML):
    r"""First-order MAML: inner gradients count as constants.

    $$ \nabla_\theta \approx \frac1n \sum_{i=1}^n \nabla L_i^{\text{query}}(\theta_i') $$

    Args:
        module: Any `nn.Module`.
        loss: `loss(prediction, target)` of one task.
        lr: Inner learning rate.
        steps: Number of inner steps.
        optimizer: Functional optimizer for the inner steps, in place of `SGD(lr)`; see `MAML` for all further options.
        checkpoint: Recompute inner steps in segments of this length, which saves memory.
        truncate: Number of last inner steps that are differentiated.
        clip: Largest norm of a task's inner gradient.
        route: How inner gradients are differentiated: "auto", "reverse-over-reverse" or "forward-over-reverse".
        batch_norm: Running statistics of batch norm layers in training mode: "per-task", "shared" or "frozen".
        chunk_size: Number of tasks that are evaluated together; all by default.
        generator: Generator that seeds the random numbers of the inner loops.
        check_finite: Whether to raise if numbers in an inner loop are not finite.

    Raises:
        InputError: As for `MAML`.

    Example:
        >>> import torch
        >>> x = torch.randn(3, 5, 1)
        >>> fomaml = FOMAML(torch.nn.Linear(1, 1), torch.nn.functional.mse_loss, lr=0.1)
        >>> fomaml((x, 2 * x, x, 2 * x)).backward()
        >>> fomaml.module.weight.grad is not None
        True

    Source: C. Finn, P. Abbeel, S. Levine, 2017, section 5.2.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: Callable[[Any, Tensor], Tensor],
        lr: Setting = 0.01,
        steps: int = 1,
        *,
        optimizer: Optimizer | None = None,
        checkpoint: int | None = None,
        truncate: int | None = None,
        clip: float | Tensor | None = None,
        route: str = "auto",
        batch_norm: str = "per-task",
        chunk_size: int | None = None,
        generator: torch.Generator | None = None,
        check_finite: bool = True,
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
            first_order=True,
        )


class ANIL(MAML):
    r"""Almost no inner loop: MAML that adapts only the head, on features that all tasks share.

    $$ \theta_i' = (\theta_{\text{body}},\; \theta_{\text{head}} - \alpha \nabla_{\text{head}} L_i^{\text{support}}) $$

    Args:
        module: Any `nn.Module`.
        loss: `loss(prediction, target)` of one task.
        lr: Inner learning rate.
        steps: Number of inner steps.
        head: Name or names of the submodules or parameters to adapt; by default the last submodule that directly owns
            trainable parameters.
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

    Raises:
        InputError: If a name in `head` has no trainable parameter; and as for `MAML`.

    Example:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
        >>> ANIL(net, torch.nn.functional.mse_loss).names
        ['2.weight', '2.bias']

    Source: A. Raghu, M. Raghu, S. Bengio, O. Vinyals, "Rapid learning or feature reuse? Towards understanding the
    effectiveness of MAML", 2020, section 4.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: Callable[[Any, Tensor], Tensor],
        lr: Setting = 0.01,
        steps: int = 1,
        *,
        head: str | Sequence[str] | None = None,
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
        if head is not None and not isinstance(head, (str, Sequence)):
            raise InputError(f"ANIL: head: expected a name, names or None, got {describe(head)}.")
        if head is None:
            head = self.names[-1].rpartition(".")[0]
        heads = [head] if isinstance(head, str) else list(head)
        found = {each: [name for name in self.names if f"{name}.".startswith(f"{each}.") or not each] for each in heads}
        for each, names in found.items():
            if not names:
                raise InputError(f"ANIL: head: expected a name with trainable parameters, got {each!r}.")
        self.names = [name for name in self.names if any(name in names for names in found.values())]
        adapted = {id(each) for each in self.adapted_parameters().values()}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            inside = any(not head or f"{name}.".startswith(f"{head}.") for head in heads)
            if parameter.requires_grad and inside != (id(parameter) in adapted):
                raise InputError(
                    f"ANIL: head: expected parameters that no other part of the module shares, got {heads} with "
                    f"{name!r}, which is tied to a parameter {'outside' if inside else 'inside'} of it; untie it, or "
                    "name both in head."
                )


class MetaSGD(MAML):
    r"""MAML with a learned rate for every element of the parameters.

    $$ \theta_i' = \theta - \alpha \circ \nabla L_i^{\text{support}}(\theta), \qquad
       \min_{\theta, \alpha} \frac1n \sum_i L_i^{\text{query}}(\theta_i') $$

    Args:
        module: Any `nn.Module`.
        loss: `loss(prediction, target)` of one task.
        lr: Initial value of all rates.
        steps: Number of inner steps.
        optimizer: None, as the learner has its own; see `MAML` for all further options.
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
        lr: Rates, parameters with the shapes of `adapted_parameters()`.

    Raises:
        InputError: As for `MAML`, if `lr` is no number, or if `optimizer` is passed.

    Example:
        >>> import torch
        >>> x = torch.randn(3, 5, 1)
        >>> learner = MetaSGD(torch.nn.Linear(1, 1), torch.nn.functional.mse_loss, lr=0.1)
        >>> learner((x, 2 * x, x, 2 * x)).backward()
        >>> [rate.grad.shape for rate in learner.lr]
        [torch.Size([1, 1]), torch.Size([1])]

    Source: Z. Li, F. Zhou, F. Chen, H. Li, "Meta-SGD: learning to learn quickly for few-shot learning", 2017,
    algorithm 1.
    """

    def set_optimizer(self, lr: Setting, optimizer: Optimizer | None) -> None:
        """Make a parameter of the rates."""
        require_number("MetaSGD", "lr", lr, remedy="pass what all rates are at the start")
        if optimizer is not None:
            raise InputError(
                "MetaSGD: optimizer: expected None, because MetaSGD learns its own rates, got "
                f"{describe(optimizer)}; use MAML(..., optimizer=...)."
            )
        self.lr = nn.ParameterList(torch.full_like(each, lr) for each in self.adapted_parameters().values())

    def make_optimizer(self) -> Optimizer:
        """Return gradient descent with the learned rates."""
        return SGD(dict(zip(self.names, self.lr, strict=True)))
