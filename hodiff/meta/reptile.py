"""Reptile, a meta-learner without derivatives of the inner loop."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hodiff.meta.learner import Batch, MetaLearner


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
