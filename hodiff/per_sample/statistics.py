r"""Gradients of the examples, and statistics of them.

With the loss $\ell$ of all N examples, a mean or sum, the gradient of example i is defined such that

$$ \nabla_x \ell = \frac1N \sum_{i=1}^N g_i \;\text{for a mean}, \qquad
   \nabla_x \ell = \sum_{i=1}^N g_i \;\text{for a sum}. $$
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hodiff.common.trees import PyTree
from hodiff.errors import InputError
from hodiff.estimators.results import precise
from hodiff.operators.kfac.columns import Given
from hodiff.per_sample.sample_gradients import CALLER, GradientsOfBatch, PerSample


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


def gradients(model: Any, loss: Any, x: PyTree, *args: Any, **options: Any) -> PyTree:
    r"""Compute the gradient of each example.

    $$ g_i = N\, \nabla_x \ell_i(x) \;\text{("mean")}, \qquad g_i = \nabla_x \ell_i(x) \;\text{("sum")},
       \qquad \ell = \sum_{i=1}^N \ell_i $$

    where $\ell_i$ is the part of the loss that depends on the outputs of example i. For a mean over examples, $g_i$ is
    the gradient of the example's own loss. For a mean over tokens, or with class weights or ignored targets, the mean
    of $g_i$ still is the gradient of $\ell$. Examples whose targets are all ignored have gradients of 0.

    Layers (linear, convolution, embedding, normalization) compute all examples together; other parameters take an
    evaluation of each example. Both are compared with the gradient of the batch.

    Args:
        model: Function `model(x, inputs)` that returns one tensor with examples along its first dimension; or an
            `nn.Module`, and `x` a dict of its parameters.
        loss: Function `loss(outputs, targets)` that returns the mean or sum over independent examples.
        x: The point: a tensor or a pytree of tensors.
        *args: `inputs, targets`; or one batch of another form, which is passed to both functions.
        **options: `data`, batches to use instead of `args`; `reduction`, "mean" or "sum"; `batch_size`,
            `check_deterministic`, `randomness`, `progress` and `correct`, as for `hodiff.HessianOperator`.

    Returns:
        A pytree like x, with a first dimension of length N.

    Raises:
        InputError: If an argument is invalid, examples depend on each other (as in batch norm in training mode), or
            the loss couples them.

    Example:
        >>> import torch, hodiff
        >>> model = lambda w, inputs: inputs @ w
        >>> inputs, targets = torch.tensor([[1.0], [2.0]]), torch.tensor([0.0, 0.0])
        >>> hodiff.per_sample.gradients(model, torch.nn.functional.mse_loss, torch.ones(1), inputs, targets)
        tensor([[2.],
                [8.]])

    Source: I. Goodfellow, "Efficient per-example gradient computations", arXiv:1510.01799 (2015), section 4.
    """
    operator, batches = _operator(model, loss, x, args, options), list[tuple[float, list[Tensor]]]()
    operator.collect(lambda batch: batches.append((batch.divisor, batch.gradients.gradients(batch.cotangent))))
    scales = _scales(operator, [size for size, _ in batches], sum(len(rows[0]) for _, rows in batches))
    columns = zip(
        *([scale * row for row in rows] for scale, (_, rows) in zip(scales, batches, strict=True)), strict=True
    )
    joined = [torch.cat(parts).to(leaf.dtype) for parts, leaf in zip(columns, operator.leaves, strict=True)]
    return operator.domain.tree_of(joined)


def norms(model: Any, loss: Any, x: PyTree, *args: Any, **options: Any) -> Tensor:
    r"""Compute the Euclidean norm $\|g_i\|$ of the gradient of each example, over all parameters.

    For layers, no gradient of an example is formed if that is cheaper: with inputs a, output gradients b and places r
    that share the weight,

    $$ \Big\|\sum_r b_r a_r^\top\Big\|^2 = \sum_{r,s} (b_r \cdot b_s)(a_r \cdot a_s). $$

    Args:
        model: As in `hodiff.per_sample.gradients`.
        loss: As in `hodiff.per_sample.gradients`.
        x: As in `hodiff.per_sample.gradients`.
        *args: As in `hodiff.per_sample.gradients`.
        **options: As in `hodiff.per_sample.gradients`.

    Returns:
        Tensor (N,), in float32 or float64.

    Raises:
        InputError: As for `hodiff.per_sample.gradients`.

    Example:
        >>> import torch, hodiff
        >>> model = lambda w, inputs: inputs @ w
        >>> inputs, targets = torch.tensor([[3.0, 4.0], [0.0, 1.0]]), torch.tensor([1.0, 0.0])
        >>> hodiff.per_sample.norms(model, torch.nn.functional.mse_loss, torch.zeros(2), inputs, targets)
        tensor([10.,  0.])

    Source: I. Goodfellow, arXiv:1510.01799 (2015), section 4; G. Rochette, A. Manoel & E. Tramel, "Efficient
    per-example gradient computations in convolutional neural networks", arXiv:1912.06015 (2019).
    """
    operator, batches = _operator(model, loss, x, args, options), list[tuple[float, Tensor]]()
    operator.collect(lambda batch: batches.append((batch.divisor, batch.gradients.squared_norms(batch.cotangent))))
    scales = _scales(operator, [size for size, _ in batches], sum(len(one) for _, one in batches))
    return torch.cat([scale * squares.sqrt() for scale, (_, squares) in zip(scales, batches, strict=True)])


def moments(model: Any, loss: Any, x: PyTree, *args: Any, **options: Any) -> GradientMoments:
    r"""Compute mean, second moment and variance of the gradients of the examples, element by element.

    $$ \bar g = \frac1N \sum_i g_i, \qquad \frac1N \sum_i g_i^2, \qquad
       \frac1{N-1} \sum_i (g_i - \bar g)^2 $$

    with $g_i$ of `hodiff.per_sample.gradients`. The memory is that of a few examples.

    Args:
        model: As in `hodiff.per_sample.gradients`.
        loss: As in `hodiff.per_sample.gradients`.
        x: As in `hodiff.per_sample.gradients`.
        *args: As in `hodiff.per_sample.gradients`.
        **options: As in `hodiff.per_sample.gradients`.

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
    operator, sums = _operator(model, loss, x, args, options), _Sums()

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


def noise_scale(model: Any, loss: Any, x: PyTree, *args: Any, **options: Any) -> NoiseScale:
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
        **options: As in `hodiff.per_sample.gradients`.

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
    operator, sums = _operator(model, loss, x, args, options), _Sums()
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
        return _factor(operator, self.count, self.divisor)


def _operator(model: Any, loss: Any, x: PyTree, args: tuple[Any, ...], options: dict[str, Any]) -> PerSample:
    for name in options:
        if name not in OPTIONS:
            raise InputError(f"{CALLER}: {name}: expected one of the options {', '.join(OPTIONS)}, got {name!r}.")
    operator = PerSample(model, loss, x, *args, **options)
    operator.domain.require_whole(CALLER, "the local gradients of each rank")
    return operator


OPTIONS = ("data", "reduction", "batch_size", "check_deterministic", "randomness", "progress", "correct")


def _summed(batch: GradientsOfBatch) -> list[Tensor]:
    recorded = batch.gradients.recorded
    return [precise(each[0]) for each in recorded.pull_leaves(batch.cotangent[None], range(len(recorded.leaves)))]


def _factor(operator: PerSample, count: int, divisor: float) -> float:
    return count / divisor if operator.batches.reduction == "mean" else 1.0


def _scales(operator: PerSample, sizes: list[float], count: int) -> list[float]:
    """Return the factors of batches' gradients."""
    factor = _factor(operator, count, sum(sizes))
    return [factor * size for size in sizes]
