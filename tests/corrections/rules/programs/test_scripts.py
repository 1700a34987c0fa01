"""Compiled and traced code of `torch.jit` inside `corrected()`: right, or an error, by every route."""

import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hodiff

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:.*torch.jit:FutureWarning")

D = torch.float64
X = torch.tensor([0.5, 1.0, 2.0], dtype=D)
V = torch.tensor([1.0, 0.0, 0.5], dtype=D)


class Smooth(nn.Module):
    """Has no operator that needs a rule."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3).double()

    def forward(self, x):
        return torch.tanh(self.linear(x)).pow(3).sum()


class Normalized(Smooth):
    """Has arguments, branches, a loop, lists, tuples and shapes around an operator that needs a rule."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(3).double()

    def forward(self, x, factor: float = 2.0, times: int = 2):
        y = self.norm(torch.tanh(self.linear(x)))
        if factor != 1.0:
            y = factor * y
        for i in range(times):
            y = y + 0.1 * i * y.sin()
        first, second = torch.stack([y, y.cos()]).unbind(0)
        return (first.sin() * second.view(x.size(0))).sum() + torch.tensordot(first, second, ([0], [0]))


class Attending(Smooth):
    """Has an operator whose second derivative torch lacks."""

    def forward(self, x):
        y = self.linear(x).view(1, 1, 3, 1)
        return F.scaled_dot_product_attention(y, y.sin(), y).sin().sum()


class Unreadable(Smooth):
    """Has a dictionary, which prevents reading the graph."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(3).double()

    def forward(self, x):
        parts = {"norm": self.norm(self.linear(x))}
        return parts["norm"].sin().sum()


class UnreadableSmooth(Smooth):
    """Has a dictionary, and no operator that needs a rule."""

    def forward(self, x):
        parts = {"all": self.linear(x)}
        return parts["all"].sin().sum()


def run_until_optimized(module):
    """Run the module until torch has optimized its graph."""
    for _ in range(4):
        x = X.clone().requires_grad_()
        module(x).backward()
    return module


def loaded(module):
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(module), buffer)
    buffer.seek(0)
    return torch.jit.load(buffer)


CAPTURES = {
    "scripted": torch.jit.script,
    "traced": lambda module: torch.jit.trace(module, X),
    "loaded": loaded,
    "frozen": lambda module: torch.jit.freeze(torch.jit.script(module.eval())),
}


def model(kind):
    torch.manual_seed(0)
    return kind()


def truth(kind):
    """Gradient, Hessian product and third derivative along V, by torch's own gradient and its differences."""
    module = model(kind)

    def gradient(x):
        x = x.clone().requires_grad_()
        return torch.autograd.grad(module(x), x)[0]

    product = (gradient(X + 1e-5 * V) - gradient(X - 1e-5 * V)) / 2e-5
    third = (gradient(X + 1e-3 * V) - 2 * gradient(X) + gradient(X - 1e-3 * V)) / 1e-6
    return gradient(X), product, third


def close(found, expected, digits=1e-7):
    torch.testing.assert_close(found, expected, rtol=digits, atol=digits * expected.abs().max().item())


@pytest.mark.one_in(9)
@pytest.mark.parametrize("capture", CAPTURES)
@pytest.mark.parametrize("kind", [Smooth, Normalized, Attending, UnreadableSmooth])
def test_scripted_and_traced_products_match_by_every_route(kind, capture):
    gradient, product, third = truth(kind)
    f = run_until_optimized(CAPTURES[capture](model(kind)))
    for route in hodiff.ROUTES:
        close(hodiff.hvp(f, X, V, route=route), product)
    close(hodiff.hessian_matrix(f, X) @ V, product)
    values = hodiff.directional_derivatives(f, X, V, order=3)
    close(torch.stack(values[1:]), torch.stack([each @ V for each in (gradient, product, third)]), 1e-4)
    for mode in ("forward", "reverse"):
        close(hodiff.jacobian(f, mode=mode)(X), gradient)
    close(torch.func.grad(lambda x: hodiff.hvp(f, x, V) @ V)(X), third, 1e-4)


@pytest.mark.parametrize("kind", [Smooth, Normalized])
def test_autograd_of_scripted_models_matches(kind):
    _, product, third = truth(kind)
    f = run_until_optimized(torch.jit.script(model(kind)))
    with hodiff.corrected():
        x = X.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(f(x), x, create_graph=True)
        (found,) = torch.autograd.grad(gradient @ V, x, create_graph=True)
        (found_third,) = torch.autograd.grad(found @ V, x)
        along = torch.func.grad(lambda x: torch.func.jvp(f, (x,), (V,))[1])(X)
    close(found.detach(), product)
    close(along, product)
    close(found_third, third, 1e-4)


def test_scripted_functions_accept_defaults_and_keywords():
    @torch.jit.script
    def f(x, size: int = 3, eps: float = 1e-5):
        return torch.layer_norm(x, [size], None, None, eps).sin().sum()

    for call, eps in ((f, 1e-5), (lambda x: f(x, 3, 0.1), 0.1), (lambda x: f(x, eps=0.1), 0.1)):
        expected = torch.func.hessian(lambda x, eps=eps: by_hand(x, eps))(X) @ V
        for route in hodiff.ROUTES:
            close(hodiff.hvp(call, X, V, route=route), expected, 1e-10)
    module = torch.jit.script(model(Normalized))
    python = model(Normalized)
    expected = hodiff.hvp(lambda x: python(x, 1.0, times=3), X, V)
    for route in hodiff.ROUTES:
        close(hodiff.hvp(lambda x: module(x, 1.0, times=3), X, V, route=route), expected, 1e-10)


def by_hand(x, eps):
    return ((x - x.mean()) / (x.var(correction=0) + eps).sqrt()).sin().sum()


@pytest.mark.parametrize("route", hodiff.ROUTES)
def test_unreadable_script_is_right_or_rejected(route):
    f = run_until_optimized(torch.jit.script(model(Unreadable)))
    if route in hodiff.ROUTES[2:]:
        with pytest.raises(hodiff.errors.RouteError, match=r"layer_norm.*'forward'.*prim::DictConstruct"):
            hodiff.hvp(f, X, V, route=route)
        return
    close(hodiff.hvp(f, X, V, route=route), truth(Unreadable)[1])


def test_unreadable_script_has_first_derivatives():
    f = run_until_optimized(torch.jit.script(model(Unreadable)))
    expected = truth(Unreadable)[0]
    with torch.no_grad():
        close(hodiff.jacobian(f, mode="forward")(X), expected)
    with pytest.raises(hodiff.errors.RouteError, match="layer_norm"):  # the parameters may need a second derivative
        hodiff.jacobian(f, mode="forward")(X)


def test_scripts_are_unchanged_outside_corrected():
    f = run_until_optimized(torch.jit.script(model(Smooth)))
    # The tests above would prove nothing if torch alone were right.
    assert torch.equal(hodiff.hvp(f, X, V, route="forward-over-reverse", correct=False), torch.zeros(3, dtype=D))
    with pytest.raises(RuntimeError, match="expected at most"), hodiff.corrected():
        f(X, X, X)
    with hodiff.corrected():
        traced = torch.jit.trace(nn.Sequential(nn.Identity(), f), X)
    torch.testing.assert_close(traced(X), f(X))


def test_wrong_arguments_raise_the_error_of_torch():
    f = torch.jit.script(model(Normalized))
    for mode in (torch.enable_grad(), hodiff.corrected()):
        with mode, pytest.raises(RuntimeError, match=r"[Uu]nknown keyword argument"):
            f(X, nothing=1)


@torch.jit.script
def _normalize(x):
    x.copy_(F.layer_norm(x.clone(), [3]))


def test_script_that_returns_nothing():
    def f(normalize, x):
        y = 1.0 * x
        normalize(y)
        return (y**3).sum()

    def plain(x):
        x.copy_(F.layer_norm(x.clone(), [3]))

    for route in hodiff.ROUTES:
        found, expected = (hodiff.hvp(lambda x: f(each, x), X, V, route=route) for each in (_normalize, plain))
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("route", hodiff.ROUTES)
def test_second_derivatives_of_scripts_at_lengths_of_zero_are_not_numbers(route):
    """A warning says so; torch's are 0."""
    square = torch.jit.script(_square)
    with pytest.warns(hodiff.HodiffWarning, match="0 somewhere"):
        product = hodiff.hvp(lambda x: square(x.norm()), torch.zeros(3, dtype=D), V, route=route)
    assert product.isnan().all()
    found = hodiff.hvp(lambda x: square(x.norm()), X, V, route=route)
    torch.testing.assert_close(found, 2 * V)


def _square(r: torch.Tensor):
    return r * r


def distances(x: torch.Tensor) -> torch.Tensor:
    # torch.cdist has a branch that raises, whose result its graph leaves uninitialized.
    return torch.cdist(x.view(1, 3), x.view(3, 1).expand(3, 3) + 1).sum()


def test_scripts_with_a_branch_that_raises():
    expected = hodiff.hvp(distances, X, V)
    close(hodiff.hvp(torch.jit.script(distances), X, V), expected)
