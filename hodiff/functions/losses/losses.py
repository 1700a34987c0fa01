"""Losses with exact and lean derivatives of every order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hodiff.common.options import require_choice, require_int, require_number
from hodiff.common.overriding import overridable
from hodiff.errors import InputError
from hodiff.functions.losses.cross_entropy import CrossEntropy, class_of
from hodiff.functions.losses.soft_cross_entropy import SoftCrossEntropy
from hodiff.rules.arguments import (
    dtype_name,
    require_broadcasts_to,
    require_floating,
    require_number_or_floating,
    require_positive_or_floating,
)
from hodiff.rules.blockwise import block_size
from hodiff.rules.elementwise import ElementwiseFunction, clip

REDUCTIONS = ("none", "mean", "sum")


class Huber(ElementwiseFunction):
    """The Function behind `huber`, of the residual and delta. Saves its inputs."""

    @staticmethod
    def forward(residual: Tensor, delta: Any) -> Tensor:
        """Compute $c (r - c/2)$ with $c$ the residual clipped to $[-δ, δ]$."""
        clipped = residual.clamp(-delta, delta)
        return clipped * (residual - 0.5 * clipped)

    @staticmethod
    def slope(index: int, residual: Tensor, delta: Any) -> Tensor:
        """Compute $c$ for the residual and $max(|r| - δ, 0)$ for delta."""
        return clip(residual, -delta, delta) if index == 0 else torch.relu(residual.abs() - delta)


class Hinge(ElementwiseFunction):
    """The Function behind `hinge`. Saves its inputs."""

    @staticmethod
    def forward(input: Tensor, target: Tensor, margin: Any) -> Tensor:
        """Compute $max(m - t x, 0)$."""
        return torch.relu(margin - target * input)

    @staticmethod
    def slope(index: int, input: Tensor, target: Tensor, margin: Any) -> Tensor:
        """Compute $-t$, $-x$ and 1 for input, target and margin where the loss is positive, else 0."""
        inside = (margin - target * input).detach() > 0
        by = (-target, -input, 1.0)[index]
        return torch.where(inside, by, 0.0)


@overridable
def cross_entropy(
    input: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    chunk_size: int | str | None = "auto",
) -> Tensor:
    r"""Cross-entropy between logits and classes, with the semantics of `torch.nn.functional.cross_entropy`.

    $$ \ell_n = \sum_c w_c\,q_{nc} \Big( \log \sum_k e^{x_{nk}} - x_{nc} \Big), \qquad
       q_{nc} = (1 - \varepsilon)\,[c = t_n] + \varepsilon / C $$

    With class indices, the mean is over $\sum_n w_{t_n}$; with probabilities, over the number of samples. Backward
    saves only `input` and `target`, or the smoothed or weighted probabilities. The softmax is recomputed for one block
    of samples at a time, at the second order as well. A Hessian-vector product takes three passes over the logits.

    Args:
        input: Floating-point logits (N, C), (C,) or (N, C, d1, ...).
        target: Integer class indices (N,), () or (N, d1, ...), or probabilities of the shape and dtype of `input`,
            which may require a gradient. A term with probability 0 is 0, whatever the logit.
        weight: Weight of each class (C,), which may require a gradient.
        ignore_index: Samples of this class do not count, if `target` has class indices.
        reduction: "mean", "sum" or "none".
        label_smoothing: Share ε of the uniform distribution in the target, from 0 to 1.
        chunk_size: Number of samples whose probabilities exist at once: a positive int, None for all, or "auto" to suit
            the device.

    Returns:
        Tensor of shape (), or with "none" of the shape of class indices. The mean over no sample is NaN.

    Raises:
        InputError: If an argument is invalid. A class that does not exist raises torch's own error.

    Example:
        >>> import torch
        >>> logits = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
        >>> cross_entropy(logits, torch.tensor([0, 2]))
        tensor(0.8955)

    Source: C. Bishop, "Pattern recognition and machine learning", 2006, equations 4.108 to 4.110; smoothing: C. Szegedy
    et al., "Rethinking the Inception architecture for computer vision", 2016, section 7.
    """
    classes = _require_classification(input, target, weight, reduction, label_smoothing, chunk_size)
    require_int("cross_entropy", "ignore_index", ignore_index)
    if input.dtype in (torch.float16, torch.bfloat16) and torch.is_autocast_enabled(input.device.type):
        input = input.float()  # as torch does
        target = target.to(input.dtype) if target.is_floating_point() else target
    dim = -1 if input.dim() == 1 else 1 - input.dim()
    limit = block_size(chunk_size, input, dim)
    along = None if weight is None else weight.to(input.dtype).reshape(-1, *(1,) * (-dim - 1))
    if target.is_floating_point():
        q = target if not label_smoothing else (1 - label_smoothing) * target + label_smoothing / classes
        losses = SoftCrossEntropy.call(input, q if along is None else q * along, dim, limit).squeeze(dim)
        return _reduced(losses, reduction)
    index = target.unsqueeze(dim)
    if weight is None:
        losses = CrossEntropy.call(input, index, ignore_index, label_smoothing, dim, limit)
    else:
        counted = index != ignore_index
        each = torch.where(counted, weight.to(input.dtype)[class_of(index, ignore_index)], 0)
        losses = each * CrossEntropy.call(input, index, ignore_index, 0.0, dim, limit)
        if label_smoothing:
            smooth = torch.where(counted, SoftCrossEntropy.call(input, along, dim, limit), 0)
            losses = (1 - label_smoothing) * losses + label_smoothing / classes * smooth
    if reduction == "none":
        return losses.squeeze(dim)
    if reduction == "sum":
        return losses.sum()
    return losses.sum() / (index != ignore_index if weight is None else each).sum()


@overridable
def huber(input: Tensor, target: Tensor, delta: Tensor | float = 1.0, reduction: str = "mean") -> Tensor:
    r"""Huber's loss of the residual $r$ = `input` - `target`.

    $$ \ell(r) = r^2/2 \ \text{ where } |r| \le \delta, \qquad \delta\,(|r| - \delta/2) \ \text{ elsewhere} $$

    The first derivative is continuous. The second derivative, 1 inside and 0 outside, is 1 at $|r| = \delta$.

    Args:
        input: Floating-point tensor.
        target: Floating-point tensor of the same shape.
        delta: Positive number, or positive floating-point tensor that broadcasts to that shape and may require a
            gradient.
        reduction: "mean", "sum" or "none".

    Returns:
        Tensor of shape (), or with "none" of the shape of `input`.

    Raises:
        InputError: If an argument is invalid.

    Example:
        >>> import torch
        >>> huber(torch.tensor([0.5, -3.0]), torch.zeros(2), reduction="none")
        tensor([0.1250, 2.5000])

    Source: P. Huber, "Robust estimation of a location parameter", 1964.
    """
    require_floating("huber", input=input, target=target)
    _require_same_shape("huber", input, target)
    require_positive_or_floating("huber", "delta", delta)
    require_broadcasts_to("huber", "delta", delta, input.shape)
    require_choice("huber", "reduction", reduction, REDUCTIONS)
    return _reduced(Huber.call(input - target, delta), reduction)


@overridable
def hinge(input: Tensor, target: Tensor, margin: Tensor | float = 1.0, reduction: str = "mean") -> Tensor:
    r"""Hinge loss of scores $x$ and labels $t = \pm 1$, $\max(m - t\,x, 0)$ with the margin $m$.

    All derivatives are 0 where $t\,x \ge m$, the kink included.

    Args:
        input: Floating-point scores.
        target: Labels -1 and 1, or 0 to leave a score out (its loss is the constant $m$): integer or floating-point
            tensor of the same shape. A floating-point one may require a gradient.
        margin: Number, or floating-point tensor that broadcasts to that shape and may require a gradient.
        reduction: "mean", "sum" or "none".

    Returns:
        Tensor of shape (), or with "none" of the shape of `input`.

    Raises:
        InputError: If an argument is invalid.

    Example:
        >>> import torch
        >>> hinge(torch.tensor([0.5, -3.0, 2.0]), torch.tensor([1, 1, 1]), reduction="none")
        tensor([0.5000, 4.0000, 0.0000])

    Source: C. Cortes & V. Vapnik, "Support-vector networks", 1995, section 3.
    """
    require_floating("hinge", input=input)
    if not isinstance(target, Tensor) or target.dtype == torch.bool or target.is_complex():
        kind = dtype_name(target) if isinstance(target, Tensor) else type(target).__name__
        raise InputError(f"hinge: target: expected a tensor of labels -1 and 1, got {kind}; 2 * target - 1 makes them.")
    _require_same_shape("hinge", input, target)
    require_number_or_floating("hinge", margin=margin)
    require_broadcasts_to("hinge", "margin", margin, input.shape)
    require_choice("hinge", "reduction", reduction, REDUCTIONS)
    return _reduced(Hinge.call(input, target.to(input.dtype), margin), reduction)


def _reduced(losses: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return losses
    return losses.mean() if reduction == "mean" else losses.sum()


def _require_classification(
    input: Any, target: Any, weight: Any, reduction: str, label_smoothing: float, chunk_size: Any
) -> int:
    """Check the arguments of `cross_entropy`, and return the number of classes."""
    name = "cross_entropy"
    require_floating(name, input=input)
    if not isinstance(target, Tensor):
        raise InputError(f"{name}: target: expected a tensor, got {type(target).__name__}.")
    if input.dim() == 0:
        raise InputError(f"{name}: input: expected logits (C,), (N, C) or (N, C, d1, ...), got a tensor of shape ().")
    shape = tuple(input.shape)
    axis = 0 if len(shape) == 1 else 1
    if target.is_floating_point():
        expected, kind = shape, "probabilities"
        if target.dtype != input.dtype:
            raise InputError(
                f"{name}: target: expected probabilities in {dtype_name(input)} as input, got {dtype_name(target)}; "
                "target.to(input.dtype) converts them."
            )
    else:
        expected, kind = shape[:axis] + shape[axis + 1 :], "class indices"
        if target.dtype == torch.bool or target.is_complex():
            raise InputError(f"{name}: target: expected integers or floating-point numbers, got {dtype_name(target)}.")
    if tuple(target.shape) != expected:
        raise InputError(
            f"{name}: target: expected {kind} of shape {expected} for input {shape}, got {tuple(target.shape)}."
        )
    if weight is not None:
        require_floating(name, weight=weight)
        if tuple(weight.shape) != (shape[axis],):
            raise InputError(
                f"{name}: weight: expected one for each class, shape ({shape[axis]},), got {tuple(weight.shape)}."
            )
    require_choice(name, "reduction", reduction, REDUCTIONS)
    require_number(name, "label_smoothing", label_smoothing, within=(0, 1))
    if chunk_size != "auto":
        require_int(name, "chunk_size", chunk_size, 1, optional=True, remedy="'auto' chooses one")
    return shape[axis]


def _require_same_shape(name: str, input: Tensor, target: Tensor) -> None:
    if input.shape != target.shape:
        raise InputError(
            f"{name}: target: expected the shape {tuple(input.shape)} of input, got {tuple(target.shape)}; "
            "use target.expand_as(input) to broadcast it."
        )
