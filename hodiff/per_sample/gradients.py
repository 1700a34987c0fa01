r"""Gradients of the examples, and their norms.

With the loss $\ell$ of all N examples, a mean or sum, the gradient of example i is defined such that

$$ \nabla_x \ell = \frac1N \sum_{i=1}^N g_i \;\text{for a mean}, \qquad
   \nabla_x \ell = \sum_{i=1}^N g_i \;\text{for a sum}. $$
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from hodiff.common.trees import PyTree
from hodiff.per_sample.sample_gradients import PerSample, factor_of


def gradients(
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
) -> PyTree:
    r"""Compute the gradient of each example.

    $$ g_i = N\, \nabla_x \ell_i(x) \;\text{("mean")}, \qquad g_i = \nabla_x \ell_i(x) \;\text{("sum")},
       \qquad \ell = \sum_{i=1}^N \ell_i $$

    where $\ell_i$ is the part of the loss that depends on the outputs of example i. For a mean over examples, $g_i$ is
    the gradient of the example's own loss. For a mean over tokens, or with class weights or ignored targets, the mean
    of $g_i$ still is the gradient of $\ell$. Examples whose targets are all ignored have gradients of 0.

    Layers (linear, convolution, embedding, normalization) compute all examples together; other parameters take an
    evaluation of each example, by vmap if it supports the model. Both are compared with the gradient of the batch.

    Args:
        model: Function `model(x, inputs)` that returns one tensor with examples along its first dimension; or an
            `nn.Module`, and `x` a dict of its parameters.
        loss: Function `loss(outputs, targets)` that returns the mean or sum over independent examples.
        x: The point: a tensor or a pytree of tensors.
        *args: `inputs, targets`; or one batch of another form, which is passed to both functions.
        data: Batches to use, instead of `args`, as for `hodiff.HessianOperator`.
        reduction: Reduction of the loss over the examples, "mean" or "sum".
        batch_size: Function that returns the divisor of a batch's mean; by default that of torch's loss, or the number
            of examples.
        check_deterministic: Whether to evaluate the function twice at first, and to refuse values that differ. Later
            calls evaluate a module twice only if its training mode has changed or it draws random numbers.
        randomness: Treatment of random numbers in the function: "error", or "fixed" for the gradients of one draw.
        progress: Whether to show a progress bar.
        correct: Whether hodiff's rules replace torch's wrong and missing ones.

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
    batches: list[tuple[float, list[Tensor]]] = []
    operator.collect(
        lambda batch: batches.append((batch.divisor, batch.gradients.gradients(batch.cotangent))), keep_rows=True
    )
    scales = _scales(operator, [size for size, _ in batches], sum(len(rows[0]) for _, rows in batches))
    for scale, (_, rows) in zip(scales, batches, strict=True):
        for row in rows if scale != 1.0 else ():
            row.mul_(scale)
    columns = zip(*(rows for _, rows in batches), strict=True)
    joined = [
        (parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)).to(leaf.dtype)
        for parts, leaf in zip(columns, operator.leaves, strict=True)
    ]
    return operator.domain.tree_of(joined)


def norms(
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
) -> Tensor:
    r"""Compute the Euclidean norm $\|g_i\|$ of the gradient of each example, over all parameters.

    For layers, no gradient of an example is formed if that is cheaper: with inputs a, output gradients b and places r
    that share the weight,

    $$ \Big\|\sum_r b_r a_r^\top\Big\|^2 = \sum_{r,s} (b_r \cdot b_s)(a_r \cdot a_s). $$

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
    batches: list[tuple[float, Tensor]] = []
    operator.collect(lambda batch: batches.append((batch.divisor, batch.gradients.squared_norms(batch.cotangent))))
    scales = _scales(operator, [size for size, _ in batches], sum(len(one) for _, one in batches))
    return torch.cat([scale * squares.sqrt() for scale, (_, squares) in zip(scales, batches, strict=True)])


def _scales(operator: PerSample, sizes: list[float], count: int) -> list[float]:
    """Return the factors of batches' gradients."""
    factor = factor_of(operator, count, sum(sizes))
    return [factor * size for size in sizes]
