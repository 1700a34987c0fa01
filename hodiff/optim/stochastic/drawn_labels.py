"""Gauss-Newton-Bartlett estimate: squared gradients of the loss for labels drawn from the model's softmax."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from hodiff.errors import InputError
from hodiff.optim.stochastic.found_losses import LABELS, find


@dataclass(frozen=True)
class DrawnLabels:
    """Mean loss of drawn labels, represented by its gradient with respect to the log-probabilities.

    Attributes:
        output: Log-probabilities, or their edge in a graph.
        cotangent: Gradient with respect to the log-probabilities.
        factor: Ratio of curvature to squared gradient.
    """

    output: Tensor | GradientEdge
    cotangent: Tensor
    factor: float | Tensor

    def curvature(self, parameters: Sequence[Tensor]) -> list[Tensor | None]:
        """Estimate the curvature with respect to each parameter; None if the log-probabilities do not depend on it."""
        found = torch.autograd.grad(self.output, parameters, self.cotangent, retain_graph=True, allow_unused=True)
        # A factor of shape () would promote a parameter of shape () to the dtype of the loss.
        return [None if g is None else (self.factor * g.square()).to(g.dtype) for g in found]


def of_logits(logits: Tensor, generator: torch.Generator) -> DrawnLabels:
    """Draw labels for logits (N, C, ...) or (C,)."""
    with torch.enable_grad():
        logarithms = torch.log_softmax(logits, dim=min(1, logits.dim() - 1))
    cotangent, count = drawn(logarithms.detach(), None, generator)
    return DrawnLabels(logarithms, cotangent, count)


def in_a_loss(caller: str, loss: Tensor, generator: torch.Generator) -> DrawnLabels:
    """Draw labels for the logits from which a loss was computed."""
    found = find(loss, (LABELS,), partial(_unknown, caller))
    cotangent, count = drawn(found.outputs, found.ignored, generator)
    return DrawnLabels(found.edge, cotangent, count * found.weight)


def drawn(logarithms: Tensor, ignored: Tensor | None, generator: torch.Generator) -> tuple[Tensor, float]:
    """Draw labels; return the gradient of their mean loss in the log-probabilities, and the number of labels."""
    classes = min(1, logarithms.dim() - 1)
    rows = logarithms.movedim(classes, -1)
    # Draw in float32 on the generator's device: 16 bits are too few for small probabilities.
    probabilities = rows.reshape(-1, rows.shape[-1]).to(generator.device, torch.float32).exp()
    labels = torch.multinomial(probabilities, 1, generator=generator).to(rows.device).reshape(*rows.shape[:-1], 1)
    taken = torch.ones_like(labels, dtype=torch.bool) if ignored is None else ~ignored.reshape(labels.shape)
    count = max(float(taken.sum()), 1.0)
    cotangent = torch.zeros_like(rows).scatter_(-1, labels, -taken.to(rows.dtype) / count)
    return cotangent.movedim(-1, classes), count


def _unknown(caller: str, got: str) -> InputError:
    return InputError(
        f"{caller}: expected a loss with one cross_entropy or nll_loss of labels, without class weights, of reduction "
        f"'mean' or 'sum', got {got}; pass update_every=None, and call update_curvature(logits) before backward."
    )
