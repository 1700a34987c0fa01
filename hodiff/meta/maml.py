"""Meta-learners: MAML, FOMAML, ANIL and Meta-SGD, which differentiate through the inner loop, and Reptile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from hodiff.common.keyword_options import explains, shows
from hodiff.common.options import require_number
from hodiff.common.trees import describe
from hodiff.errors import InputError
from hodiff.meta.learner import Batch, MetaLearner
from hodiff.meta.learner_options import InnerOptions, LearnerOptions
from hodiff.meta.optimizer import Optimizer, Setting
from hodiff.meta.sgd import SGD


@explains(LearnerOptions)
class Reptile(MetaLearner):
    r"""Reptile: the meta-gradient points from the adapted parameters back to the start.

    $$ g = \frac1n \sum_{i=1}^n (\theta - \theta_i'), \qquad
       \theta_i' = U_i^k(\theta) \text{ held constant} $$

    A call returns $\frac1{2n} \sum_i \lVert \theta - \theta_i' \rVert^2$, whose gradient is g. Tasks are
    `(support_x, support_y)` with the tasks along the first dimension, or a list of such pairs; further entries of a
    tuple are ignored.

    Args:
        module: Any `nn.Module`.
        loss: `loss(prediction, target)` of one task.
        lr: Inner learning rate.
        steps: Number of inner steps; with 1 the meta-gradient is that of joint training.
        **options: As for `MAML`.

    Raises:
        InputError: As for `MAML`.

    Example:
        >>> import torch
        >>> reptile = Reptile(torch.nn.Linear(1, 1), torch.nn.functional.mse_loss, lr=0.1, steps=3)
        >>> x = torch.randn(3, 5, 1)
        >>> reptile((x, 2 * x)).backward()
        >>> reptile.module.weight.grad.shape
        torch.Size([1, 1])

    Source: A. Nichol, J. Achiam, J. Schulman, "On first-order meta-learning algorithms", 2018, algorithm 2.
    """

    def forward(self, tasks: Any) -> Tensor:
        """Return half the mean squared distance to the adapted parameters."""
        kept: list[dict[str, Tensor]] = []
        distances = [self._distances((x, y), kept) for x, y in self.chunks(tasks, parts=2)]
        self.keep_statistics(kept)
        return torch.cat(distances).mean()

    def _distances(self, support: Batch, kept: list[dict[str, Tensor]]) -> Tensor:
        with torch.no_grad():
            adapted = self.adapt_all(support)
        kept.append(adapted.buffers)
        start = self.adapted_parameters()
        squares = [(start[name] - end.detach()).square().flatten(1).sum(1) for name, end in adapted.params.items()]
        return torch.stack(squares).sum(0) / 2


@explains(LearnerOptions)
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
        **options: Options of every meta-learner.

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


@explains(InnerOptions)
class FOMAML(MAML):
    r"""First-order MAML: inner gradients count as constants.

    $$ \nabla_\theta \approx \frac1n \sum_{i=1}^n \nabla L_i^{\text{query}}(\theta_i') $$

    Args:
        module: Any `nn.Module`.
        loss: `loss(prediction, target)` of one task.
        lr: Inner learning rate.
        steps: Number of inner steps.
        **options: As for `MAML`, without `first_order`.

    Raises:
        InputError: As for `MAML`, and if `first_order` is passed.

    Example:
        >>> import torch
        >>> x = torch.randn(3, 5, 1)
        >>> fomaml = FOMAML(torch.nn.Linear(1, 1), torch.nn.functional.mse_loss, lr=0.1)
        >>> fomaml((x, 2 * x, x, 2 * x)).backward()
        >>> fomaml.module.weight.grad is not None
        True

    Source: C. Finn, P. Abbeel, S. Levine, 2017, section 5.2.
    """

    @shows(InnerOptions)
    def __init__(
        self,
        module: nn.Module,
        loss: Callable[[Any, Tensor], Tensor],
        lr: Setting = 0.01,
        steps: int = 1,
        **options: Unpack[InnerOptions],
    ):
        if "first_order" in options:
            raise InputError(
                "FOMAML: first_order: expected none, as that is what FOMAML is, got "
                f"{describe(dict(options)['first_order'])}; use MAML(..., first_order=...)."
            )
        super().__init__(module, loss, lr, steps, first_order=True, **options)


@explains(LearnerOptions)
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
        **options: As for `MAML`.

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

    @shows(LearnerOptions)
    def __init__(
        self,
        module: nn.Module,
        loss: Callable[[Any, Tensor], Tensor],
        lr: Setting = 0.01,
        steps: int = 1,
        *,
        head: str | Sequence[str] | None = None,
        **options: Unpack[LearnerOptions],
    ):
        super().__init__(module, loss, lr, steps, **options)
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
                    f"{name!r}, which is tied to one {'outside' if inside else 'inside'} of it; untie it, or name both "
                    "in head."
                )


@explains(LearnerOptions)
class MetaSGD(MAML):
    r"""MAML with a learned rate for every element of the parameters.

    $$ \theta_i' = \theta - \alpha \circ \nabla L_i^{\text{support}}(\theta), \qquad
       \min_{\theta, \alpha} \frac1n \sum_i L_i^{\text{query}}(\theta_i') $$

    Args:
        module: Any `nn.Module`.
        loss: `loss(prediction, target)` of one task.
        lr: Initial value of all rates.
        steps: Number of inner steps.
        **options: As for `MAML`, without `optimizer`.

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

    @shows(LearnerOptions)
    def __init__(
        self,
        module: nn.Module,
        loss: Callable[[Any, Tensor], Tensor],
        lr: float = 0.01,
        steps: int = 1,
        **options: Unpack[LearnerOptions],
    ):
        require_number("MetaSGD", "lr", lr, remedy="pass what all rates are at the start")
        if options.get("optimizer") is not None:
            raise InputError(
                "MetaSGD: optimizer: expected none, as it descends by the rates that it learns, got "
                f"{describe(options['optimizer'])}; use MAML(..., optimizer=...)."
            )
        super().__init__(module, loss, lr, steps, **options)
        self.lr = nn.ParameterList(torch.full_like(each, lr) for each in self.adapted_parameters().values())

    def make_optimizer(self) -> Optimizer:
        """Return gradient descent with the learned rates."""
        return SGD(dict(zip(self.names, self.lr, strict=True)))
