"""Losses of torch in a graph: the edge of their outputs, and their scale relative to a mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from hodiff.graphs import nodes_of
from hodiff.torch_internals.autograd.graph_nodes import saved_by_operator, saved_index

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
        raise unknown(f"one with {len(nodes)} of them")
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
