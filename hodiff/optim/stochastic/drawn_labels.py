"""The Gauss-Newton-Bartlett estimate: squared gradients of the loss of labels that the model's own softmax draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from hodiff.errors import InputError
from hodiff.graphs import nodes_of
from hodiff.torch_internals.graph_nodes import saved_by_operator, saved_index

# Nodes of `nll_loss`, at which every cross-entropy of labels ends.
_LOSSES = {"NllLossBackward0", "NllLoss2DBackward0"}
# The factor by which the loss of a reduction exceeds the mean, given the number of examples; by torch's number for it.
_REDUCTIONS = {1: lambda count: 1.0, 2: lambda count: count}


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
        return [None if g is None else self.factor * g.square() for g in found]


def of_logits(logits: Tensor, generator: torch.Generator) -> DrawnLabels:
    """Labels for logits (N, C, ...) or (C,)."""
    with torch.enable_grad():
        logarithms = torch.log_softmax(logits, dim=min(1, logits.dim() - 1))
    cotangent, count = _drawn(logarithms.detach(), None, generator)
    return DrawnLabels(logarithms, cotangent, count)


def in_a_loss(caller: str, loss: Tensor, generator: torch.Generator) -> DrawnLabels:
    """Labels for the logits that a loss was computed from."""
    found = [node for node in nodes_of(loss) if node.name() in _LOSSES]
    if len(found) != 1:
        raise _unknown(caller, f"one with {len(found)} of them")
    (node,) = found
    saved = dict(saved_by_operator(node))
    if saved["weight"] is not None or saved["reduction"] not in _REDUCTIONS:
        raise _unknown(caller, "class weights" if saved["weight"] is not None else "reduction='none'")
    ignored = saved["target"] == saved_index(saved["ignore_index"])
    cotangent, count = _drawn(saved["self"].detach(), ignored, generator)
    # What the loss makes of this mean or sum: a scale, or a share of several losses.
    (share,) = torch.autograd.grad([loss], [GradientEdge(node, 0)], retain_graph=True)
    node_before, index = node.next_functions[0]
    factor = count * _REDUCTIONS[saved["reduction"]](count) * share.abs()
    return DrawnLabels(GradientEdge(node_before, index), cotangent, factor)


def _drawn(logarithms: Tensor, ignored: Tensor | None, generator: torch.Generator) -> tuple[Tensor, float]:
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
