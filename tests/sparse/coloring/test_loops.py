"""Compiled and Python loops give the same colors, orders, pairs and forests, for every representation of sets."""

import numpy as np
import pytest

from hodiff.kernels.coloring import greedy
from hodiff.kernels.fused_library import available
from hodiff.sparse.coloring import color, interpreted
from hodiff.sparse.coloring import compressed_patterns as patterns
from hodiff.sparse.coloring import vertex_orders as orders
from hodiff.sparse.coloring.coloring import SIDES
from hodiff.sparse.coloring.vertex_orders import ORDERS
from tests.sparse.coloring import graphs

pytestmark = pytest.mark.skipif(not available(), reason="hodiff was installed without a C++ compiler")
USERS = ("coloring_problems", "vertex_orders", "entries", "substitution")
# Some patterns take more colors than a word has bits, so that some vertices use lists and others bit sets.
LARGE = {
    "many colors": graphs.random_symmetric(150, 0.4),
    "some long rows": graphs.random_symmetric(120, 0.03)
    | graphs.of_edges(120, [(i, j) for i in range(3) for j in range(120)]),
    "a clique": graphs.random_symmetric(160, 0.02) | np.pad(np.ones((90, 90), bool), ((0, 70), (0, 70))),
}


def by_compiled_and_python_loops(monkeypatch, compute):
    found = []
    for module in (greedy, interpreted):
        for name in USERS:
            monkeypatch.setattr(f"hodiff.sparse.coloring.{name}.loops", lambda module=module: module)
        found.append(compute())
    return found


def assert_equal(first, second):
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("method", SIDES)
def test_compiled_loops_match_python_for_small_patterns(monkeypatch, method, order):
    table = graphs.SYMMETRIC if method in {"star", "acyclic"} else graphs.ANY
    for pattern in table.values():
        first, second = by_compiled_and_python_loops(monkeypatch, lambda pattern=pattern: color(pattern, method, order))
        assert_equal(*([each for each in (c.row_colors, c.column_colors) if each is not None] for c in (first, second)))


@pytest.mark.parametrize("pattern", LARGE.values(), ids=LARGE)
@pytest.mark.parametrize("method", SIDES)
def test_compiled_loops_match_python_for_larger_patterns(monkeypatch, method, pattern):
    first, second = by_compiled_and_python_loops(
        monkeypatch, lambda: color(pattern, method, ("natural", "largest-first"))
    )
    assert_equal(*([each for each in (c.row_colors, c.column_colors) if each is not None] for c in (first, second)))
    assert first.num_colors > 64 or method == "bidirectional" or not pattern[:90, :90].all() or method == "rows"


@pytest.mark.parametrize("pattern", [graphs.binary_tree(40), graphs.band(60, 3), graphs.random_geometric(50, 0.2)])
def test_compiled_substitution_plans_match_python(monkeypatch, pattern):
    plans = by_compiled_and_python_loops(monkeypatch, lambda: color(pattern, "acyclic", "smallest-last").plan)
    fields = ("rows", "colors", "signs", "parents", "ends", "unknowns")
    assert_equal(*([getattr(plan, name) for name in fields] for plan in plans))
    assert plans[0].doublings == plans[1].doublings


def test_set_representation_is_revised_for_skewed_degrees(monkeypatch):
    """A few vertices have many neighbours, but the average is low."""
    pattern = np.zeros((2000, 2000), bool)
    pattern[:130, :130] = True
    np.fill_diagonal(pattern, True)
    calls = []
    original = greedy._sets
    monkeypatch.setattr(greedy, "_sets", lambda *given: calls.append(given[1]) or original(*given))
    assert color(pattern, "star", "natural").num_colors == 130
    assert calls == [1, 2, 4]


def test_column_degrees_match_dense_products():
    matrix = graphs.random_matrix(12, 20, 0.1)
    pattern = patterns.pattern_of("test", matrix)
    shared = matrix.T.astype(int) @ matrix.astype(int) > 0
    np.fill_diagonal(shared, False)
    vertices = orders.Vertices(pattern.transposed, pattern)
    np.testing.assert_array_equal(vertices.degrees, shared.sum(0))
