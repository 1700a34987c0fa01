"""Star and acyclic colorings by two-colored subgraphs: time, and number of colors compared with an older algorithm.

python papers/gebremedhin-2007/reproduce.py
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from hodiff.sparse.coloring import color
from hodiff.sparse.coloring.vertex_orders import ORDERS
from papers.common import OURS, Claim, Reproduction, run, span, verdict
from papers.patterns import matrices

METHODS = ("acyclic", "star", "columns")
# The older algorithm is written in Python here, and its steps grow with the cube of the degree.
SMALL = 1_000
REPEATS = 5


def neighbours(pattern: Any) -> list[list[int]]:
    """Return the neighbours of every vertex in a symmetric pattern, without its diagonal."""
    csr = pattern.tocsr()
    rows = [csr.indices[csr.indptr[i] : csr.indptr[i + 1]] for i in range(csr.shape[0])]
    return [[int(j) for j in row if j != i] for i, row in enumerate(rows)]


def paths(pattern: Any) -> tuple[float, float]:
    """Return the mean numbers of distinct paths of at most two and of at most three edges from a vertex."""
    off = pattern.tocsr().astype(float)
    off.setdiag(0)
    off.eliminate_zeros()
    off.data[:] = 1
    degree = off.sum(1)
    two = off @ degree - degree
    # Walks of three edges, minus walks that go back along an edge or around a triangle.
    triangles = np.asarray((off @ off).multiply(off).sum(1)).reshape(-1)
    three = off @ two - degree * (degree - 1) - triangles
    n = off.shape[0]
    return float((degree + two).sum() / n), float((degree + two + three).sum() / n)


def star_by_paths_of_three(near: list[list[int]]) -> int:
    """Count the colors of a star coloring by all paths of three edges, the algorithm that the paper improves."""
    colors = [-1] * len(near)
    for v, around in enumerate(near):
        forbidden = set()
        for w in around:
            if colors[w] >= 0:
                forbidden.add(colors[w])
            for x in near[w]:
                if x == v or colors[x] < 0:
                    continue
                if colors[w] < 0 or any(y != w and colors[y] == colors[w] for y in near[x]):
                    forbidden.add(colors[x])
        colors[v] = next(k for k in range(len(near)) if k not in forbidden)
    return max(colors) + 1


def seconds(pattern: Any, method: str) -> float:
    """Return the median seconds of a coloring in the natural order, which itself takes no time."""
    took = []
    for _ in range(REPEATS):
        begun = time.process_time()
        color(pattern, method, "natural")
        took.append(time.process_time() - begun)
    return median(took)


def reproduce(quick: bool, progress: bool) -> Reproduction:
    """Time colorings of growing matrices, and count colors by method and order."""
    sizes = (500, 1_000, 2_000) if quick else (12_500, 25_000, 50_000, 100_000, 200_000)
    timed: dict[str, Any] = {}
    for n in tqdm(sizes, desc="sizes", leave=False, disable=not progress):
        for name, pattern in matrices(n).items():
            two, three = paths(pattern)
            found = {"n": pattern.shape[0], "paths of two": two, "paths of three": three}
            timed.setdefault(name, []).append(found | {each: seconds(pattern, each) for each in METHODS})
    colors, older = {}, {}
    for name, pattern in tqdm(matrices(sizes[-1] // 2).items(), desc="colors", leave=False, disable=not progress):
        colors[name] = {order: {each: color(pattern, each, order).num_colors for each in METHODS} for order in ORDERS}
    for name, pattern in matrices(SMALL).items():
        counts = star_by_paths_of_three(neighbours(pattern)), color(pattern, "star", "natural").num_colors
        older[name] = {"by paths of three": counts[0], "by two-colored subgraphs": counts[1]}
    data = {"timed": timed, "colors": colors, "older": older}
    return Reproduction(claims_of(timed, colors, older), {"sizes": list(sizes)}, data, draw(timed, colors))


def claims_of(timed: dict[str, Any], colors: dict[str, Any], older: dict[str, Any]) -> list[Claim]:
    """Compare the measurements with the claims of the abstract."""
    growth = {
        name: np.polyfit(np.log([e["n"] * e["paths of two"] for e in rows]), np.log([e["star"] for e in rows]), 1)[0]
        for name, rows in timed.items()
    }
    largest = [rows[-1] for rows in timed.values()]
    slower = [each["acyclic"] / each["star"] for each in largest]
    steps = [each["paths of three"] / each["paths of two"] for each in largest]
    fewer = [each["by paths of three"] / each["by two-colored subgraphs"] for each in older.values()]
    natural = [each["natural"] for each in colors.values()]
    ordered = [min(of[order][method] for order in of) for of in colors.values() for method in METHODS]
    orders = [max(of[order][method] for order in of) for of in colors.values() for method in METHODS]
    products = [rows[-1]["n"] / of["natural"]["star"] for rows, of in zip(timed.values(), colors.values(), strict=True)]
    return [
        Claim(
            "A star coloring takes O(n d2) steps, d2 the mean number of paths of at most two edges from a vertex",
            "proved (abstract)",
            f"seconds grow as (n d2) to the power {span(list(growth.values()), 2)}",
            verdict(max(growth.values()) < 1.15, max(growth.values()) < 1.4),
        ),
        Claim(
            "An acyclic coloring takes nearly a constant factor more (the inverse of Ackermann's function)",
            "proved (abstract)",
            f"{span(slower)} times the seconds of a star coloring",
            verdict(max(slower) < 5, max(slower) < 10),
        ),
        Claim(
            "The star coloring uses fewer colors than an older algorithm of O(n d3) steps",
            "fewer (abstract)",
            f"the older one takes {span(fewer, 2)} times as many, on {SMALL:,} vertices",
            verdict(min(fewer) >= 1 and max(fewer) > 1.02, max(fewer) > 1),
        ),
        Claim(
            "The star coloring is considerably faster than the older algorithm",
            "considerably (abstract)",
            f"paths of at most three edges are {span(steps)} times as many as those of two",
            verdict(min(steps) > 1.5),
        ),
        Claim(
            "Hessians take far less time with these colorings",
            "expected to be drastic (abstract)",
            f"{span(products, 0)} times fewer products than columns by stars; acyclic colorings take "
            f"{span([each['star'] / each['acyclic'] for each in natural])} times fewer than these",
            verdict(min(products) > 20 and all(each["acyclic"] <= each["star"] for each in natural)),
        ),
        Claim(
            "Orders of the vertices",
            "",
            f"the worst of five takes {span([b / a for a, b in zip(ordered, orders, strict=True)], 2)} times the "
            f"colors of the best",
            OURS,
        ),
    ]


def draw(timed: dict[str, Any], colors: dict[str, Any]) -> Figure:
    """Plot seconds by steps, and colors by order."""
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for k, (name, rows) in enumerate(timed.items()):
        steps = [each["n"] * each["paths of two"] for each in rows]
        left.loglog(steps, [each["star"] for each in rows], "o-", color=f"C{k}", label=name, markersize=3)
        left.loglog(steps, [each["acyclic"] for each in rows], "s--", color=f"C{k}", markersize=3)
    left.set(xlabel="n d2", ylabel="seconds", title="star (lines) and acyclic (dashes), natural order")
    left.legend(fontsize=7)
    places = np.arange(len(colors))
    width = 0.85 / len(ORDERS)
    for i, order in enumerate(ORDERS):
        for method, hatch in (("star", ""), ("acyclic", "////")):
            heights = [of[order][method] for of in colors.values()]
            label = order if method == "star" else None
            shade = {"color": f"C{i}"} if method == "star" else {"fill": False, "edgecolor": "black", "linewidth": 0.5}
            right.bar(places + width * (i - 2), heights, width, label=label, hatch=hatch, **shade)
    right.set_xticks(places, list(colors), rotation=30, ha="right", fontsize=7)
    right.set(ylabel="colors", title="star (full) and acyclic (hatched) by order")
    right.legend(fontsize=7)
    return figure


if __name__ == "__main__":
    run(__file__, __doc__ or "", reproduce)
