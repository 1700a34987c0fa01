"""Sampling from grids, and dropout: torch's values, gradients, random numbers and errors, by every route."""

import itertools
import warnings

import pytest
import torch
import torch.nn.functional as F
from corrections.against_torch import same_error, same_value
from drawing import draw
from slow_cases import backend_of, slow_except

import hodiff

D = torch.float64
corrected = hodiff.corrected()

MODES = ("bilinear", "nearest", "bicubic")
PADDINGS = ("zeros", "border", "reflection")
HAS_CUBIC_VOLUMES = torch.__version__ >= "2.15"
OPTIONS = [
    (dimensions, *each)
    for dimensions in (2, 3)
    for each in itertools.product(MODES, PADDINGS, (False, True))
    if HAS_CUBIC_VOLUMES or (dimensions, each[0]) != (3, "bicubic")
]


def inputs(dimensions, points=2):
    """Return an image or volume, and points, some of them outside."""
    sizes = (3, 4) if dimensions == 2 else (3, 2, 4)
    return draw(1, 1, *sizes), 0.8 * draw(1, *[1] * (dimensions - 1), points, dimensions, seed=1)


def sampled(mode, padding, align_corners):
    return lambda x, grid: F.grid_sample(x, grid, mode, padding, align_corners=align_corners)


ONE_OF_EACH = ((2, "bilinear", "zeros", False), (2, "bicubic", "border", True), (3, "bilinear", "reflection", False))


@pytest.mark.slow
@pytest.mark.parametrize("options", slow_except(ONE_OF_EACH, ONE_OF_EACH[:1]))
def test_derivatives_match_differences_by_every_route(options):
    dimensions, mode, padding, align_corners = options
    f = sampled(mode, padding, align_corners)
    hodiff.assert_differentiable(corrected(f), inputs(dimensions, 1), vmap=False, scipy=False)


# These take seconds each; other options are tested to second order below.
SOME = OPTIONS[::5]


@pytest.mark.slow
@pytest.mark.parametrize("options", SOME, ids=str)
def test_third_order_and_compiled_derivatives_match_differences(options):
    dimensions, mode, padding, align_corners = options
    f = sampled(mode, padding, align_corners)
    backend = backend_of(options, SOME)
    hodiff.assert_differentiable(corrected(f), inputs(dimensions, 1), order=3, scipy=False, compile=backend)


def torch_differentiates_twice():
    x, grid = torch.ones(1, 1, 2, 2, dtype=D, requires_grad=True), torch.zeros(1, 1, 1, 2, dtype=D, requires_grad=True)
    first = torch.autograd.grad(F.grid_sample(x, grid, align_corners=False).sum(), grid, create_graph=True)[0]
    try:
        torch.autograd.grad(first.sum(), x)
    except RuntimeError:
        return False
    return True


against_torch = pytest.mark.skipif(not torch_differentiates_twice(), reason="torch 2.11 has first derivatives alone")


@against_torch
@pytest.mark.parametrize(("dimensions", "mode", "padding", "align_corners"), OPTIONS)
def test_grid_sample_values_and_derivatives_match_torch(dimensions, mode, padding, align_corners):
    """Reverse-mode derivatives are torch's, also for points far outside and on kinks."""
    x, grid = inputs(dimensions, 40)
    grid = torch.cat(
        [2 * grid, torch.tensor([-1.0, 0.0, 1.0, 3.0, -3.0], dtype=D)[:, None].expand_as(grid[..., :5, :])], -2
    )
    x, grid = x.requires_grad_(), grid.requires_grad_()

    def results():
        y = sampled(mode, padding, align_corners)(x, grid)
        first = torch.autograd.grad(y.sin().sum(), (x, grid), create_graph=True)
        return y, *first, *torch.autograd.grad([(each**2).sum() for each in first], (x, grid))

    same_value(results, rtol=1e-10, atol=1e-10)


def test_bilinear_mixed_derivative_matches_closed_form():
    """The mixed derivative between four points $a, b; c, d$ is $a - b - c + d$, by the pixel."""
    x = torch.tensor([[1.0, 3.0], [4.0, 11.0]], dtype=D)[None, None]
    grid = torch.tensor([0.2, -0.6], dtype=D)

    def f(grid):
        return F.grid_sample(x, grid[None, None, None], align_corners=True)[0, 0, 0, 0]

    with corrected:
        value = f(grid)
    torch.testing.assert_close(value, torch.tensor(0.8 * 2.2 + 0.2 * 8.2, dtype=D))
    expected = torch.tensor([[0.0, 5 / 4], [5 / 4, 0.0]], dtype=D)
    for route in hodiff.ROUTES:
        torch.testing.assert_close(hodiff.hessian(f, route=route)(grid), expected)


def test_grid_sampler_functions_with_integer_modes_match():
    x, grid = inputs(2)
    volume, points = inputs(3)
    tangent = draw(*grid.shape, seed=2)
    for function, mode in itertools.product((torch.grid_sampler, torch.grid_sampler_2d), (0, 1, 2)):
        expected = function(x, grid, mode, 1, True)
        with corrected:
            torch.testing.assert_close(function(x, grid, mode, 1, True), expected)
            torch.func.jvp(lambda g, f=function, m=mode: f(x, g, m, 1, True), (grid,), (tangent,))
    with corrected:
        got = torch.grid_sampler_3d(volume, points, 0, 2, False)
    torch.testing.assert_close(got, torch.grid_sampler_3d(volume, points, 0, 2, False))


@against_torch
def test_spatial_transformer_matches_torch():
    """Every route agrees with torch's own reverse-over-reverse."""
    theta, x, v = draw(1, 2, 3) / 3, draw(1, 1, 4, 4, seed=1), draw(1, 2, 3, seed=2)

    def f(theta, x):
        grid = F.affine_grid(theta, [1, 1, 3, 3], align_corners=False)
        return F.grid_sample(x, grid, align_corners=False).sin().sum()

    expected = hodiff.hvp(f, theta, v, x, route="reverse-over-reverse", correct=False)
    for route in hodiff.ROUTES:
        torch.testing.assert_close(hodiff.hvp(f, theta, v, x, route=route), expected)

    grids = draw(3, 1, 2, 2, 2, seed=3)

    def product(grid):
        def g(grid):
            return F.grid_sample(x, grid, align_corners=False).sin().sum()

        return torch.func.grad(lambda grid: torch.func.jvp(g, (grid,), (grid.cos(),))[1])(grid)

    with corrected:
        batched = torch.func.vmap(product)(grids)
        torch.testing.assert_close(batched, torch.stack([product(grid) for grid in grids]))


@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize("size", [(2, 1, 3, 4), (2, 5, 1, 2), (2, 1, 3, 1, 4)])
def test_affine_grid_values_match_torch(size, align_corners):
    theta = draw(2, len(size) - 2, len(size) - 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the operator warns for a single point with aligned corners
        expected = F.affine_grid(theta, size, align_corners=align_corners)
    with corrected:
        torch.testing.assert_close(F.affine_grid(theta, size, align_corners=align_corners), expected)
        tangents = torch.func.jacfwd(lambda theta: F.affine_grid(theta, size, align_corners=align_corners))(theta)
    torch.testing.assert_close((tangents * theta).sum((-3, -2, -1)), expected)


@pytest.mark.parametrize("padding", PADDINGS)
def test_non_finite_points_have_value_of_torch_and_zero_derivative(padding):
    x, grid = draw(1, 1, 3, 3).requires_grad_(), torch.full((1, 1, 3, 2), float("nan"), dtype=D)
    grid[0, 0, 1], grid[0, 0, 2] = float("inf"), 1e30
    expected = F.grid_sample(x.detach(), grid, padding_mode=padding, align_corners=False)
    with corrected:
        y = F.grid_sample(x, grid, padding_mode=padding, align_corners=False)
    torch.testing.assert_close(y.detach(), expected, equal_nan=True)
    assert torch.autograd.grad(y.sum(), x)[0].isfinite().all()


def test_bfloat16_error_is_below_that_of_torch():
    x, grid = draw(1, 2, 8, 8).bfloat16(), draw(1, 6, 6, 2, seed=1).bfloat16() / 2
    truth = F.grid_sample(x.double(), grid.double(), align_corners=False)
    by_torch = F.grid_sample(x, grid, align_corners=False)
    with corrected:
        ours = F.grid_sample(x, grid, align_corners=False)
    assert ours.dtype == by_torch.dtype
    assert (ours - truth).abs().max() <= (by_torch - truth).abs().max()
    torch.testing.assert_close(ours.double(), truth, rtol=1e-2, atol=1e-2)


def test_default_align_corners_warns():
    x, grid = inputs(2)
    with corrected, pytest.warns(UserWarning, match="align_corners"):
        got = F.grid_sample(x, grid)
    torch.testing.assert_close(got, F.grid_sample(x, grid, align_corners=False))


def cubic_volume(*_):
    return F.grid_sample(*inputs(3), "bicubic", align_corners=False)


@pytest.mark.skipif(not HAS_CUBIC_VOLUMES, reason="torch refuses cubic interpolation of volumes")
@pytest.mark.parametrize("padding", PADDINGS)
def test_bicubic_volumes_match(padding):
    f, points = sampled("bicubic", padding, False), inputs(3)
    torch.testing.assert_close(corrected(f)(*points), f(*points))
    x, v = points[1], torch.ones_like(points[1])
    products = [hodiff.hvp(lambda grid: f(points[0], grid).sin().sum(), x, v, route=route) for route in hodiff.ROUTES]
    for product in products[1:]:
        torch.testing.assert_close(product, products[0])


WRONG = {
    "mode": lambda x, g: F.grid_sample(x, g, "linear", align_corners=False),
    "padding": lambda x, g: F.grid_sample(x, g, padding_mode="circular", align_corners=False),
    "batches": lambda x, g: F.grid_sample(x.expand(2, -1, -1, -1), g.expand(3, -1, -1, -1), align_corners=False),
    "coordinates": lambda x, g: F.grid_sample(x, g[..., :1], align_corners=False),
    "dimensions": lambda x, g: F.grid_sample(x[0], g, align_corners=False),
    "dtypes": lambda x, g: F.grid_sample(x, g.float(), align_corners=False),
    **({} if HAS_CUBIC_VOLUMES else {"cubic volume": cubic_volume}),
    "sizes of an affine grid": lambda x, g: F.affine_grid(draw(1, 2, 3), [2, 1, 3, 3], align_corners=False),
    "empty": lambda x, g: F.grid_sample(x[:, :, :0], g, align_corners=False),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_match_torch(name):
    same_error(WRONG[name], *inputs(2))


def test_native_dropout_draws_match_torch():
    x = draw(50)
    torch.manual_seed(0)
    expected, kept = torch.native_dropout(x, 0.4, True)
    torch.manual_seed(0)
    with corrected:
        got = torch.native_dropout(x, 0.4, True)
    torch.testing.assert_close(got, (expected, kept))
    with corrected:
        assert torch.equal(torch.native_dropout(x, 0.4, False)[0], x)


@pytest.mark.slow
def test_native_dropout_matches_differences_by_every_route():
    def f(x):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            y, kept = torch.native_dropout(x, 0.4, True)
        return torch.ops.aten.native_dropout_backward(y.sin(), kept, 2.0)

    hodiff.assert_differentiable(corrected(f), draw(6), vmap=False, scipy=False)


DROPOUTS = {
    "dropout": lambda x: F.dropout(x, 0.4),
    "in place": lambda x: F.dropout(x * 1, 0.4, inplace=True),
    "torch.dropout": lambda x: torch.dropout(x, 0.4, True),
    "by name": lambda x: torch.dropout(x, p=0.4, train=True),
    "operator": lambda x: torch.ops.aten.dropout(x, 0.4, True),
    "native": lambda x: torch.native_dropout(x, 0.4, True)[0],
    "alpha": lambda x: torch.alpha_dropout(x, p=0.4, train=True),
}
VIEWS = {
    "transposed": lambda x: x.transpose(0, 2),
    "permuted": lambda x: x.permute(1, 2, 0).exp(),
    "strided": lambda x: x[:, ::2],
    "expanded": lambda x: x[:, :1].expand(2, 3, 4),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", DROPOUTS)
def test_every_route_drops_the_same_elements(name, view):
    x = draw(2, 3, 4)

    def f(x):
        torch.manual_seed(0)
        return (DROPOUTS[name](VIEWS[view](x)).pow(3)).sum()

    leaf = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(f(leaf), leaf, create_graph=True)  # outside of transforms
    (product,) = torch.autograd.grad(gradient.sum(), leaf)
    gradient = gradient.detach()
    for mode in ("forward", "reverse"):
        torch.testing.assert_close(hodiff.jacobian(f, mode=mode, randomness="same")(x), gradient)
    with corrected:
        torch.testing.assert_close(torch.func.grad(f)(x), gradient)
    for route in hodiff.ROUTES:
        torch.testing.assert_close(hodiff.hvp(f, x, torch.ones_like(x), route=route), product)


def test_dropout_with_vmap_randomness_is_left_to_torch():
    x = draw(3, 4)

    def f(y):
        torch.manual_seed(0)
        return torch.func.vmap(lambda y: F.dropout(x.t(), 0.5) * y, randomness="different")(y)

    expected = f(torch.ones(2, dtype=D))
    with corrected:
        assert torch.equal(f(torch.ones(2, dtype=D)), expected)
    assert not torch.equal(*expected)


def test_check_accepts_dropout_of_non_contiguous_tensors():
    class Transposed(torch.nn.Module):
        def forward(self, x):
            return F.dropout(x.t(), 0.5)

    layer = torch.nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    for module, point in ((Transposed(), draw(2, 3)), (layer, torch.randn(1, 2, 4))):
        assert not hodiff.check(module, point).errors


ALPHA = {
    "alpha_dropout": (lambda x: F.alpha_dropout(x, 0.3, training=True), (3,)),
    "torch.alpha_dropout": (lambda x: torch.alpha_dropout(x, 0.6, True), (2, 3)),
    "feature_alpha_dropout": (lambda x: F.feature_alpha_dropout(x, 0.5, training=True), (2, 3, 2)),
    "module": (torch.nn.AlphaDropout(0.5), (2, 2)),
}


def seeded(f):
    def again(x):
        torch.manual_seed(3)
        return f(x)

    return again


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", ALPHA)
def test_alpha_dropout_matches_differences_by_every_route(name):
    f, shape = ALPHA[name]
    hodiff.assert_differentiable(corrected(seeded(f)), draw(*shape), vmap=False, scipy=False)


@pytest.mark.parametrize("dtype", [D, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ALPHA)
def test_alpha_dropout_draws_match_torch(name, dtype):
    f, shape = ALPHA[name]
    x = draw(*shape).to(dtype)
    expected, after = seeded(f)(x), torch.rand(1)
    with corrected:
        assert torch.equal(seeded(f)(x), expected)
    assert torch.equal(torch.rand(1), after)


@pytest.mark.parametrize("p", [-0.1, 1.1])
def test_alpha_dropout_rejects_probabilities_outside_0_and_1(p):
    with corrected, pytest.raises((RuntimeError, ValueError), match="dropout probability has to be between 0 and 1"):
        F.alpha_dropout(draw(3), p, training=True)
