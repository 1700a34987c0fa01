"""Orders in which vertices are colored: Gebremedhin, Manne & Pothen 2005, section 7.

A vertex with many neighbours is harder to color late. Static orders sort by degree, dynamic orders by the degree
among vertices that are ordered already, or not yet.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hodiff.sparse.coloring.compressed_patterns import Array, Pattern
from hodiff.sparse.coloring.loops import loops


@dataclass(frozen=True, eq=False)
class Vertices:
    """Vertices to color: rows of `graph`. Neighbours are its columns or, with `rows`, vertices that share one."""

    graph: Pattern
    rows: Pattern | None = None

    @property
    def count(self) -> int:
        """Number of vertices."""
        return self.graph.shape[0]

    @cached_property
    def degrees(self) -> Array:
        """Number of neighbours of each vertex, without itself."""
        graph = self.graph
        if self.rows is not None:
            return loops().shared_row_degrees(self._arrays(graph), self._arrays(self.rows))
        own = graph.rows[graph.rows == graph.columns] if graph.shape[0] == graph.shape[1] else graph.rows[:0]
        return np.diff(graph.starts) - np.bincount(own, minlength=self.count).astype(np.int32)

    def dynamic(self, *, rising: bool, least: bool) -> Array:
        """Order by least or largest degree, among vertices that are ordered already (`rising`) or not yet."""
        # Among equals, the vertex that was entered last comes first. So an order that is built from its end keeps
        # equals in natural order, and an order that is built from its start begins with the largest degree.
        initial = np.arange(self.count, dtype=np.int32)
        if not least:
            initial = initial[::-1]
        if rising:
            initial = initial[np.argsort(self.degrees[initial], kind="stable")]
        rows = None if self.rows is None else self._arrays(self.rows)
        return loops().dynamic_order(
            self._arrays(self.graph), rows, self.degrees, np.ascontiguousarray(initial), rising, least
        )

    @staticmethod
    def _arrays(pattern: Pattern) -> tuple[Array, Array]:
        return pattern.starts, pattern.columns


ORDERS: dict[str, Callable[[Vertices], Array]] = {
    "natural": lambda vertices: np.arange(vertices.count, dtype=np.int32),
    "largest-first": lambda vertices: np.argsort(-vertices.degrees, kind="stable").astype(np.int32),
    "smallest-last": lambda vertices: vertices.dynamic(rising=False, least=True),
    "incidence-degree": lambda vertices: vertices.dynamic(rising=True, least=False),
    "dynamic-largest-first": lambda vertices: vertices.dynamic(rising=False, least=False),
}
