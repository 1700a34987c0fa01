"""Layered layout of an acyclic graph, with few crossing arrows.

Source: K. Sugiyama, S. Tagawa & M. Toda, "Methods for visual understanding of hierarchical system structures", IEEE
Trans. Syst. Man Cybern. 11 (1981).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

import networkx

SWEEPS = 8
PASSAGE = 0.4  # width of an arrow in a layer that it crosses

Place = tuple[float, float]
Arrow = tuple[str, str]


@dataclass(frozen=True)
class Layout:
    """Layout of a graph, y downwards from 0.

    Attributes:
        places: The centre of each node.
        ways: The points along each arrow.
        size: Width and height of the layout.
    """

    places: dict[str, Place]
    ways: dict[Arrow, list[Place]]
    size: Place


def layered(widths: Mapping[str, float], arrows: Sequence[Arrow], height: float) -> Layout:
    """Lay out nodes of given widths in layers, `height` apart; arrows pass through the layers between."""
    graph = networkx.DiGraph(arrows)
    graph.add_nodes_from(widths)
    depth = {name: i for i, layer in enumerate(networkx.topological_generations(graph)) for name in layer}
    passages: dict[Arrow, list[Hashable]] = {
        (tail, head): [tail, *((tail, head, i) for i in range(depth[tail] + 1, depth[head])), head]
        for tail, head in graph.edges
    }
    whole = networkx.DiGraph([step for way in passages.values() for step in pairwise(way)])
    whole.add_nodes_from(widths)
    layers = _ordered(whole)
    across = [[widths[each] if isinstance(each, str) else PASSAGE for each in layer] for layer in layers]
    total = max(map(sum, across))
    places: dict[Hashable, Place] = {}
    for i, (layer, taken) in enumerate(zip(layers, across, strict=True)):
        x = (total - sum(taken)) / 2
        for each, width in zip(layer, taken, strict=True):
            places[each] = (x + width / 2, -(i + 0.5) * height)
            x += width
    ways = {arrow: [places[each] for each in way] for arrow, way in passages.items()}
    return Layout({name: places[name] for name in widths}, ways, (total, height * len(layers)))


def _ordered(graph: networkx.DiGraph) -> list[list[Hashable]]:
    """Return layers, sorted in sweeps by the mean place of a node's neighbours in the layer before, then after."""
    layers = [sorted(layer, key=str) for layer in networkx.topological_generations(graph)]
    rank = {each: (i + 0.5) / len(layer) for layer in layers for i, each in enumerate(layer)}
    for sweep in range(SWEEPS):
        forwards = sweep % 2 == 0
        tied = graph.predecessors if forwards else graph.successors
        for layer in layers if forwards else reversed(layers):
            layer.sort(key=lambda each: fmean([rank[other] for other in tied(each)] or [rank[each]]))
            rank.update((each, (i + 0.5) / len(layer)) for i, each in enumerate(layer))
    return layers
