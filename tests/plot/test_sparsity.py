"""Tests of plots of sparse matrices: the entries in the colors of their seeds, or the densities."""

import matplotlib.pyplot as plt
import numpy as np
import pytest
import scipy.sparse
import torch

import hodiff
from hodiff import plot

RNG = np.random.default_rng(0)
MASK = RNG.random((7, 5)) < 0.4
SYMMETRIC = np.abs(np.subtract.outer(np.arange(9), np.arange(9))) <= 1


def image_of(ax):
    (image,) = ax.images
    return image, image.get_array()


@pytest.mark.parametrize(
    "form",
    [
        scipy.sparse.csr_array,
        scipy.sparse.coo_matrix,
        np.array,
        torch.tensor,
        lambda mask: torch.tensor(mask).double().to_sparse(),
    ],
    ids=["csr", "coo", "numpy", "torch", "sparse tensor"],
)
def test_entries_are_drawn_at_their_positions(form):
    ax = plot.sparsity(form(MASK))
    _, shown = image_of(ax)
    np.testing.assert_array_equal(~np.ma.getmaskarray(shown), MASK)
    assert ax.get_title() == f"7 × 5, {MASK.sum()} entries"
    assert (ax.get_xlim(), ax.get_ylim()) == ((-0.5, 4.5), (6.5, -0.5))


@pytest.mark.parametrize("method", ["star", "acyclic", "columns", "rows"])
def test_entries_have_the_colour_of_their_seed(method):
    coloring = hodiff.sparse.color(SYMMETRIC if method in {"star", "acyclic"} else MASK, method)
    ax = plot.sparsity(coloring)
    image, shown = image_of(ax)
    given = coloring.colors[None, :] if method != "rows" else coloring.colors[:, None]
    mask = SYMMETRIC if method in {"star", "acyclic"} else MASK
    np.testing.assert_array_equal(np.ma.getmaskarray(shown), ~mask)
    np.testing.assert_array_equal(shown[mask], np.broadcast_to(given, mask.shape)[mask])
    assert ax.get_title().endswith(f", {coloring.num_colors} colors")
    rgb = image.to_rgba(shown)
    for color in range(coloring.num_colors):
        where = mask & (given == color)
        assert len(np.unique(rgb[where], axis=0)) == 1
    assert len(np.unique(rgb[mask], axis=0)) == coloring.num_colors


def test_bidirectional_colours_match():
    arrow = np.eye(8, dtype=bool)
    arrow[0] = arrow[:, 0] = True
    coloring = hodiff.sparse.color(arrow, "bidirectional")
    _, shown = image_of(plot.sparsity(coloring))
    for i, j in np.argwhere(arrow):
        column, row = coloring.column_colors[j], coloring.row_colors[i]
        expected = column if column >= 0 else coloring.count("columns") + row
        assert shown[i, j] == expected


def test_large_matrix_is_drawn_as_densities():
    matrix = scipy.sparse.random_array((1003, 400), density=0.01, rng=RNG, format="csr")
    ax = plot.sparsity(matrix, cells=10)
    _, shown = image_of(ax)
    assert shown.shape == (10, 10)
    edges = np.linspace(0, 1003, 11).round().astype(int)
    for i in (0, 4, 9):
        block = matrix[edges[i] : edges[i + 1], 40:80]
        assert shown[i, 1] == pytest.approx(block.nnz / np.prod(block.shape))
    assert (ax.get_xlim(), ax.get_ylim()) == ((-0.5, 399.5), (1002.5, -0.5))
    assert ax.get_title() == f"1,003 × 400, {matrix.nnz:,} entries"
    band = scipy.sparse.eye_array(2000, format="csr")
    _, shown = image_of(plot.sparsity(hodiff.sparse.color(band), cells=100))
    np.testing.assert_array_equal(~np.ma.getmaskarray(shown), np.eye(100, dtype=bool))
    assert image_of(plot.sparsity(scipy.sparse.csr_array((2000, 3)), cells=10))[1].mask.all()


def test_draws_into_given_axes():
    _, ax = plt.subplots()
    assert plot.sparsity(MASK, ax) is ax


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: plot.sparsity(3), "A: expected a sparse matrix of SciPy or torch or a boolean array, got int"),
        (lambda: plot.sparsity(np.eye(3)), "A: expected booleans in a dense matrix"),
        (lambda: plot.sparsity(np.ones(3, bool)), "A: expected a matrix with rows and columns"),
        (lambda: plot.sparsity(scipy.sparse.csr_array((0, 3))), "A: expected a matrix with rows and columns"),
        (lambda: plot.sparsity(MASK, cells=0), "cells: expected an int of 1 or more"),
    ],
)
def test_rejects_bad_arguments(call, words):
    with pytest.raises(hodiff.InputError, match=f"^sparsity: {words}"):
        call()
