"""Tests of plots of spectra, Hessians and landscapes: the data of the artists, not their appearance."""

from itertools import pairwise

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from scipy.integrate import trapezoid
from scipy.optimize import minimize

import hodiff
from hodiff import plot
from hodiff.estimators import spectral_density
from hodiff.operators import DiagonalOperator
from hodiff.plot.hessian_plot import spread
from hodiff.plot.shared import shortened

SQUARE = DiagonalOperator(torch.tensor([3.0, -1.0]))
DIAGONAL = torch.linspace(-1, 3, 30, dtype=torch.float64)


@pytest.mark.parametrize("log", [False, True])
def test_spectral_density_curve_matches(log):
    density = spectral_density(torch.diag(DIAGONAL), method="exact")
    ax = plot.spectral_density(density, log=log, sigma=0.05)
    (line,) = ax.lines
    x, y = line.get_xydata().T
    points = DIAGONAL.abs().log10().numpy() if log else DIAGONAL.numpy()
    assert x[0] < points.min()
    assert x[-1] > points.max()
    expected = np.exp(-(((x[:, None] - points) / 0.05) ** 2) / 2).mean(1) / (0.05 * np.sqrt(2 * np.pi))
    np.testing.assert_allclose(y, expected, rtol=1e-9, atol=1e-12)
    assert trapezoid(y, x) == pytest.approx(1, abs=5e-3)
    assert ax.get_yscale() == "log"
    assert (r"\log" in ax.get_xlabel()) == log


def test_spectral_density_of_one_eigenvalue_is_finite():
    for matrix in (torch.eye(5), torch.zeros(5, 5)):
        (line,) = plot.spectral_density(spectral_density(matrix, method="exact")).lines
        assert np.isfinite(line.get_xydata()).all()


@pytest.mark.parametrize(
    ("values", "scale"),
    [
        ([2.0, 1.0, 3.0], "linear"),
        ([1.0, 1000.0], "log"),
        ([-1.0, 5.0], "symlog"),
        ([-1.0, -1000.0], "symlog"),
        ([0.0, 1.0], "linear"),
        ([0.0], "linear"),
    ],
)
def test_eigenvalues_are_sorted_and_scaled(values, scale):
    ax = plot.eigenvalues(torch.tensor(values))
    drawn = np.concatenate([collection.get_offsets() for collection in ax.collections])
    np.testing.assert_array_equal(drawn, np.stack([np.arange(len(values)), sorted(values, reverse=True)], 1))
    assert ax.get_yscale() == scale
    assert len(ax.collections) == len({value < 0 for value in values})


def test_hessian_image_and_block_lines_match():
    parameters = {"weight": torch.ones(2, 2), "bias": torch.ones(3)}
    matrix = torch.arange(-24.0, 25.0).reshape(7, 7)
    ax = plot.hessian(matrix, parameters)
    (image,) = ax.images
    np.testing.assert_array_equal(image.get_array(), matrix.numpy())
    assert image.get_clim() == (-24, 24)
    assert [text.get_text() for text in ax.get_yticklabels()] == ["weight", "bias"]
    assert ax.get_xticks().tolist() == [1.5, 5.0]
    assert [line.get_ydata()[0] for line in ax.lines[::2]] == [3.5]
    assert len(ax.lines) == 2


def test_hessian_accepts_names_or_none():
    names = ["a", "b", "c"]
    ax = plot.hessian(torch.eye(3), names)
    assert [text.get_text() for text in ax.get_xticklabels()] == names
    assert not ax.lines
    assert plot.hessian(torch.zeros(2, 2)).images[0].get_clim() == (-1, 1)
    nested = plot.hessian(torch.eye(2), {"layer": {"weight": torch.ones(2)}})
    assert [text.get_text() for text in nested.get_xticklabels()] == ["layer.weight"]


def test_hessian_of_an_operator_uses_its_matrix_and_names():
    A = hodiff.HessianOperator(f, X)
    ax = plot.hessian(A, scale="root")
    # f = a0³ + a1³ + (a0 + a1) b²
    expected = [[6.0, 0.0, 1.0], [0.0, 12.0, 1.0], [1.0, 1.0, 6.0]]
    np.testing.assert_allclose(ax.images[0].get_array(), expected)
    assert [text.get_text() for text in ax.get_yticklabels()] == A.domain.labels == ["a", "b"]
    assert ax.get_title() == "HessianOperator of f, 3 × 3\nat a, b"
    # A quarter of the largest entry has half of its color value, and the color bar is labelled with entries.
    np.testing.assert_allclose(ax.images[0].norm([-12.0, -3.0, 0.0, 3.0, 12.0]), [0, 0.25, 0.5, 0.75, 1])


def test_labels_of_many_rows_do_not_overlap():
    names = [f"encoder.layers.{i % 11}.self_attn.{'in' if i < 16 else 'out'}_proj.weight.{i}" for i in range(31)]
    ax = plot.hessian(torch.eye(31), names)
    ax.figure.canvas.draw()
    labels = ax.get_yticklabels()
    assert len({label.get_text() for label in labels}) == 31
    assert max(len(label.get_text()) for label in labels) <= 24
    assert labels[0].get_fontsize() > 8
    boxes = sorted((label.get_window_extent() for label in labels), key=lambda box: box.y0)
    assert all(below.y1 <= above.y0 + 1 for below, above in pairwise(boxes))


def test_labels_of_small_blocks_are_spread():
    ax = plot.hessian(torch.eye(304), {"large": torch.ones(300), **{name: torch.ones(1) for name in "abcd"}})
    places = ax.get_yticks()
    assert np.diff(places).min() > 9
    assert 0 <= places.min() < places.max() <= 303
    assert len(ax.collections) == 1
    assert ax.get_ylim() == (303.5, -0.5)


def test_spread_matches_constrained_least_squares():
    wanted, gaps = np.array([0.0, 0.1, 0.2, 5.0, 5.1]), np.array([1.0, 0.5, 1.0, 2.0])
    constraints = [
        {"type": "ineq", "fun": lambda x: np.diff(x) - gaps},
        {"type": "ineq", "fun": lambda x: 6 - x[-1]},
        {"type": "ineq", "fun": lambda x: x[0]},
    ]
    best = minimize(lambda x: ((x - wanted) ** 2).sum(), wanted, constraints=constraints).x
    np.testing.assert_allclose(spread(wanted, gaps, (0.0, 6.0)), best, atol=1e-4)
    assert spread([0.0, 0.0, 0.0], [1.0, 1.0], (0.0, 1.0)) == [0.0, 0.5, 1.0]


def test_shortened_names_stay_different():
    assert shortened(["short"]) == ["short"]
    long = [f"encoder.layers.{i}.self_attn.in_proj_weight" for i in range(12)]
    cut = shortened(long)
    assert len(set(cut)) == 12
    assert all("…" in each and len(each) <= 24 for each in cut)


def test_single_eigenvalue_title_is_singular():
    assert plot.eigenvalues(torch.ones(1)).get_title() == "1 eigenvalue"
    A = hodiff.HessianOperator(lambda x: x.square().sum(), torch.ones(1))
    assert plot.eigenvalues(A).get_title().startswith("1 eigenvalue of HessianOperator")
    density = spectral_density(torch.eye(1), method="exact")
    assert plot.spectral_density(density).get_title() == "density of 1 eigenvalue"


def test_eigenvalues_title_names_the_operator():
    A = hodiff.HessianOperator(f, X)
    exact = np.linalg.eigvalsh(np.array([[6.0, 0.0, 1.0], [0.0, 12.0, 1.0], [1.0, 1.0, 6.0]]))[::-1]
    ax = plot.eigenvalues(A)
    np.testing.assert_allclose(ax.collections[0].get_offsets()[:, 1], exact)
    assert ax.get_title() == "all 3 eigenvalues of HessianOperator of f, 3 × 3\nat a, b"
    pairs = A.eigsh(2, which="LA")
    ax = plot.eigenvalues(pairs, of=A)
    np.testing.assert_allclose(ax.collections[0].get_offsets()[:, 1], exact[:2])
    assert ax.get_title().startswith("2 of 3 eigenvalues of HessianOperator")
    assert plot.loss_landscape(f, X, pairs, points=3).get_ylabel().endswith(rf"= {exact[0]:.4g}$, 2 of 2 from below")


def f(x):
    return (x["a"] ** 3).sum() + x["a"].sum() * x["b"] ** 2


X = {"a": torch.tensor([1.0, 2.0], dtype=torch.float64), "b": torch.tensor(0.5, dtype=torch.float64)}


@pytest.mark.parametrize(
    "direction",
    [
        torch.tensor([1.0, 0.0, 2.0], dtype=torch.float64),
        torch.tensor([[1.0], [0.0], [2.0]], dtype=torch.float64),
        [{"a": torch.tensor([1.0, 0.0], dtype=torch.float64), "b": torch.tensor(2.0, dtype=torch.float64)}],
    ],
    ids=["vector", "block", "pytree"],
)
def test_landscape_along_a_line_matches(direction):
    ax = plot.loss_landscape(f, X, direction, span=0.5, points=11)
    curve, model = (line.get_xydata().T for line in ax.lines[:2])
    t = np.linspace(-0.5, 0.5, 11)
    np.testing.assert_allclose(curve[0], t, rtol=0, atol=1e-15)
    exact = (1 + t) ** 3 + 8 + (3 + t) * (0.5 + 2 * t) ** 2
    np.testing.assert_allclose(curve[1], exact, rtol=1e-12)
    # f = 9.75 + (3 + 0.25 + 6) t + (3 + 2 + 12) t^2 + ...
    np.testing.assert_allclose(model[1], 9.75 + 9.25 * t + 17 * t**2, rtol=1e-12)


def test_landscape_in_a_plane_matches():
    directions = torch.eye(3, dtype=torch.float64)[:, :2]
    ax = plot.loss_landscape(f, X, directions, span=1, points=5)
    (contours,) = [each for each in ax.collections if hasattr(each, "levels")]
    t = np.linspace(-1, 1, 5)
    values = (1 + t[None, :]) ** 3 + (2 + t[:, None]) ** 3 + (3 + t[None, :] + t[:, None]) / 4
    np.testing.assert_allclose(contours.zmin, values.min(), rtol=1e-12)
    np.testing.assert_allclose(contours.zmax, values.max(), rtol=1e-12)
    # The first direction is horizontal.
    asymmetric = plot.loss_landscape(lambda x: x[0], torch.zeros(2), torch.eye(2), points=3)
    (contours,) = [each for each in asymmetric.collections if hasattr(each, "levels")]
    path = contours.get_paths()[len(contours.levels) // 2].vertices
    assert np.ptp(path[:, 0]) < np.ptp(path[:, 1])


def test_draws_into_given_axes():
    _, axes = plt.subplots(1, 4)
    density = spectral_density(torch.eye(3), method="exact")
    assert plot.spectral_density(density, axes[0]) is axes[0]
    assert plot.eigenvalues(torch.ones(3), axes[1]) is axes[1]
    assert plot.hessian(torch.eye(3), ax=axes[2]) is axes[2]
    assert plot.loss_landscape(torch.sum, torch.ones(3), torch.ones(3), ax=axes[3]) is axes[3]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: plot.spectral_density(torch.ones(3)),
            "spectral_density: density: expected the result of hodiff.estimators",
        ),
        (lambda: plot.eigenvalues(torch.ones(2, 2)), r"eigenvalues: values: expected a real tensor \(k,\)"),
        (
            lambda: plot.eigenvalues(SQUARE @ (2 * SQUARE)),
            "eigenvalues: values: expected an operator that is known .* got ProductOp",
        ),
        (lambda: plot.eigenvalues(torch.ones(2), of=3), "eigenvalues: of: expected an operator or a title"),
        (lambda: plot.eigenvalues(torch.tensor([torch.nan])), "eigenvalues: values: expected finite numbers"),
        (lambda: plot.hessian(torch.ones(2, 3)), r"hessian: A: expected an operator or a tensor \(n, n\)"),
        (lambda: plot.hessian(torch.full((2, 2), torch.inf)), "hessian: A: expected finite numbers"),
        (lambda: plot.hessian(1j * torch.eye(2)), "hessian: A: expected real numbers, got complex ones"),
        (lambda: plot.hessian(np.eye(2)), r"hessian: A: expected an operator or a tensor \(n, n\), got ndarray"),
        (
            lambda: plot.hessian(torch.eye(1).expand(30_000, 30_000)),
            "hessian: A: expected at most 20,000 rows, got 30,000",
        ),
        (lambda: plot.hessian(torch.eye(2), scale="log"), "hessian: scale"),
        (lambda: plot.hessian(torch.eye(2), ["a"]), "hessian: parameters: expected 2 rows in all, got 1"),
        (lambda: plot.hessian(torch.eye(2), [1, 2]), "hessian: parameters: expected a pytree of tensors or a list"),
        (lambda: plot.loss_landscape(f, X, torch.ones(3), span=0.0), "loss_landscape: span: expected a positive"),
        (lambda: plot.loss_landscape(f, X, torch.ones(3), points=1), "loss_landscape: points: expected an int of 2"),
        (lambda: plot.loss_landscape(f, X, torch.ones(3, 3)), "loss_landscape: directions: expected a tensor"),
        (lambda: plot.loss_landscape(f, X, torch.ones(4)), "loss_landscape: v does not"),
        (lambda: plot.loss_landscape(torch.sin, torch.ones(3), torch.ones(3)), "loss_landscape: f: expected one real"),
    ],
)
def test_rejects_bad_arguments(call, message):
    with pytest.raises(hodiff.InputError, match=message):
        call()


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("names", [["a$"], ["a$", "$b"]])
def test_names_with_dollar_signs_are_not_math(names, tmp_path):
    ax = plot.hessian(torch.eye(len(names)), names)
    ax.figure.savefig(tmp_path / "names.png")
    assert [text.get_text() for text in ax.get_xticklabels()] == names
