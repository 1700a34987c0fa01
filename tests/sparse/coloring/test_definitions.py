"""Tests of colorings against their definitions."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hodiff.sparse.coloring import color
from hodiff.sparse.coloring.vertex_orders import ORDERS
from tests.sparse.coloring import definitions, graphs

FULL_DIAGONAL = {name: each for name, each in graphs.SYMMETRIC.items() if each.diagonal().all()}
EACH_ORDER = pytest.mark.parametrize("order", [None, *ORDERS])


@EACH_ORDER
@pytest.mark.parametrize("pattern", FULL_DIAGONAL.values(), ids=FULL_DIAGONAL)
def test_star_coloring_satisfies_its_definition(pattern, order):
    colors = color(pattern, "star", order).colors
    assert definitions.neighbors_differ(pattern, colors)
    assert definitions.paths_on_four_have_three_colors(pattern, colors)


@EACH_ORDER
@pytest.mark.parametrize("pattern", FULL_DIAGONAL.values(), ids=FULL_DIAGONAL)
def test_acyclic_coloring_satisfies_its_definition(pattern, order):
    colors = color(pattern, "acyclic", order).colors
    assert definitions.neighbors_differ(pattern, colors)
    assert definitions.cycles_have_three_colors(pattern, colors)


@EACH_ORDER
@pytest.mark.parametrize("pattern", graphs.SYMMETRIC.values(), ids=graphs.SYMMETRIC)
def test_star_coloring_with_neutral_vertices_recovers_every_entry(pattern, order):
    colors = color(pattern, "star", order).colors
    assert definitions.every_entry_can_be_read(pattern, colors, colors)


@EACH_ORDER
@pytest.mark.parametrize("pattern", graphs.ANY.values(), ids=graphs.ANY)
def test_column_and_row_colorings_satisfy_their_definition(pattern, order):
    assert definitions.each_row_sees_a_color_once(pattern, color(pattern, "columns", order).colors)
    assert definitions.each_row_sees_a_color_once(pattern.T, color(pattern, "rows", order).colors)


@EACH_ORDER
@pytest.mark.parametrize("pattern", graphs.ANY.values(), ids=graphs.ANY)
def test_bidirectional_coloring_recovers_every_entry(pattern, order):
    coloring = color(pattern, "bidirectional", order)
    assert definitions.every_entry_can_be_read(pattern, coloring.row_colors, coloring.column_colors)


@given(st.integers(1, 40), st.floats(0, 0.5), st.integers(0, 2**31), st.sampled_from(list(ORDERS)))
def test_colorings_of_random_graphs_satisfy_their_definitions(n, density, seed, order):
    pattern = graphs.random_symmetric(n, density, seed=seed)
    star, acyclic = (color(pattern, method, order).colors for method in ("star", "acyclic"))
    assert definitions.neighbors_differ(pattern, star)
    assert definitions.neighbors_differ(pattern, acyclic)
    assert definitions.paths_on_four_have_three_colors(pattern, star)
    assert definitions.cycles_have_three_colors(pattern, acyclic)


@pytest.mark.parametrize("method", ["star", "acyclic", "columns", "rows", "bidirectional"])
def test_colors_are_numbered_without_gaps(method):
    for pattern in graphs.SYMMETRIC.values():
        coloring = color(pattern, method)
        for side, colors in (("columns", coloring.column_colors), ("rows", coloring.row_colors)):
            if colors is not None:
                assert set(colors) - {-1} == set(range(coloring.count(side)))
        assert coloring.num_colors == coloring.count("columns") + coloring.count("rows")


def test_best_of_several_orders_is_kept():
    pattern = graphs.random_symmetric(60, 0.1)
    counts = {order: color(pattern, "star", order).num_colors for order in ORDERS}
    assert color(pattern, "star", tuple(ORDERS)).num_colors == min(counts.values())
    assert counts[color(pattern, "star", tuple(ORDERS)).order] == min(counts.values())
    assert len(set(counts.values())) > 1


@pytest.mark.parametrize("name", ["smallest-last", "incidence-degree", "dynamic-largest-first"])
@pytest.mark.parametrize("method", ["star", "columns"])
def test_dynamic_orders_satisfy_their_definition(name, method):
    from hodiff.sparse.coloring.compressed_patterns import pattern_of
    from hodiff.sparse.coloring.vertex_orders import Vertices

    given = graphs.random_symmetric(30, 0.1) if method == "star" else graphs.random_matrix(12, 30, 0.08)
    near = given if method == "star" else given.T.astype(int) @ given.astype(int) > 0
    near = near & ~np.eye(len(near), dtype=bool)
    pattern = pattern_of("test", given)
    vertices = Vertices(pattern) if method == "star" else Vertices(pattern.transposed, pattern)
    order = ORDERS[name](vertices).tolist()
    assert sorted(order) == list(range(30))
    for i, v in enumerate(order):
        before, after = order[:i], order[i:]
        if name == "smallest-last":
            among = order[: i + 1]
            assert near[v, among].sum() == min(near[w, among].sum() for w in among)
        elif name == "incidence-degree":
            assert near[v, before].sum() == max(near[w, before].sum() for w in after)
        else:
            assert near[v, after].sum() == max(near[w, after].sum() for w in after)
