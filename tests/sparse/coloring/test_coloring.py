"""Tests of saved colorings, and of their reprs."""

import dataclasses

import numpy as np
import pytest

from hodiff.errors import InputError
from hodiff.sparse.coloring import Coloring, color
from hodiff.sparse.coloring.coloring import SIDES
from tests.sparse.coloring import graphs


@pytest.mark.parametrize("method", SIDES)
def test_save_and_load_round_trip(method, tmp_path):
    pattern = graphs.grid(4, 5)
    coloring = color(pattern, method)
    coloring.save(tmp_path / "coloring.npz")
    loaded = Coloring.load(str(tmp_path / "coloring.npz"))
    assert repr(loaded) == repr(coloring)
    assert (loaded.order, loaded.shape, loaded.num_colors) == (coloring.order, (20, 20), coloring.num_colors)
    matrix = np.where(pattern, np.arange(20)[:, None] + np.arange(20), 0)
    products = [(matrix if s == "columns" else matrix.T) @ loaded.seeds(int, side=s) for s in loaded.sides]
    np.testing.assert_array_equal(
        loaded.decompress(products if len(products) == 2 else products[0]), matrix[np.nonzero(pattern)]
    )


def test_load_rejects_other_files(tmp_path):
    with pytest.raises(FileNotFoundError):
        Coloring.load(tmp_path / "nothing.npz")
    (tmp_path / "text.npz").write_text("colors")
    np.savez(tmp_path / "other.npz", colors=np.arange(3))
    np.savez(tmp_path / "pickled.npz", method=np.array([object()], dtype=object))
    for name in ("text.npz", "other.npz", "pickled.npz"):
        with pytest.raises(InputError, match=r"^Coloring.load: path: expected a file that Coloring.save wrote, got .*"):
            Coloring.load(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("format", np.array(99)),
        ("method", np.array("stars")),
        ("columns", np.arange(3)),
        ("columns", np.full(7, 9)),
        ("column_colors", np.zeros(2, int)),
        ("column_colors", np.array([0, 1, -5])),
        ("starts", np.array([0, 5, 2, 7])),
    ],
)
def test_load_rejects_damaged_files(name, value, tmp_path):
    color(graphs.band(3, 1), "star").save(tmp_path / "coloring.npz")
    with np.load(tmp_path / "coloring.npz") as file:
        held = dict(file)
    np.savez(tmp_path / "damaged.npz", **{**held, name: value})
    with pytest.raises(InputError, match=r"^Coloring.load: path"):
        Coloring.load(tmp_path / "damaged.npz")


def test_repr_shows_method_size_and_colors():
    assert repr(color(graphs.arrow(1200))) == "Coloring('star', 1,200 x 1,200, 3,598 entries, 2 colors)"
    both = color(graphs.arrow(30), "bidirectional")
    assert (
        repr(both)
        == f"Coloring('bidirectional', 30 x 30, 88 entries, {both.count('columns')} + {both.count('rows')} colors)"
    )


def test_coloring_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        color(graphs.arrow(5)).method = "rows"
