"""A graph of boxes and arrows with a title, in layers with few crossings, for Graphviz or drawn by matplotlib.

Source: K. Sugiyama, S. Tagawa & M. Toda, "Methods for visual understanding of hierarchical system structures", IEEE
Trans. Syst. Man Cybern. 11 (1981), for the layers.
"""

from __future__ import annotations

import io
import os
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import networkx

from hodiff.plot.shared import axes_or_new, require_package

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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


LINE, LETTER, GAP = 0.2, 0.085, 0.3  # inches: the height of a line of text, the width of a letter, between boxes
NARROWEST, LARGEST = 4.0, 200.0  # inches of a picture
SIZE = 8  # points of the text
SAMPLE = 0.5  # inches of a colour and its gap in the legend
DOT_SUFFIXES = {".dot", ".gv"}


@dataclass(frozen=True)
class Box:
    """A node as it is drawn.

    Attributes:
        lines: Lines of its text.
        colour: Fill colour; "" is white.
        shape: "box", "ellipse" for leaves, or "plaintext" for results.
        thick: Whether it has a thick border.
    """

    lines: tuple[str, ...]
    colour: str = ""
    shape: str = "box"
    thick: bool = False

    def in_dot(self) -> str:
        """Return the attributes in Graphviz's language."""
        label = r"\n".join(line.replace("\\", "\\\\").replace('"', r"\"") for line in self.lines)
        look = f'style=filled fillcolor="{self.colour}"' if self.colour else 'style=""'
        return f'label="{label}" shape={self.shape} {look} penwidth={3 if self.thick else 1}'


@dataclass
class BackwardGraph:
    """Graph of the nodes that backward visits.

    A notebook displays it as a picture.

    Attributes:
        title: Title of the picture.
        boxes: Boxes by name.
        arrows: Pairs of names, in the direction of backward.
        colours: Colours by their meaning.
    """

    title: str
    boxes: dict[str, Box] = field(default_factory=dict)
    arrows: list[tuple[str, str]] = field(default_factory=list)
    colours: dict[str, str] = field(default_factory=dict)

    @property
    def source(self) -> str:
        """The graph in Graphviz's language."""
        lines = [f'\tgraph [label="{self.title}" labelloc=t]', "\tnode [fontname=Helvetica]"]
        lines += [f'\t"{name}" [{box.in_dot()}]' for name, box in self.boxes.items()]
        lines += [f'\t"{tail}" -> "{head}"' for tail, head in self.arrows]
        return "\n".join(["digraph backward {", *lines, "}", ""])

    def draw(self, ax: Axes | None = None) -> Axes:
        """Draw the graph by matplotlib.

        Args:
            ax: The axes to draw in; new ones by default, large enough for all boxes.

        Returns:
            The axes.
        """
        widths = {name: LETTER * max(map(len, box.lines)) + GAP for name, box in self.boxes.items()}
        layout = layered(widths, self.arrows, LINE * max(len(box.lines) for box in self.boxes.values()) + GAP)
        width, height = layout.size
        ax = axes_or_new(ax, "graph", (min(max(width, NARROWEST), LARGEST), min(height + 1, LARGEST)))
        look: dict[str, Any] = {"color": "0.4", "linewidth": 0.8}
        for (_, head), (*way, before, end) in layout.ways.items():
            if way:
                ax.plot(*zip(*way, before, strict=True), zorder=1, **look)
            # An arrow ends at the upper edge of its box, points above the middle.
            edge = 36 * LINE * len(self.boxes[head].lines) + 2
            arrow = {"arrowstyle": "-|>", "shrinkB": edge, "shrinkA": 0, **look}
            ax.annotate("", end, before, arrowprops=arrow, zorder=1)
        for name, box in self.boxes.items():
            frame = {
                "boxstyle": "round4" if box.shape == "ellipse" else "square",
                "facecolor": box.colour or "white",
                "edgecolor": "none" if box.shape == "plaintext" else "black",
                "linewidth": 2.5 if box.thick else 0.8,
            }
            text = "\n".join(box.lines)
            ax.text(*layout.places[name], text, ha="center", va="center", fontsize=SIZE, bbox=frame, zorder=2)
        ax.set(xlim=(0, width), ylim=(-height, 0))
        ax.set_title(self.title, fontsize=SIZE + 2)
        ax.axis("off")
        patches = require_package("matplotlib.patches", "graph", 'pip install "hodiff[plot]"')
        handles = [patches.Patch(facecolor=colour, label=meaning) for meaning, colour in self.colours.items()]
        columns = max(int(max(width, NARROWEST) // (LETTER * max(map(len, self.colours)) + SAMPLE)), 1)
        look = {"ncols": min(len(handles), columns), "frameon": False, "fontsize": SIZE}
        ax.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, 0), **look)
        return ax

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the graph to a file: `.dot` and `.gv` for Graphviz, else any picture format of matplotlib."""
        path = Path(path)
        if path.suffix in DOT_SUFFIXES:
            path.write_text(self.source, encoding="utf-8")
        else:
            self._write(path, None)

    def _repr_svg_(self) -> str:
        buffer = io.StringIO()
        self._write(buffer, "svg")
        return buffer.getvalue()

    def _write(self, target: Path | io.StringIO, kind: str | None) -> None:
        figure: Any = self.draw().figure
        matplotlib = require_package("matplotlib", "graph", 'pip install "hodiff[plot]"')
        # Equal graphs give equal files: without a date, and with names of marks that do not depend on earlier pictures.
        vector = kind == "svg" or (isinstance(target, Path) and target.suffix == ".svg")
        with matplotlib.rc_context({"svg.hashsalt": self.title}):
            figure.savefig(target, format=kind, metadata={"Date": None} if vector else None)
        # A notebook would show the open figure a second time.
        require_package("matplotlib.pyplot", "graph", 'pip install "hodiff[plot]"').close(figure)
