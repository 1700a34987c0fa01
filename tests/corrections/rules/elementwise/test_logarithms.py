"""logaddexp, logsumexp and similar sums, of terms far apart and at minus infinity, by every route."""

import pytest
import torch
from drawing import draw
from slow_cases import slow_except

import hodiff

D = torch.float64
INF = float("inf")

FUNCTIONS = {
    "logaddexp": (torch.logaddexp, (draw(2, 3), draw(3, seed=1))),
    "method": (lambda a, b: a.logaddexp(b), (draw(2), draw(2, seed=1))),
    "logcumsumexp": (lambda x: torch.logcumsumexp(x, 1), (draw(2, 5, 2),)),
    "of one": (lambda x: x.logcumsumexp(-1), (draw(2, 1),)),
    "of a number": (lambda x: torch.logcumsumexp(x, 0), (draw(),)),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", slow_except(FUNCTIONS, ("logaddexp", "of one")))
def test_derivatives_match_differences_by_every_route(name):
    f, inputs = FUNCTIONS[name]
    hodiff.assert_differentiable(hodiff.corrected()(f), inputs, order=3, scipy=False)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_gradients_match_torch(name):
    f, inputs = FUNCTIONS[name]
    corrected = hodiff.corrected()(f)
    torch.testing.assert_close(corrected(*inputs), f(*inputs))
    for i in range(len(inputs)):
        ours, by_torch = (
            torch.func.grad(lambda *x, g=g: g(*x).sin().sum(), argnums=i)(*inputs) for g in (corrected, f)
        )
        torch.testing.assert_close(ours, by_torch)


@pytest.mark.parametrize("route", hodiff.ROUTES)
def test_logaddexp_hessian_far_apart_and_at_infinity_matches_closed_form(route):
    """The Hessian of logaddexp is p (1 - p) times ((1, -1), (-1, 1)), where p is the share of the first."""
    for a, b, p in ((800.0, 0.0, 1.0), (0.0, 800.0, 0.0), (-INF, 1.0, 0.0), (1.0, 1.0, 0.5)):
        x = torch.tensor([a, b], dtype=D)
        H = hodiff.hessian_matrix(lambda x: torch.logaddexp(x[0], x[1]), x, route=route)
        expected = p * (1 - p) * torch.tensor([[1.0, -1.0], [-1.0, 1.0]], dtype=D)
        torch.testing.assert_close(H, expected, rtol=1e-12, atol=1e-300)


def test_logaddexp_of_two_minus_infinities_splits_the_gradient():
    x = torch.tensor([-INF, -INF], dtype=D)
    gradient = hodiff.jacobian(lambda x: torch.logaddexp(x[0], x[1]))(x)
    assert gradient.tolist() == [0.5, 0.5]
    assert not hodiff.hessian_matrix(lambda x: torch.logaddexp(x[0], x[1]), x).any()


def test_logcumsumexp_hvp_matches_masked_logsumexp():
    x = draw(100)
    got = hodiff.hvp(lambda x: torch.logcumsumexp(x, 0).square().sum(), x, torch.ones_like(x))
    mask = torch.ones(100, 100, dtype=torch.bool).tril()
    by_hand = lambda x: torch.logsumexp(x.expand(100, 100).masked_fill(~mask, -INF), 1).square().sum()  # noqa: E731
    torch.testing.assert_close(got, hodiff.hvp(by_hand, x, torch.ones_like(x), correct=False), rtol=1e-10, atol=1e-10)


def test_masked_logaddexp_matches():
    x, y = draw(5), draw(5, seed=1)
    mask, other = torch.tensor([1, 1, 0, 0, 1]).bool(), torch.tensor([1, 0, 1, 0, 1]).bool()

    def f(x):
        total = torch.masked.logaddexp(x, y, input_mask=mask, other_mask=other)
        return torch.where(mask | other, total, 0).square().sum()

    for route in hodiff.ROUTES:
        assert hodiff.hvp(f, x, x, route=route).isfinite().all()


def test_out_argument_is_left_to_torch():
    with hodiff.corrected():
        y = torch.logaddexp(torch.ones(2), torch.ones(2), out=torch.empty(2))
    assert y.isfinite().all()


def as_complex(f):
    """Return f as a real function of real and imaginary parts, followed by a sine."""
    return lambda *x: torch.view_as_real(f(*map(torch.view_as_complex, x))).sin()


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_except(["logaddexp", "logcumsumexp"], ["logaddexp"]))
def test_complex_derivatives_match_differences(name):
    f, inputs = {
        "logaddexp": (torch.logaddexp, (draw(3, 2), draw(3, 2, seed=1))),
        "logcumsumexp": (lambda x: torch.logcumsumexp(x, 0), (draw(5, 2),)),
    }[name]
    hodiff.assert_differentiable(hodiff.corrected()(as_complex(f)), inputs, order=3, scipy=False, vmap=False)
    pairs = [torch.view_as_complex(each) for each in inputs]
    torch.testing.assert_close(hodiff.corrected()(f)(*pairs), f(*pairs))


@pytest.mark.parametrize("route", hodiff.ROUTES)
def test_complex_logaddexp_far_apart_and_at_infinity(route):
    """The smaller term has derivative 0; two equal terms at minus infinity have 1/2 each."""
    v = torch.ones(2, dtype=D)
    for a, b, share in ((800 + 1j, 0j, 1.0), (-800 + 1j, 3j, 0.0), (-INF, 1j, 0.0), (-INF, -INF, 0.5)):
        x = torch.zeros(2, dtype=D)

        def f(x, a=a, b=b):
            first = torch.complex(x[0] + complex(a).real, x[1] + complex(a).imag)
            return torch.logaddexp(first, torch.tensor(b, dtype=torch.complex128)).imag

        gradient = hodiff.jacobian(f)(x)
        torch.testing.assert_close(gradient, torch.tensor([0.0, share], dtype=D), atol=1e-300, rtol=1e-12)
        if share in (0.0, 1.0):
            assert not hodiff.hvp(f, x, v, route=route).any()
