"""Tests of the curves and verdicts of routes against closed forms, and of differences at points without derivative."""

import numpy as np
import pytest
import torch
from torch.autograd import Function

import hodiff
from hodiff.plot import derivatives, routes, straight_through, typed_function
from hodiff.plot.scalar_differences import from_values, settled


def curves(ax):
    """Return the curves by their labels."""
    return {line.get_label(): line.get_xydata().T for line in ax.lines if not line.get_label().startswith("_")}


def titles(panels):
    return [ax.get_title() for ax in panels]


def test_differences_of_values_match_to_third_order():
    points = np.linspace(-2, 2, 9)
    found, doubt = from_values(np.sin, points, 3, 0.1)
    exact = [np.sin(points), np.cos(points), -np.sin(points), -np.cos(points)]
    np.testing.assert_allclose(found, exact, rtol=0, atol=1e-9)
    assert doubt.max() < 1e-6


@pytest.mark.parametrize(
    "f", [np.sign, lambda x: np.maximum(x, 0), np.abs, lambda x: np.where(x > 0, np.exp(x), 0)], ids=range(4)
)
def test_jumps_and_kinks_are_unsettled(f):
    points = np.array([-1.0, 0.0, 1.0])
    found, doubt = from_values(f, points, 1, 0.1)
    assert settled(found[1], doubt[1], 1.0).tolist() == [True, False, True]


def test_routes_of_a_right_function_are_confirmed():
    panels = routes(torch.sin, -2, 3, order=3, points=40)
    assert titles(panels) == ["$f$", *(f"$f{chr(39) * k}$: differences confirm all {2**k} routes" for k in (1, 2, 3))]
    for ax, form in zip(panels, (np.sin, np.cos, lambda x: -np.sin(x), lambda x: -np.cos(x)), strict=True):
        x, y = curves(ax)["value" if ax is panels[0] else "all routes"]
        np.testing.assert_allclose(x, np.linspace(-2, 3, 40))
        np.testing.assert_allclose(y, form(x), rtol=0, atol=1e-12)
        x, y = curves(ax)["differences of values"]
        np.testing.assert_allclose(y, form(x), rtol=0, atol=1e-8)


def test_wrong_routes_are_named():
    cut = typed_function("x.sin()", "g * x.detach().cos()", "t * x.cos()")
    value, first, second = routes(cut.apply, -2, 3)
    assert titles([first, second]) == ["$f'$: differences confirm all 2 routes", "$f''$: wrong by rr, fr"]
    assert not curves(second)["rr, fr: wrong"][1].any()
    x, y = curves(second)["rf, ff"]
    np.testing.assert_allclose(y, -np.sin(x), rtol=0, atol=1e-12)
    half = typed_function("x**3", "3 * g * x**2", "1.5 * t * x**2")
    assert titles(routes(half.apply, -1, 1, order=1))[1] == "$f'$: wrong by f"
    assert value.get_title() == "$f$"


def test_raising_routes_are_named():
    class ReverseOnly(Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x):
            return x.exp()

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(output)

        @staticmethod
        def backward(ctx, g):
            return g * ctx.saved_tensors[0]

    assert titles(routes(ReverseOnly.apply, -1, 1, order=1))[1] == "$f'$: raises by f"


AWAY = "\naway from dotted lines"


@pytest.mark.parametrize(
    ("f", "away"),
    [(lambda x: 3 * x, ""), (lambda x: torch.ones_like(x), ""), (torch.relu, AWAY), (torch.abs, AWAY)],
    ids=["linear", "constant", "relu", "abs"],
)
def test_zero_derivatives_look_flat(f, away):
    """Zero derivatives look like zero: their rounding errors are far below the height of the axis."""
    panels = routes(f, -1, 1, points=9)
    assert titles(panels)[2] == f"$f''$: differences confirm all 4 routes{away}"
    assert 0.01 < panels[2].get_ylim()[1] < 1


def dotted(ax):
    return sorted(line.get_xdata()[0] for line in ax.lines if line.get_linestyle() == ":")


@pytest.mark.parametrize(
    ("f", "places"),
    [
        (torch.round, [-0.5, 0.5]),
        (torch.sign, [0.0]),
        (lambda x: torch.sign(x - 0.04), [0.04]),  # outside the stencils of two adjacent differences
        (torch.reciprocal, [0.0]),
        (lambda x: (x > 0.123).to(x) + 5 * x, [0.123]),
        (lambda x: torch.tanh(50 * x), []),
    ],
    ids=["round", "sign", "off the dots", "pole", "on a slope", "steep"],
)
def test_jumps_are_marked(f, places):
    panels = routes(f, -1, 1, order=1)
    for ax in (*panels, derivatives(f, -1, 1, order=1)):
        np.testing.assert_allclose(dotted(ax), places, rtol=0, atol=1e-8)
    assert panels[1].get_title() == f"$f'$: differences confirm all 2 routes{AWAY if places else ''}"
    assert np.abs(curves(panels[0])["differences of values"][1]).max() < 100


def test_jump_of_the_slope_is_marked_once():
    assert dotted(derivatives(lambda x: (x - 0.3).relu(), -1, 1)) == pytest.approx([0.3])


def test_jump_does_not_stretch_the_axis():
    """SciPy's difference at the jump of the sign function is of order 10,000."""
    ax = derivatives(hodiff.functions.sign_ste, -3, 3, order=1)
    assert ax.get_ylim()[1] < 1.2
    (dots,) = [line for line in ax.lines if line.get_marker() == "."]
    assert len(dots.get_xdata()) == 24
    assert "no derivative" in [text.get_text() for text in ax.get_legend().get_texts()]
    _, slopes = routes(hodiff.functions.sign_ste, -3, 3, order=1)
    assert slopes.get_ylim()[1] < 1.2
    assert slopes.get_title() == "$f'$: wrong by r, f"


def test_straight_through_curves_match():
    values, slopes, surface = straight_through(torch.round, lambda x: x.clone(), low=-2.4, high=2.4, steps=25)
    x, y = curves(values)["forward"]
    at = np.isfinite(y)
    np.testing.assert_array_equal(y[at], np.round(x[at]))
    assert (~at).sum() == 4, "a gap at each jump"
    assert set(curves(slopes)["backward: slope of the surrogate"][1]) == {1.0}
    _, own = curves(slopes)["slope of forward"]
    assert np.nanmax(np.abs(own)) < 1e-12
    assert slopes.get_ylim()[1] < 1.2
    # Gradient descent by hand, whose updates ignore the rounding of the weights.
    w, target = np.array([-1.6, 1.7]), np.array([0.7, -1.2])
    for _ in range(25):
        away = np.round(w) - target
        w = w - 0.1 * (2 * away + 0.6 * away[::-1])
    way = curves(surface)["descent"]
    np.testing.assert_allclose(way[:, -1], w)
    heights = surface.images[0].get_array()
    corner = np.array([-2.0, 2.0]) - target
    np.testing.assert_allclose(heights[-1, 0], (corner**2).sum() + 0.6 * corner.prod())


def test_typed_rules_make_a_function():
    swish = typed_function("x * x.sigmoid()", "g * (y / x + y * (1 - x.sigmoid()))")
    assert hodiff.check(swish, torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64), scipy=False).ok
    torch.testing.assert_close(swish.apply(torch.ones(2)), torch.nn.functional.silu(torch.ones(2)))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: routes(lambda x: x.softmax(0), -1, 1), "routes: f: expected an elementwise function"),
        (lambda: routes(lambda x: x.sum(), -1, 1), "routes: f: expected an elementwise function"),
        (lambda: routes(torch.sin, 1, 1), "routes: low, high: expected finite numbers"),
        (lambda: routes(torch.sin, 0, 1, order=5), "routes: order"),
        (lambda: routes(torch.sin, 0, 1, axes=[]), "routes: axes: expected 3, one for each order, got 0"),
        (lambda: straight_through(torch.round, torch.tanh, rate=0.0), "straight_through: rate: expected a positive"),
        (
            lambda: straight_through(torch.round, torch.tanh, start=(1.0,)),
            "straight_through: start: expected two numbers",
        ),
        (lambda: straight_through(torch.round, torch.tanh, axes=[1]), "straight_through: axes: expected 3, got 1"),
        (lambda: typed_function("x +", "g"), "forward: expected an expression in x, got 'x \\+'"),
        (lambda: typed_function("x", "h"), "backward: expected an expression in g, x and y, torch and F, got 'h'"),
        (lambda: typed_function("__import__('os')", "g"), "forward: expected an expression in x, torch and F"),
        (lambda: typed_function("1.0", "g").apply(torch.ones(1)), "forward: expected an expression that is a tensor"),
    ],
)
def test_rejects_bad_arguments(call, message):
    with pytest.raises(hodiff.InputError, match=message):
        call()


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_undefined_values_are_plotted_without_warnings():
    """Functions without values on half of the interval, or on all of it, are plotted without warnings."""
    assert routes(torch.log, -1, 1)[2].get_title() == f"$f''$: differences confirm all 4 routes{AWAY}"
    assert routes(lambda x: x * torch.nan, -1, 1)[1].get_title() == "$f'$: differences know it nowhere"
