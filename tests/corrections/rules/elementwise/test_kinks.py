"""Functions at a kink: every route returns the same given derivative, while torch's routes differ."""

import math

import pytest
import torch
import torch.nn.functional as F
from corrections.against_torch import tensor
from torch.func import jvp, vjp

import hodiff
from hodiff.routes import ROUTES
from hodiff.torch_internals.operators import foreach_by_name

D = torch.float64
FOREACH = foreach_by_name()

A, B, C = tensor(-1, 0, 1, 1, 2), tensor(-1, -1, 1, 2, 2), tensor(-1, 1, 1, 2, 1)
NAN = float("nan")

# The function, its arguments, and the slope by each argument
CASES = {
    "clamp": (torch.clamp, (A, B, C), ([1, 1, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 0, 1])),
    "clip": (torch.Tensor.clip, (A, B, C), ([1, 1, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 0, 1])),
    "clamp from below": (lambda x, y: torch.clamp(x, min=y), (A, B), ([1, 1, 1, 0, 1], [0, 0, 0, 1, 0])),
    "clamp from above": (lambda x, y: x.clamp(max=y), (A, B), ([1, 0, 1, 1, 1], [0, 1, 0, 0, 0])),
    "clamp_min": (torch.clamp_min, (A, B), ([1, 1, 1, 0, 1], [0, 0, 0, 1, 0])),
    "clamp_max": (torch.clamp_max, (A, B), ([1, 0, 1, 1, 1], [0, 1, 0, 0, 0])),
    "clamp_": (lambda x, y: (x * 1).clamp_(y, C), (A, B), ([1, 1, 1, 0, 0], [0, 0, 0, 1, 0])),
    "clamp_min_": (lambda x, y: (x * 1).clamp_min_(y), (A, B), ([1, 1, 1, 0, 1], [0, 0, 0, 1, 0])),
    "clamp_max_": (lambda x, y: (x * 1).clamp_max_(y), (A, B), ([1, 0, 1, 1, 1], [0, 1, 0, 0, 0])),
    "clamps of lists": (lambda x, y: FOREACH["clamp_min"]([x], [y])[0], (A, B), ([1, 1, 1, 0, 1], [0, 0, 0, 1, 0])),
    "clamp between a number and a tensor": (lambda x: torch.clamp(x, -1, tensor(1)[0]), (A,), ([1, 1, 1, 1, 0],)),
    "fmax": (torch.fmax, (A, B), ([1, 1, 1, 0, 1], [0, 0, 0, 1, 0])),
    "prelu": (lambda x: F.prelu(x, tensor(0.25)), (A,), ([0.25, 0.25, 1, 1, 1],)),
    "rrelu": (lambda x: F.rrelu(x, 0.25, 0.75), (A,), ([0.5, 0.5, 1, 1, 1],)),
    "rrelu in place": (lambda x: F.rrelu(x * 1, 0.25, 0.75, inplace=True), (A,), ([0.5, 0.5, 1, 1, 1],)),
    "copysign": (torch.copysign, (A, -B), ([-1, 0, -1, -1, -1], [0, 0, 0, 0, 0])),
    "copysign_": (lambda x: (x * 1).copysign_(-B), (A,), ([-1, 0, -1, -1, -1],)),
    "copysign of integers": (
        lambda x: torch.copysign(x, torch.tensor([-1, 1, -2, -3, -4])),
        (A,),
        ([1, 0, -1, -1, -1],),
    ),
    "copysign of booleans": (lambda x: torch.copysign(x, torch.tensor(False)), (A,), ([-1, 0, 1, 1, 1],)),
    "copysign of a number": (lambda x: torch.copysign(x, -2), (A,), ([1, 0, -1, -1, -1],)),
}
# From this version on, torch has one slope for these: half on each side of a single bound.
MENDED = ("clamp", "clip", "fmax") if torch.__version__ >= "2.14" else ()
CASES = {name: case for name, case in CASES.items() if not name.startswith(MENDED)}
EACH = [(name, index) for name, case in CASES.items() for index in range(len(case[1]))]


def function_of_one_argument(name, index):
    """Return the function of one argument, its point, and its slopes there."""
    f, arguments, slopes = CASES[name]
    return lambda x: f(*arguments[:index], x, *arguments[index + 1 :]), arguments[index], tensor(*slopes[index])


@pytest.mark.parametrize(("name", "index"), EACH)
@pytest.mark.parametrize("mode", ["forward", "reverse"])
def test_first_derivatives_have_the_documented_slope(name, index, mode):
    f, x, slope = function_of_one_argument(name, index)
    torch.testing.assert_close(hodiff.jacobian(f, mode=mode)(x), slope.diag())


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("name", "index"), EACH)
@pytest.mark.parametrize("route", hodiff.ROUTES)
def test_second_derivatives_have_the_documented_slope(name, index, route):
    """The second derivative of the sum of cubes is 6 y times the square of the slope."""
    f, x, slope = function_of_one_argument(name, index)
    product = hodiff.hvp(lambda x: (f(x) ** 3).sum(), x, torch.ones_like(x), route=route)
    torch.testing.assert_close(product, 6 * f(x) * slope**2)


# Torch's forward and reverse modes differ here, or give no number.
WRONG = [name for name in ("clamp from below", "clamp from above", "fmax", "prelu") if name in CASES]


@pytest.mark.parametrize("name", WRONG)
def test_torch_alone_has_two_slopes(name):
    """The tests above would prove nothing if torch alone were right."""
    f, x, _ = function_of_one_argument(name, 0)
    ones = torch.ones_like(x)
    assert not torch.equal(jvp(f, (x,), (ones,))[1], vjp(f, x)[1](ones)[0])


# Further functions of torch with a kink, a tie or a jump at these numbers
ZEROS, ONES = torch.zeros(5, dtype=D), torch.ones(5, dtype=D)


def functions_with(space, others, names):
    """Return the named functions of one tensor, with the other arguments after it."""
    functions = {name: getattr(space, name) for name in names.split()}
    return {name: lambda x, f=f: f(x, *others) for name, f in functions.items()}


OTHERS = {
    **functions_with(
        torch, (), "abs relu sign frac sort amax amin max min median nanmedian msort nan_to_num trapezoid"
    ),
    **functions_with(F, (), "relu6 hardtanh leaky_relu elu celu selu hardswish hardsigmoid softsign tanhshrink"),
    **functions_with(F, (ZEROS,), "l1_loss smooth_l1_loss huber_loss"),
    **functions_with(torch, (B,), "maximum minimum fmin fmax hypot logaddexp clamp_min clamp_max"),
    **functions_with(torch, (1.0,), "remainder fmod"),
    **functions_with(torch, (0,), "cummax cummin"),
    **functions_with(torch, (2,), "kthvalue topk"),
    **functions_with(torch, (0.4,), "quantile nanquantile"),
    "threshold": lambda x: F.threshold(x, 1.0, 1.0),
    "clamp by numbers": lambda x: x.clamp(-1, 1),
    "clamp by a number": lambda x: x.clamp_min(1) * x.clamp_max(1),
    "softshrink": lambda x: F.softshrink(x, 1.0),
    "hardshrink": lambda x: F.hardshrink(x, 1.0),
    "hinge_embedding_loss": lambda x: F.hinge_embedding_loss(x, -ONES),
    "margin_ranking_loss": lambda x: F.margin_ranking_loss(x, B, ONES),
    "multi_margin_loss": lambda x: F.multi_margin_loss(x, torch.tensor(0)),
    "max_pool": lambda x: F.max_pool1d(x[None, None], 2),
    "adaptive_max_pool": lambda x: F.adaptive_max_pool1d(x[None, None], 2),
    "norm of order 1": lambda x: x.norm(1),
    "norm of order inf": lambda x: x.norm(float("inf")),
    "dist of order 1": lambda x: torch.dist(x, B, 1),
    "dist of order inf": lambda x: torch.dist(x, B, float("inf")),
    "cdist of order 1": lambda x: torch.cdist(x[:, None], B[:, None], p=1.0),
    "cdist of order inf": lambda x: torch.cdist(x[:, None], B[:, None], p=float("inf")),
    "pairwise_distance": lambda x: F.pairwise_distance(x[:, None], B[:, None], p=1.0, eps=0),
    "cosine_embedding_loss": lambda x: F.cosine_embedding_loss(x[:, None], B[:, None], -ONES),
    "triplet_margin_loss": lambda x: F.triplet_margin_loss(x[None], B[None], C[None]),
    "renorm": lambda x: torch.renorm(x[:, None], 2, 0, 1.0),
    "scatter_reduce": lambda x: ZEROS.scatter_reduce(0, torch.tensor([0, 0, 1, 1, 1]), x, "amax"),
    "segment_reduce": lambda x: torch.segment_reduce(x, "max", lengths=torch.tensor([2, 3])),
}


# Torch warns that it runs some batched gradients one by one.
@pytest.mark.one_in(3)
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("name", OTHERS)
def test_routes_agree_at_the_kink(name):
    """The slope at a kink is torch's convention, but all routes must agree on it."""

    def f(x):
        result = OTHERS[name](x)
        result = result if isinstance(result, torch.Tensor) else result[0]
        return result * torch.arange(1, result.numel() + 1, dtype=D).reshape(result.shape)

    def cubes(x):
        return (f(x) ** 3).sum()

    torch.testing.assert_close(hodiff.jacobian(f, mode="forward")(A), hodiff.jacobian(f, mode="reverse")(A))
    first, *others = (hodiff.hvp(cubes, A, ONES, route=route) for route in hodiff.ROUTES)
    for each in others:
        torch.testing.assert_close(each, first)


VALUES = tensor(-0.0, 0.0, 1, -2, NAN, float("inf"), -float("inf"))
PAIRS = VALUES[:, None], VALUES.roll(1)
FUNCTIONS = {
    **{name: getattr(torch, name) for name in ("clamp", "clamp_min", "clamp_max", "fmax", "copysign")},
    "both": lambda x, y: torch.clamp(x, y, y.flip(0)),
    "a number and a tensor": lambda x, y: torch.clamp(x, 0, y.nansum()),
    "copysign of integers": lambda x, y: torch.copysign(x[2, 0], torch.tensor([1, 0, -2])),
    "copysign of booleans": lambda x, y: torch.copysign(x, y > 0),
    "float32": lambda x, y: torch.clamp(x.float(), y),
    "number": lambda x, y: torch.clamp(x, y.sum()),
    "slopes": lambda x, y: F.prelu(x.expand(-1, 7), y),
    "slope": lambda x, y: F.prelu(x[0], y[:1]),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_match_torch(name):
    x, y = PAIRS[0].clone().requires_grad_(), PAIRS[1]
    with hodiff.corrected():
        got = FUNCTIONS[name](x, y)
    expected = FUNCTIONS[name](x, y)
    torch.testing.assert_close(got.detach(), expected.detach(), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(got.signbit() | got.isnan(), expected.signbit() | expected.isnan())


def test_rrelu_draws_match_torch():
    x = tensor(-1, -2, 3).requires_grad_()
    torch.manual_seed(0)
    expected = F.rrelu(x, training=True)
    torch.manual_seed(0)
    with hodiff.corrected():
        assert torch.equal(F.rrelu(x, training=True), expected)


def test_rrelu_in_batches_is_rejected():
    with pytest.raises(hodiff.RouteError):
        hodiff.jacobian(lambda x: F.rrelu(x, training=True), mode="forward")(A)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("power", "expected"), [(lambda m: m**2, [2.0, 2, 2]), (lambda m: (3 * m).cos(), [-9.0, -9, -9 * math.cos(1.5)])]
)
def test_even_functions_of_copysign_are_smooth_at_zero(route, power, expected):
    x = torch.tensor([0.0, 0.0, 0.5], dtype=torch.float64)
    sign = torch.tensor([1.0, -2.0, -1.0], dtype=torch.float64)

    def f(x):
        return power(torch.copysign(x, sign)).sum()

    found = hodiff.hvp(f, x, torch.ones_like(x), route=route)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))
    torch.testing.assert_close(hodiff.laplacian(f)(x), torch.tensor(sum(expected), dtype=torch.float64))
