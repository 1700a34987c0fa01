"""Rule for the connectionist temporal classification (CTC) loss: its forward recursion, in logarithms."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hodiff.corrections.mechanism.declining import INVALID
from hodiff.corrections.mechanism.registry import register
from hodiff.functions.losses.losses import REDUCTIONS
from hodiff.routes import ROUTES
from hodiff.torch_internals.autograd.wrapped_tensors import is_batched

# Logarithm of 0, finite so that sums of impossible terms alone have derivatives.
_IMPOSSIBLE = -1e30


@register(
    F.ctc_loss,
    kind="missing",
    routes=ROUTES,
    reason="only the first derivative is implemented; it is wrong if the input is not the output of log_softmax",
    reference="Graves et al. (2006), eq. 6 to 8",
)
def _ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Any:
    if log_probs.dtype in (torch.float16, torch.bfloat16):
        return INVALID
    if not _fits(log_probs, targets, input_lengths, target_lengths, blank) or reduction not in REDUCTIONS:
        return INVALID
    single = log_probs.dim() == 2
    if single:
        log_probs = log_probs.unsqueeze(1)
    steps, labels = (
        torch.as_tensor(each, device=log_probs.device, dtype=torch.long).reshape(-1)
        for each in (input_lengths, target_lengths)
    )
    if targets.dim() == 1 and not single:
        targets = _padded(targets, target_lengths, labels)
    targets = targets.reshape(log_probs.shape[1], -1).to(log_probs.device, torch.long)
    losses = -_log_likelihood(log_probs, targets, steps, labels, blank)
    infinite = losses == math.inf
    if zero_infinity:
        losses = torch.where(infinite, 0, losses)
    else:
        # The derivative of an infinite loss is NaN, as in torch: that of the square root at 0, times 0.
        losses = losses + (
            torch.where(infinite, 0 * log_probs.exp().sum((0, 2)), 1).sqrt() - (~infinite).to(losses.dtype)
        )
    if reduction == "mean":
        return (losses / labels.clamp(min=1)).mean()
    if reduction == "sum":
        return losses.sum()
    return losses.squeeze(0) if single else losses


@register(
    torch.ctc_loss,
    kind="missing",
    routes=ROUTES,
    reason="same as torch.nn.functional.ctc_loss",
    reference="Graves et al. (2006), eq. 6 to 8",
)
def _ctc_loss_by_number(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: int = 1,
    zero_infinity: bool = False,
) -> Any:
    if not 0 <= reduction < len(REDUCTIONS):
        return INVALID
    name = REDUCTIONS[reduction]
    return _ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, name, zero_infinity)


def _fits(log_probs: Any, targets: Any, input_lengths: Any, target_lengths: Any, blank: Any) -> bool:
    """Whether the arguments are valid, as far as is known without waiting for a device."""
    if not isinstance(log_probs, Tensor) or not isinstance(targets, Tensor) or not log_probs.is_floating_point():
        return False
    if log_probs.dim() not in (2, 3) or not log_probs.shape[0] or targets.dim() not in (1, 2):
        return False
    lengths = (each for each in (input_lengths, target_lengths) if isinstance(each, Tensor))
    if any(each.is_floating_point() or each.is_complex() for each in lengths):
        return False
    steps, batch = log_probs.shape[0], 1 if log_probs.dim() == 2 else log_probs.shape[1]
    if not 0 <= blank < log_probs.shape[-1] or (targets.dim() == 2 and targets.shape[0] != batch):
        return False
    inputs, labels = _known(input_lengths), _known(target_lengths)
    if any(isinstance(each, float) for each in (*(inputs or ()), *(labels or ()))):
        return False
    concatenated = targets.dim() == 1 and log_probs.dim() == 3
    return (inputs is None or (len(inputs) == batch and all(0 <= each <= steps for each in inputs))) and (
        labels is None
        or (
            len(labels) == batch
            and min(labels, default=0) >= 0
            and (sum(labels) == targets.shape[0] if concatenated else max(labels, default=0) <= targets.shape[-1])
        )
    )


def _known(lengths: Any) -> list[int] | None:
    """Return lengths as numbers; None if they are on a device, batched or traced."""
    if not isinstance(lengths, Tensor):
        return [lengths] if isinstance(lengths, int) else list(lengths)
    if torch.compiler.is_compiling() or lengths.device.type != "cpu" or is_batched(lengths):
        return None
    return [int(each) for each in lengths.reshape(-1).tolist()]


def _padded(targets: Tensor, target_lengths: Any, lengths: Tensor) -> Tensor:
    """Split concatenated targets into rows; with unknown lengths, a row may be as long as all targets."""
    known = _known(target_lengths)
    longest = targets.shape[0] if known is None else max(known, default=0)
    if not longest:
        return targets.new_zeros(lengths.shape[0], 0)
    starts = lengths.cumsum(0) - lengths
    places = starts.unsqueeze(-1) + torch.arange(longest, device=lengths.device)
    return targets.to(lengths.device).take(places.clamp(max=targets.shape[0] - 1))


def _log_likelihood(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int
) -> Tensor:
    """Log-likelihood of the targets of each sample, by the forward algorithm of CTC; -inf for impossible targets."""
    # Labels after a target's end reach no state that counts, but must be valid classes.
    inside = torch.arange(targets.shape[1], device=targets.device) < target_lengths.unsqueeze(-1)
    targets = torch.where(inside, targets, blank)
    blanks = torch.full_like(targets, blank)
    labels = torch.cat([torch.stack([blanks, targets], -1).flatten(-2), blanks.new_full((len(blanks), 1), blank)], -1)
    states = labels.shape[-1]
    emitted = log_probs.gather(-1, labels.expand(log_probs.shape[0], *labels.shape))
    # A blank may be skipped between different labels.
    skips = (labels != blank) & (labels != labels.roll(2, -1)) & (torch.arange(states, device=labels.device) > 1)
    emitted = emitted.clamp(min=_IMPOSSIBLE)
    barred = torch.where(skips, 0.0, _IMPOSSIBLE).to(emitted.dtype)
    alpha = torch.where(torch.arange(states, device=labels.device) < 2, emitted[0], _IMPOSSIBLE)
    for step in range(1, log_probs.shape[0]):
        one, two = (F.pad(alpha, (by, 0), value=_IMPOSSIBLE)[..., :states] for by in (1, 2))
        following = torch.stack([alpha, one, two + barred]).logsumexp(0) + emitted[step]
        alpha = torch.where((step < input_lengths).unsqueeze(-1), following, alpha)
    last = 2 * target_lengths.unsqueeze(-1)
    blank_end, label_end = (alpha.gather(-1, (last - by).clamp(min=0)).squeeze(-1) for by in (0, 1))
    ends = torch.stack([blank_end, torch.where(target_lengths > 0, label_end, _IMPOSSIBLE)]).logsumexp(0)
    nothing = torch.where(target_lengths > 0, _IMPOSSIBLE, 0.0).to(alpha.dtype)
    total = torch.where(input_lengths > 0, ends, nothing)
    return torch.where(total.detach() > _IMPOSSIBLE / 2, total, -math.inf)
