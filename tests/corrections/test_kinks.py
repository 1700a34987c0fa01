"""Functions with a kink, at the kink: every route has the one slope that is written beside it, and torch has two."""

import pytest
import torch
import torch.nn.functional as F
from torch.func import jvp, vjp

import hodiff
from hodiff.torch_internals.operators import foreach_by_name

D = torch.float64
FOREACH = foreach_by_name()


def tensor(*numbers):
    return torch.tensor(numbers, dtype=D)


A, B, C = tensor(-1, 0, 1, 1, 2), tensor(-1, -1, 1, 2, 2), tensor(-1, 1, 1, 2, 1)
NAN = float("nan")

# The function, its arguments, and the slope by each of them.
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
    "fmax": (torch.fmax, (A, B), ([1, 1, 1, 0, 1], [0, 0, 0, 1, 0])),
    "prelu": (lambda x: F.prelu(x, tensor(0.25)), (A,), ([0.25, 0.25, 1, 1, 1],)),
    "rrelu": (lambda x: F.rrelu(x, 0.25, 0.75), (A,), ([0.5, 0.5, 1, 1, 1],)),
    "rrelu in place": (lambda x: F.rrelu(x * 1, 0.25, 0.75, inplace=True), (A,), ([0.5, 0.5, 1, 1, 1],)),
    "copysign": (torch.copysign, (A, -B), ([-1, 0, -1, -1, -1], [0, 0, 0, 0, 0])),
    "copysign_": (lambda x: (x * 1).copysign_(-B), (A,), ([-1, 0, -1, -1, -1],)),
    "copysign of a number": (lambda x: torch.copysign(x, -2), (A,), ([1, 0, -1, -1, -1],)),
}
EACH = [(name, index) for name, case in CASES.items() for index in range(len(case[1]))]


def of_one(name, index):
    """The function of one argument, at which point, and its slopes there."""
    f, arguments, slopes = CASES[name]
    return lambda x: f(*arguments[:index], x, *arguments[index + 1 :]), arguments[index], tensor(*slopes[index])


@pytest.mark.parametrize(("name", "index"), EACH)
@pytest.mark.parametrize("mode", ["forward", "reverse"])
def test_first_derivatives(name, index, mode):
    f, x, slope = of_one(name, index)
    torch.testing.assert_close(hodiff.jacobian(f, mode=mode)(x), slope.diag())


@pytest.mark.parametrize(("name", "index"), EACH)
@pytest.mark.parametrize("route", hodiff.ROUTES)
def test_second_derivatives(name, index, route):
    """Of the sum of cubes, 6 y times the square of the slope."""
    f, x, slope = of_one(name, index)
    product = hodiff.hvp(lambda x: (f(x) ** 3).sum(), x, torch.ones_like(x), route=route)
    torch.testing.assert_close(product, 6 * f(x) * slope**2)


# Where torch's own forward and reverse modes differ, or have no number at all.
@pytest.mark.parametrize("name", ["clamp from below", "clamp from above", "fmax", "prelu"])
def test_torch_has_two_slopes(name):
    """Else nothing above proves anything."""
    f, x, _ = of_one(name, 0)
    ones = torch.ones_like(x)
    assert not torch.equal(jvp(f, (x,), (ones,))[1], vjp(f, x)[1](ones)[0])


VALUES = tensor(-0.0, 0.0, 1, -2, NAN, float("inf"), -float("inf"))
PAIRS = VALUES[:, None], VALUES.roll(1)
FUNCTIONS = {
    **{name: getattr(torch, name) for name in ("clamp", "clamp_min", "clamp_max", "fmax", "copysign")},
    "both": lambda x, y: torch.clamp(x, y, y.flip(0)),
    "float32": lambda x, y: torch.clamp(x.float(), y),
    "number": lambda x, y: torch.clamp(x, y.sum()),
    "slopes": lambda x, y: F.prelu(x.expand(-1, 7), y),
    "slope": lambda x, y: F.prelu(x[0], y[:1]),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_are_those_of_torch(name):
    x, y = PAIRS[0].clone().requires_grad_(), PAIRS[1]
    with hodiff.corrected():
        got = FUNCTIONS[name](x, y)
    expected = FUNCTIONS[name](x, y)
    torch.testing.assert_close(got.detach(), expected.detach(), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(got.signbit() | got.isnan(), expected.signbit() | expected.isnan())


def test_training_draws_as_torch_does():
    x = tensor(-1, -2, 3).requires_grad_()
    torch.manual_seed(0)
    expected = F.rrelu(x, training=True)
    torch.manual_seed(0)
    with hodiff.corrected():
        assert torch.equal(F.rrelu(x, training=True), expected)


def test_batches_of_random_slopes_are_refused():
    with pytest.raises(hodiff.RouteError):
        hodiff.jacobian(lambda x: F.rrelu(x, training=True), mode="forward")(A)
