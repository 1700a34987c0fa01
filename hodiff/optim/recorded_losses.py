"""Losses of torch in a graph: the edge of their outputs, and their scale relative to a mean.

Derivatives of a loss from its recorded graph.

Gauss-Newton-Bartlett estimate: squared gradients of the loss for labels drawn from the model's softmax.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.utils import _pytree as pytree

from hodiff.common.trees import PyTree
from hodiff.derivatives.bound_function import BoundFunction, bind
from hodiff.derivatives.recorded_gradient import RecordedGradient
from hodiff.derivatives.route_choice import refused
from hodiff.errors import InputError
from hodiff.graphs import lead_to, nodes_of
from hodiff.operators.linearized.recorded_model import RecordedModel
from hodiff.recompute.recording import FoundRecording
from hodiff.torch_internals.autograd.graph_nodes import saved_by_operator, saved_index
from hodiff.torch_internals.tensors import has_tensor_hooks


def gradient_of(caller: str, loss: Tensor, parameters: Sequence[Tensor], *, numbers: bool = False) -> RecordedGradient:
    """Return the recorded gradient of a loss with respect to leaves of its graph."""
    _require_derivatives(caller, loss, parameters)
    recording: FoundRecording[tuple[Tensor, PyTree]] = FoundRecording(parameters, (loss, ()))
    return RecordedGradient(_bound(caller, parameters), numbers=numbers, recording=recording)


def model_of(caller: str, outputs: PyTree, parameters: Sequence[Tensor]) -> RecordedModel:
    """Return the recorded Jacobian of outputs with respect to leaves of their graph."""
    for output in pytree.tree_leaves(outputs):
        _require_derivatives(caller, output, parameters)
    recording: FoundRecording[tuple[PyTree, PyTree]] = FoundRecording(parameters, (outputs, ()))
    return RecordedModel(_bound(caller, parameters), recording)


def explained(caller: str) -> AbstractContextManager[None]:
    """Replace torch's various errors for missing second derivatives by one message."""
    return refused(
        caller,
        "compute the loss within `with hodiff.corrected():`, or call step(closure), which does so; "
        "hodiff.preflight(model, inputs) names the operator",
    )


def _bound(caller: str, parameters: Sequence[Tensor]) -> BoundFunction:
    # A hook changes gradients and products whenever they are computed.
    if any(map(has_tensor_hooks, parameters)):
        raise InputError(
            f"{caller}: params: expected parameters without hooks of register_hook, which would also change "
            "Hessian-vector products; use register_post_accumulate_grad_hook."
        )
    return bind(caller, _recorded_already, (list(parameters),), name="params")


def _recorded_already(*_: Any) -> Any:
    raise AssertionError("the graph is there already")


# Nodes whose first edge leads to the weight of an embedding.
_EMBEDDINGS = ("EmbeddingBackward0", "EmbeddingBagBackward0")


def _require_derivatives(caller: str, output: Tensor | GradientEdge, parameters: Sequence[Tensor]) -> None:
    """Raise if torch divides gradients by counts of rows, which no estimate of the curvature may contain."""
    # Within corrected() the rule of embeddings refuses them, but losses are also recorded outside of it.
    scaled = [
        n for n in nodes_of(output) if n.name() in _EMBEDDINGS and dict(saved_by_operator(n))["scale_grad_by_freq"]
    ]
    if scaled and lead_to([node.next_functions[0][0] for node in scaled], parameters):
        raise InputError(
            f"{caller}: params: expected weights of embeddings with scale_grad_by_freq=False, got True, which divides "
            "gradients by counts of rows so that they are no derivatives; set scale_grad_by_freq=False, or give the "
            "weight to another optimizer."
        )


# Scale of a reduction relative to the mean over `count` terms, by torch's number of the reduction.
_REDUCTIONS: Mapping[int, Callable[[float], float]] = {1: lambda count: 1.0, 2: lambda count: count}

LABELS, SQUARES, BITS = "labels", "squares", "bits"
# Families by the name of the node, which functions and modules share.
FAMILIES: Mapping[str, str] = {
    "NllLossBackward0": LABELS,
    "NllLoss2DBackward0": LABELS,
    "MseLossBackward0": SQUARES,
    "BinaryCrossEntropyWithLogitsBackward0": BITS,
}


@dataclass(frozen=True, eq=False)
class FoundLoss:
    """Loss equal to `weight` times the mean of `count` terms.

    Attributes:
        family: "labels" (of log-probabilities), "squares" or "bits" (of logits).
        edge: Edge of the outputs in the graph.
        outputs: The outputs, detached.
        ignored: Mask of labels that do not count, or None.
        count: Number of terms.
        weight: Scale, a tensor with one number.
    """

    family: str
    edge: GradientEdge
    outputs: Tensor
    ignored: Tensor | None
    count: float
    weight: Tensor


def find(loss: Tensor, families: tuple[str, ...], unknown: Callable[[str], Exception]) -> FoundLoss:
    """Find the only loss of some families in the graph of a number; `unknown` makes an error from a description."""
    nodes = [node for node in nodes_of(loss) if FAMILIES.get(node.name()) in families]
    if len(nodes) != 1:
        # Such as the losses of real and of generated examples.
        hint = " (of different examples? join outputs and targets by torch.cat for one loss)" if len(nodes) > 1 else ""
        raise unknown(f"one with {len(nodes)} of them{hint}")
    (node,) = nodes
    saved = dict(saved_by_operator(node))
    if saved.get("weight") is not None or saved.get("pos_weight") is not None:
        raise unknown("class weights" if FAMILIES[node.name()] == LABELS else "weights")
    if saved["reduction"] not in _REDUCTIONS:
        raise unknown("reduction='none'")
    # A squared error is symmetric, so its second argument may be the outputs.
    places = [(edge, name) for edge, name in zip(node.next_functions, ("self", "target")) if edge[0] is not None]  # noqa: B905
    if len(places) != 1:
        raise unknown("targets that have a graph, too")
    (edge, name), family = places[0], FAMILIES[node.name()]
    outputs = saved[name].detach()
    ignored = saved["target"] == saved_index(saved["ignore_index"]) if family == LABELS else None
    count = max(float(outputs.numel() if ignored is None else ignored.numel() - ignored.sum()), 1.0)
    # The loss may scale this mean or sum, or add other losses.
    (share,) = torch.autograd.grad([loss], [GradientEdge(node, 0)], retain_graph=True)
    weight = _REDUCTIONS[saved["reduction"]](count) * share.abs()
    return FoundLoss(family, GradientEdge(*edge), outputs, ignored, count, weight)


# Gradients, None for parameters that are not reached, and the factor of their squares in an estimate of the curvature.
DrawnGradients = tuple[Sequence[Tensor | None], float | Tensor]


def drawn_from_logits(
    caller: str, logits: Tensor, parameters: Sequence[Tensor], generator: torch.Generator
) -> DrawnGradients:
    """Compute gradients for labels drawn from logits (N, C, ...) or (C,)."""
    with torch.enable_grad():
        logarithms = torch.log_softmax(logits, dim=min(1, logits.dim() - 1))
    cotangent, count = drawn(logarithms.detach(), None, generator)
    return _drawn_gradients(caller, logarithms, parameters, cotangent), count


def drawn_from_loss(
    caller: str, loss: Tensor, parameters: Sequence[Tensor], generator: torch.Generator, *, joint: bool = False
) -> DrawnGradients:
    """Compute gradients for labels drawn from the logits from which a loss was computed.

    Args:
        caller: Name of the optimizer.
        loss: The loss.
        parameters: Leaves of its graph.
        generator: Source of the labels.
        joint: Whether gradients are sums over ranks, whose factors may differ; the gradients then contain their roots.

    Returns:
        The gradients, and the factor of their squares.
    """
    found = find(loss, (LABELS,), partial(_unknown_labels, caller))
    cotangent, count = drawn(found.outputs, found.ignored, generator)
    factor = count * found.weight
    if joint:
        return _drawn_gradients(caller, found.edge, parameters, (cotangent * factor**0.5).to(cotangent)), 1.0
    return _drawn_gradients(caller, found.edge, parameters, cotangent), factor


def _drawn_gradients(
    caller: str, output: Tensor | GradientEdge, parameters: Sequence[Tensor], cotangent: Tensor
) -> Sequence[Tensor | None]:
    _require_derivatives(caller, output, parameters)
    return torch.autograd.grad(output, parameters, cotangent, retain_graph=True, allow_unused=True)


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


def _unknown_labels(caller: str, got: str) -> InputError:
    return InputError(
        f"{caller}: expected a loss with one cross_entropy or nll_loss of labels, without class weights, of reduction "
        f"'mean' or 'sum', got {got}; pass update_every=None, and call update_curvature(logits) before backward."
    )
