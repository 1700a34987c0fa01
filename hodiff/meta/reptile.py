"""Reptile, which moves parameters towards the adapted ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hodiff.common.keyword_options import explains
from hodiff.meta.learner import Batch, MetaLearner
from hodiff.meta.options import LearnerOptions


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
