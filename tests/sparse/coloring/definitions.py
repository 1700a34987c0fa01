"""Definitions of colorings, and minimal numbers of colors by exhaustive search, independent of hodiff."""

import itertools

import numpy as np


def neighbors_differ(pattern, colors):
    return all(colors[i] != colors[j] for i, j in zip(*np.nonzero(pattern), strict=True) if i != j)


def paths_on_four_have_three_colors(pattern, colors):
    near = [[j for j in np.flatnonzero(row) if j != i] for i, row in enumerate(pattern)]
    return all(
        len({colors[a], colors[b], colors[c], colors[d]}) >= 3
        for b in range(len(near))
        for c in near[b]
        for a in near[b]
        for d in near[c]
        if len({a, b, c, d}) == 4
    )


def cycles_have_three_colors(pattern, colors):
    """Whether the vertices of any two colors induce a forest: removing leaves repeatedly removes every vertex."""
    for pair in itertools.combinations(sorted(set(colors)), 2):
        left = {v for v, color in enumerate(colors) if color in pair}
        while True:
            leaves = {v for v in left if sum(pattern[v, w] and w != v for w in left) <= 1}
            if not leaves:
                break
            left -= leaves
        if left:
            return False
    return True


def each_row_sees_a_color_once(pattern, colors):
    return all(
        len(seen := [colors[j] for j in np.flatnonzero(row)]) == len(set(seen)) and -1 not in seen for row in pattern
    )


def every_entry_can_be_read(pattern, row_colors, column_colors):
    """Whether every entry is alone in its row with its column's color, or alone in its column with its row's color."""

    def reads(matrix, colors, i, j):
        return colors[j] >= 0 and [colors[k] for k in np.flatnonzero(matrix[i])].count(colors[j]) == 1

    return all(
        reads(pattern, column_colors, i, j) or reads(pattern.T, row_colors, j, i)
        for i, j in zip(*np.nonzero(pattern), strict=True)
    )


def least_colors(n, is_right):
    """Return the least number of colors of n vertices, apart from the neutral -1, for which a valid coloring exists."""
    for k in range(n + 1):
        for colors in itertools.product(range(-1, k), repeat=n):
            # Colors appear in increasing order, to skip renamed copies of a coloring.
            first = [color for i, color in enumerate(colors) if color >= 0 and color not in colors[:i]]
            if first == list(range(k)) and is_right(colors):
                return k
    raise AssertionError("A color for each is always right.")
