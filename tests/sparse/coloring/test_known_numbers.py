"""Tests of known numbers of colors: from theorems, exhaustive search, and figures in papers."""

import numpy as np
import pytest

from hodiff.sparse.coloring import color
from hodiff.sparse.coloring.coloring_problems import least_acyclic, least_star
from hodiff.sparse.coloring.compressed_patterns import pattern_of
from tests.sparse.coloring import definitions, graphs


@pytest.mark.parametrize("beta", [0, 1, 2, 5])
@pytest.mark.parametrize("order", [None, "natural"])
def test_bands_take_the_published_number_of_colors(beta, order):
    """Gebremedhin et al. 2009: 2 floor(rho / 2) + 1 and floor(rho / 2) + 1, with rho off-diagonals on both sides."""
    pattern = graphs.band(40, beta)
    assert color(pattern, "star", order).num_colors == 2 * beta + 1
    assert color(pattern, "acyclic", order).num_colors == beta + 1
    assert color(pattern, "columns", order).num_colors == 2 * beta + 1


@pytest.mark.parametrize("pattern", [graphs.arrow(30), graphs.arrow(30)[::-1, ::-1]])
def test_arrows_take_two_colors(pattern):
    assert color(pattern, "star").num_colors == color(pattern, "acyclic").num_colors == 2
    assert color(pattern, "columns").num_colors == color(pattern, "rows").num_colors == 30
    assert color(pattern, "bidirectional").num_colors == 3


@pytest.mark.parametrize(
    ("pattern", "star", "acyclic"),
    [
        (graphs.cycle(5), 4, 3),
        (graphs.cycle(6), 3, 3),
        (graphs.cycle(8), 3, 3),
        (graphs.cycle(9), 3, 3),
        (graphs.complete_bipartite(3, 8), 4, 4),
        (graphs.complete_bipartite(5, 5), 6, 6),
        (np.ones((7, 7), bool), 7, 7),
        (graphs.binary_tree(63), 3, 2),
    ],
)
def test_graphs_take_about_the_least_number_of_colors(pattern, star, acyclic):
    """The least numbers are from Fertin, Raspaud & Reed, "Star coloring of graphs", 2004; cycles may take one more."""
    assert star <= color(pattern, "star").num_colors <= star + (star == acyclic == 3)
    assert color(pattern, "acyclic").num_colors == acyclic


def test_grids_take_few_colors():
    """Star colorings of a grid take 5 colors (Fertin et al. 2004), acyclic colorings 3; hodiff may take a few more."""
    assert 3 <= color(graphs.grid(12, 15), "acyclic").num_colors <= 4
    assert 5 <= color(graphs.grid(12, 15), "star").num_colors <= 6
    assert color(graphs.grid(12, 15), "columns").num_colors <= 7
    # Four mutually adjacent vertices take 4 colors.
    assert 4 <= color(graphs.grid(12, 15, corners=True), "acyclic").num_colors <= 6
    assert color(graphs.grid(12, 15, corners=True), "columns").num_colors == 9


# Figures 4.1 and 6.1 of Gebremedhin, Manne & Pothen 2005 with their colors; the second is also in figures 1 and 4 of
# Gebremedhin et al. 2009. Edges count from 1.
SIX = graphs.of_edges(6, [(0, 1), (1, 2), (1, 4), (1, 5), (2, 3), (3, 5)])
TEN = graphs.of_edges(
    10,
    [(a - 1, b - 1) for a, b in [(1, 2), (1, 7), (2, 3), (2, 5), (3, 4), (3, 6), (4, 10), (5, 6), (5, 8), (6, 9)]]
    + [(a - 1, b - 1) for a, b in [(7, 8), (8, 9), (9, 10)]],
)


@pytest.mark.parametrize(("pattern", "star", "acyclic"), [(SIX, 3, 3), (TEN, 5, 3)])
def test_examples_of_papers_take_no_more_colors(pattern, star, acyclic):
    assert color(pattern, "star").num_colors <= star
    assert color(pattern, "acyclic").num_colors <= acyclic


@pytest.mark.parametrize("seed", range(6))
def test_star_and_acyclic_colorings_are_close_to_exhaustive_search(seed):
    n = 6
    pattern = graphs.random_symmetric(n, 0.3, diagonal=seed % 2 == 0, seed=seed)
    least = definitions.least_colors(n, lambda colors: definitions.every_entry_can_be_read(pattern, colors, colors))
    assert least <= color(pattern, "star").num_colors <= least + 1
    if seed % 2 == 0:
        acyclic = definitions.least_colors(
            n,
            lambda colors: (
                -1 not in colors
                and definitions.neighbors_differ(pattern, colors)
                and definitions.cycles_have_three_colors(pattern, colors)
            ),
        )
        assert color(pattern, "acyclic").num_colors == acyclic


@pytest.mark.parametrize("seed", range(3))
def test_column_and_bidirectional_colorings_are_close_to_exhaustive_search(seed):
    m, n = 3, 4
    pattern = graphs.random_matrix(m, n, 0.5, seed=seed)
    columns = definitions.least_colors(n, lambda colors: definitions.each_row_sees_a_color_once(pattern, colors))
    assert color(pattern, "columns").num_colors == columns

    # Row colors and column colors are counted separately.
    def is_right(colors):
        shared = set(colors[:m]) & set(colors[m:]) - {-1}
        return not shared and definitions.every_entry_can_be_read(pattern, colors[:m], colors[m:])

    least = definitions.least_colors(m + n, is_right)
    assert least <= color(pattern, "bidirectional").num_colors <= least + 1


@pytest.mark.parametrize(
    ("pattern", "products"),
    [
        (np.eye(8, dtype=bool)[::-1], 1),
        (np.array([[1, 1, 0], [0, 1, 1], [1, 0, 1]], bool), 3),
        (np.pad(np.zeros((8, 18), bool), 1, constant_values=True), 4),
    ],
)
def test_bidirectional_colorings_of_small_patterns_are_optimal(pattern, products):
    """The patterns are an antidiagonal, a cycle and a frame."""
    assert color(pattern, "bidirectional").num_colors == products


@pytest.mark.parametrize("pattern", graphs.ANY.values(), ids=graphs.ANY)
def test_bidirectional_takes_no_more_than_one_side(pattern):
    one = min(color(pattern, method).num_colors for method in ("columns", "rows"))
    assert color(pattern, "bidirectional").num_colors <= one


@pytest.mark.parametrize("pattern", graphs.SYMMETRIC.values(), ids=graphs.SYMMETRIC)
def test_star_takes_no_more_than_columns(pattern):
    assert color(pattern, "star").num_colors <= color(pattern, "columns", "natural").num_colors


@pytest.mark.parametrize("n", range(1, 9))
@pytest.mark.parametrize("beta", [1, 2])
def test_lower_bounds_hold_for_short_bands(n, beta):
    pattern = graphs.band(n, beta)

    def star(colors):
        return -1 not in colors and definitions.every_entry_can_be_read(pattern, colors, colors)

    least = definitions.least_colors(n, star) if n <= 7 else 2 * beta + 1
    assert least_star(pattern_of("test", pattern)) <= least
    assert least_acyclic(pattern_of("test", pattern)) == min(n, beta + 1)
    assert color(pattern, "star").num_colors == least


@pytest.mark.parametrize(("without", "products"), [("diagonal", 1), ("nothing", 2)])
def test_star_without_its_diagonal_takes_one_product(without, products):
    pattern = graphs.arrow(9) & ~np.eye(9, dtype=bool) if without == "diagonal" else graphs.arrow(9)
    assert color(pattern, "star").num_colors == color(pattern, "acyclic").num_colors == products
