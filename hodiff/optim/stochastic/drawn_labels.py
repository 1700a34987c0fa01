"""The Gauss-Newton-Bartlett estimate: squared gradients of the loss of labels that the model's own softmax draws."""

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
    """The mean loss of drawn labels, by its gradient in the log-probabilities.

    Attributes:
        output: The log-probabilities, or where a graph computed them.
        cotangent: The gradient.
        factor: Curvature for each squared gradient.
    """

    output: Tensor | GradientEdge
    cotangent: Tensor
    factor: float | Tensor

    def curvature(self, parameters: Sequence[Tensor]) -> list[Tensor | None]:
        """The estimate by each parameter that the log-probabilities hang on."""
        found = torch.autograd.grad(self.output, parameters, self.cotangent, retain_graph=True, allow_unused=True)
        # A number with dimensions () would take the dtype of the loss.
        return [None if g is None else (self.factor * g.square()).to(g.dtype) for g in found]


def of_logits(logits: Tensor, generator: torch.Generator) -> DrawnLabels:
    """Labels for logits (N, C, ...) or (C,)."""
    with torch.enable_grad():
        logarithms = torch.log_softmax(logits, dim=min(1, logits.dim() - 1))
    cotangent, count = drawn(logarithms.detach(), None, generator)
    return DrawnLabels(logarithms, cotangent, count)


def in_a_loss(caller: str, loss: Tensor, generator: torch.Generator) -> DrawnLabels:
    """Labels for the logits that a loss was computed from."""
    found = find(loss, (LABELS,), partial(_unknown, caller))
    cotangent, count = drawn(found.outputs, found.ignored, generator)
    return DrawnLabels(found.edge, cotangent, count * found.weight)


def drawn(logarithms: Tensor, ignored: Tensor | None, generator: torch.Generator) -> tuple[Tensor, float]:
    """The gradient of the mean loss of drawn labels in the log-probabilities, and of how many it is the mean."""
    classes = min(1, logarithms.dim() - 1)
    rows = logarithms.movedim(classes, -1)
    # Drawn in float32 on the generator's device: 16 bits are too few for small probabilities.
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
