"""Moments and noise scale of the gradients of the examples."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hodiff.common.trees import PyTree
from hodiff.errors import InputError
from hodiff.estimators.results import precise
from hodiff.operators.kfac.columns import Given
from hodiff.per_sample.sample_gradients import CALLER, GradientsOfBatch, PerSample, factor_of


@dataclass(frozen=True, eq=False)
class GradientMoments:
    """Moments of the examples' gradients, pytrees like x.

    Attributes:
        mean: The mean of the gradients.
        second_moment: The mean of the squared gradients, element by element.
        variance: The unbiased variance, element by element.
        examples: The number N of examples.
    """

    mean: PyTree
    second_moment: PyTree
    variance: PyTree
    examples: int


@dataclass(frozen=True)
class NoiseScale:
    """Noise scale of the gradient.

    Attributes:
        value: The noise scale, in examples; infinite if the noise hides the mean.
        trace: Unbiased estimate of the trace of the covariance of the examples' gradients.
        squared_norm: Unbiased estimate of the squared norm of the expected gradient, which may be negative.
        examples: The number N of examples.
    """

    value: float
    trace: float
    squared_norm: float
    examples: int

    def __float__(self) -> float:
        return self.value


def moments(
    model: Callable[..., Any],
    loss: Callable[..., Tensor],
    x: PyTree,
    *args: Any,
    data: Iterable[PyTree] | None = None,
    reduction: str = "mean",
    batch_size: Callable[[PyTree], int] | None = None,
    check_deterministic: bool = True,
    randomness: str = "error",
    progress: bool = False,
    correct: bool = True,
) -> GradientMoments:
    r"""Compute mean, second moment and variance of the gradients of the examples, element by element.

    $$ \bar g = \frac1N \sum_i g_i, \qquad \frac1N \sum_i g_i^2, \qquad
       \frac1{N-1} \sum_i (g_i - \bar g)^2 $$

    with $g_i$ of `hodiff.per_sample.gradients`. The memory is that of a few examples.

    Args:
        model: As in `hodiff.per_sample.gradients`.
        loss: As in `hodiff.per_sample.gradients`.
        x: As in `hodiff.per_sample.gradients`.
        *args: As in `hodiff.per_sample.gradients`.
        data: As in `hodiff.per_sample.gradients`.
        reduction: As in `hodiff.per_sample.gradients`.
        batch_size: As in `hodiff.per_sample.gradients`.
        check_deterministic: As in `hodiff.per_sample.gradients`.
        randomness: As in `hodiff.per_sample.gradients`.
        progress: As in `hodiff.per_sample.gradients`.
        correct: As in `hodiff.per_sample.gradients`.

    Returns:
        `GradientMoments`.

    Raises:
        InputError: As for `hodiff.per_sample.gradients`, or if there are fewer than two examples.

    Example:
        >>> import torch, hodiff
        >>> model = lambda w, inputs: inputs * w
        >>> inputs, targets = torch.tensor([1.0, 2.0]), torch.tensor([0.0, 0.0])
        >>> found = hodiff.per_sample.moments(model, torch.nn.functional.mse_loss, torch.ones(1), inputs, targets)
        >>> found.mean, found.second_moment, found.variance  # of 2 and 8
        (tensor([5.]), tensor([34.]), tensor([18.]))

    Source: L. Balles, J. Romero & P. Hennig, "Coupling adaptive batch sizes with learning rates", UAI 2017, eq. 16.
    """
    operator = PerSample(
        model,
        loss,
        x,
        *args,
        data=data,
        reduction=reduction,
        batch_size=batch_size,
        check_deterministic=check_deterministic,
        randomness=randomness,
        progress=progress,
        correct=correct,
    )
    sums = _Sums()

    def visit(batch: GradientsOfBatch) -> None:
        squares = batch.gradients.squares(Given(batch.cotangent[None]), "auto")
        sums.add(batch, _summed(batch), [precise(each) for each in squares])

    operator.collect(visit)
    scale = sums.scale(operator)
    mean = [scale * each / sums.count for each in sums.first]
    second = [scale**2 * each / sums.count for each in sums.second]
    ratio = sums.count / (sums.count - 1)
    variance = [(ratio * (b - a**2)).clamp(min=0) for a, b in zip(mean, second, strict=True)]

    def tree(found: list[Tensor]) -> PyTree:
        return operator.domain.tree_of([a.to(leaf.dtype) for a, leaf in zip(found, operator.leaves, strict=True)])

    return GradientMoments(tree(mean), tree(second), tree(variance), sums.count)


def noise_scale(
    model: Callable[..., Any],
    loss: Callable[..., Tensor],
    x: PyTree,
    *args: Any,
    data: Iterable[PyTree] | None = None,
    reduction: str = "mean",
    batch_size: Callable[[PyTree], int] | None = None,
    check_deterministic: bool = True,
    randomness: str = "error",
    progress: bool = False,
    correct: bool = True,
) -> NoiseScale:
    r"""Compute the simple noise scale of the gradient, the batch size beyond which larger batches stop paying.

    $$ B_\mathrm{simple} = \frac{\operatorname{tr} \Sigma}{\|G\|^2}, \qquad
       \operatorname{tr} \Sigma \approx \frac{N}{N-1} \Big(\frac1N \sum_i \|g_i\|^2 - \|\bar g\|^2\Big), \qquad
       \|G\|^2 \approx \|\bar g\|^2 - \frac{\operatorname{tr} \Sigma}{N} $$

    with $g_i$ and their mean $\bar g$ as in `hodiff.per_sample.gradients`. Numerator and denominator are unbiased.

    Args:
        model: As in `hodiff.per_sample.gradients`.
        loss: As in `hodiff.per_sample.gradients`.
        x: As in `hodiff.per_sample.gradients`.
        *args: As in `hodiff.per_sample.gradients`.
        data: As in `hodiff.per_sample.gradients`.
        reduction: As in `hodiff.per_sample.gradients`.
        batch_size: As in `hodiff.per_sample.gradients`.
        check_deterministic: As in `hodiff.per_sample.gradients`.
        randomness: As in `hodiff.per_sample.gradients`.
        progress: As in `hodiff.per_sample.gradients`.
        correct: As in `hodiff.per_sample.gradients`.

    Returns:
        A `NoiseScale`.

    Raises:
        InputError: As for `hodiff.per_sample.gradients`, or if there are fewer than two examples.

    Example:
        >>> import torch, hodiff
        >>> model = lambda w, inputs: inputs * w
        >>> inputs, targets = torch.tensor([1.0, 2.0]), torch.tensor([0.0, 0.0])
        >>> found = hodiff.per_sample.noise_scale(model, torch.nn.functional.mse_loss, torch.ones(1), inputs, targets)
        >>> found.trace, found.squared_norm, found.value  # the variance of 2 and 8, and 25 - 18 / 2
        (18.0, 16.0, 1.125)

    Source: S. McCandlish, J. Kaplan, D. Amodei & the OpenAI Dota Team, "An empirical model of large-batch training",
    arXiv:1812.06162 (2018), eq. 2.9 and appendix A.1.
    """
    operator = PerSample(
        model,
        loss,
        x,
        *args,
        data=data,
        reduction=reduction,
        batch_size=batch_size,
        check_deterministic=check_deterministic,
        randomness=randomness,
        progress=progress,
        correct=correct,
    )
    sums = _Sums()
    operator.collect(
        lambda batch: sums.add(batch, _summed(batch), [precise(batch.gradients.squared_norms(batch.cotangent)).sum()])
    )
    scale = sums.scale(operator)
    mean = scale**2 * sum(float(each.square().sum()) for each in sums.first) / sums.count**2
    trace = (scale**2 * float(sums.second[0]) / sums.count - mean) * sums.count / (sums.count - 1)
    squared_norm = mean - trace / sums.count
    return NoiseScale(trace / squared_norm if squared_norm > 0 else math.inf, trace, squared_norm, sums.count)


class _Sums:
    """Sums over batches of gradients and of squares, with the weights of the batches."""

    def __init__(self) -> None:
        self.first: list[Tensor] = []
        self.second: list[Tensor] = []
        self.count, self.divisor = 0, 0.0

    def add(self, batch: GradientsOfBatch, first: list[Tensor], second: list[Tensor]) -> None:
        """Add a batch."""
        first = [batch.divisor * each for each in first]
        second = [batch.divisor**2 * each for each in second]
        self.first = [a + b for a, b in zip(self.first, first, strict=True)] if self.count else first
        self.second = [a + b for a, b in zip(self.second, second, strict=True)] if self.count else second
        self.count += len(batch)
        self.divisor += batch.divisor

    def scale(self, operator: PerSample) -> float:
        """Return the factor between the gradients in the sums and those of the examples."""
        if self.count < 2:
            raise InputError(f"{CALLER}: data: expected two examples or more, got {self.count}; add examples.")
        return factor_of(operator, self.count, self.divisor)


def _summed(batch: GradientsOfBatch) -> list[Tensor]:
    recorded = batch.gradients.recorded
    return [precise(each[0]) for each in recorded.pull_leaves(batch.cotangent[None], range(len(recorded.leaves)))]
