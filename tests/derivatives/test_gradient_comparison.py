"""Gradients that are compared with differences of values, whatever the origin, the scale and the dtype."""

import warnings

import pytest
import torch
from torch import nn

import hodiff
from hodiff.derivatives import own_gradient

D, F = torch.float64, torch.float32
SHIFTS = [0.0, 20.0, 60.0, 150.0, 500.0]


@pytest.fixture(autouse=True)
def _no_function_is_checked_yet():
    own_gradient._asked.clear()
    yield
    own_gradient._asked.clear()


def warnings_of(f, x):
    own_gradient._asked.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hodiff.hvp(f, x, x)
    return [str(each.message) for each in caught if issubclass(each.category, hodiff.errors.HodiffWarning)]


def cluster(seed, shift, dtype=D):
    generator = torch.Generator().manual_seed(seed)
    sites = 1.5 * torch.cartesian_prod(*[torch.arange(3, dtype=D)] * 3)
    return (sites + 0.1 * torch.randn(27, 3, dtype=D, generator=generator) + shift).to(dtype)


def morse(x, cut=3.0):
    """Morse potential that ends smoothly at the cutoff of its neighbour list."""
    with torch.no_grad():
        distances = (x[:, None] - x).norm(dim=-1)
        i, j = torch.nonzero((distances < cut).triu(1), as_tuple=True)
    r = (x[i] - x[j]).norm(dim=-1)
    return ((1 - torch.exp(-1.5 * (r - 1.5))) ** 2 * (1 - (r / cut) ** 2).clamp(min=0) ** 3).sum()


def detached_weights(x):
    i, j = torch.triu_indices(len(x), len(x), 1)
    r = (x[i] - x[j]).norm(dim=-1)
    return (torch.exp(-r).detach() * ((1.5 / r) ** 12 - (1.5 / r) ** 6)).sum()


@pytest.mark.parametrize("dtype", [D, F])
@pytest.mark.parametrize("shift", SHIFTS)
def test_only_lost_gradients_of_shifted_clusters_warn(shift, dtype):
    for seed in (7, 8, 9):
        x = cluster(seed, shift, dtype)
        assert warnings_of(morse, x) == []
        assert len(warnings_of(detached_weights, x)) == 1


@pytest.mark.parametrize("dtype", [D, F])
@pytest.mark.parametrize("shift", [0.0, 60.0])
@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_only_lost_gradients_of_scaled_clusters_warn(scale, shift, dtype):
    x = scale * cluster(7, shift, dtype)
    assert warnings_of(lambda x: morse(x / scale), x) == []
    assert len(warnings_of(lambda x: detached_weights(x / scale), x)) == 1


def test_far_atom_hides_no_lost_gradient():
    x = cluster(7, 0.0)
    x[0, 0] = 500.0
    assert warnings_of(morse, x) == []
    assert len(warnings_of(detached_weights, x)) == 1


def test_told_derivative_is_that_of_the_values():
    x = torch.tensor([0.3, 800.0], dtype=D)
    (message,) = warnings_of(lambda x: (x * x.detach()).sum(), x)
    told = message.split("the gradient is ")[1].split(", and differences of values give ")
    # The gradient of x² as x times a constant is half of its derivative.
    assert float(told[1].split(". ")[0]) == pytest.approx(2 * float(told[0]), rel=1e-2)


def harmless(x):
    """A cut that changes no derivative."""
    return 0 * x.detach().max()


NET = (
    nn
    .Sequential(nn.Linear(4, 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 1))
    .to(D)
    .requires_grad_(False)
)
X = torch.tensor([0.5, -1.2, 2.0, 0.1], dtype=D)
RIGHT = {
    "a kink at the point": (lambda x: x.relu().sum() + harmless(x), torch.tensor([0.0, 1.0, -1.0], dtype=D)),
    "a stationary point": (lambda x: x.square().sum() + harmless(x), torch.zeros(3, dtype=D)),
    "many kinks": (lambda x: NET(x).square().sum() + harmless(x), X),
    "a large constant": (lambda x: x.sin().sum() + 1e6 + harmless(x), X.float()),
    "numbers that cancel": (
        lambda x: (x + 1e4).square().sum() - (x + 1e4).square().sum() + x.sin().sum() + harmless(x),
        X.float(),
    ),
    "fast oscillation": (lambda x: (1e4 * x).sin().sum() + harmless(x), X),
    "float32 inside": (lambda x: x.float().sin().sum() + harmless(x), X),
    "bfloat16 inside": (lambda x: x.bfloat16().sin().sum().float() + harmless(x), X.float()),
}
WRONG = {
    "a large constant": (lambda x: (x.detach() * x.sin()).sum() + 1e6, X),
    "float32 inside": (lambda x: (x.float().sin() * x.detach().float()).sum(), X),
    "fast oscillation": (lambda x: ((1e4 * x).sin() * (1e4 * x).detach().cos()).sum(), X),
    "many kinks": (lambda x: (NET(x) * NET(x).detach()).sum(), X),
    # Steps as wide as the larger number leave the domain of the smaller one.
    "not a number nearby": (lambda x: (x.detach() * x.log()).sum(), torch.tensor([1e-3, 100.0], dtype=D)),
    "no change at all": (lambda x: x.sum() - x.detach().sum() + x.round().sum(), X + 0.2),
    "no change but rounding": (lambda x: (x / x.detach()).sum(), X),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right_gradient_is_silent(name):
    assert warnings_of(*RIGHT[name]) == []


@pytest.mark.parametrize("name", WRONG)
def test_wrong_gradient_warns(name):
    assert len(warnings_of(*WRONG[name])) == 1


def test_wrong_gradient_with_an_exception_nearby_warns():
    def f(x):
        if not (x > 0).all():
            raise ValueError("x must be positive")
        return (x.detach() * x.log()).sum()

    assert len(warnings_of(f, torch.tensor([1e-3, 100.0], dtype=D))) == 1


@pytest.mark.parametrize(("noise", "warns"), [(1e-13, True), (1e-1, False)])
def test_values_that_differ_slightly_between_runs_are_compared(noise, warns):
    generator = torch.Generator().manual_seed(0)

    def f(x):
        return (x.detach() * x.sin()).sum() + noise * torch.randn((), dtype=D, generator=generator)

    assert len(warnings_of(f, X)) == warns


def test_autocast_is_off_in_differences():
    torch.manual_seed(0)
    x = cluster(7, 0.0, F)
    net = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1)).requires_grad_(False)

    def right(x):
        with torch.no_grad():
            i, j = torch.nonzero(((x[:, None] - x).norm(dim=-1) < 3).triu(1), as_tuple=True)
        return net(x[i] - x[j]).float().sum()

    def wrong(x):
        return (net(x) * net(x).detach()).float().sum()

    def lowered(x):
        with torch.autocast("cpu", torch.bfloat16):
            return right(x)

    assert warnings_of(lowered, x) == []
    with torch.autocast("cpu", torch.bfloat16):
        assert warnings_of(right, x) == []
        assert len(warnings_of(wrong, x)) == 1


@pytest.mark.parametrize(("f", "count"), [(morse, 5), (detached_weights, 30)])
def test_comparison_takes_few_evaluations(f, count):
    calls = []

    def counted(x):
        calls.append(None)
        return f(x)

    x = cluster(7, 60.0)
    warnings_of(counted, x)
    first = len(calls)
    hodiff.hvp(counted, x, x)
    # Two at the point, the differences, and one that restores what the function keeps
    assert 2 * first - len(calls) <= count
