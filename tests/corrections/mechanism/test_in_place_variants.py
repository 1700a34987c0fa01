"""In-place variants of corrected elementwise functions have the derivatives of the functions, at hard points."""

import mpmath as mp
import pytest
import torch

import hodiff
from hodiff.corrections.mechanism.in_place_variants import NAMES

D = torch.float64
# Points where torch alone is wrong or inaccurate or has no rule, and others
POINTS = {
    "acosh": (1 + 2.0**-40, 1e200),
    "asinh": (0.3, 1e200),
    "atan": (0.3, 1e200),
    "digamma": (1.5, 30.0),
    "expm1": (-40.0, 0.3),
    "i0": (1e-10, 1e-3),
    "lgamma": (1.5, 30.0),
    "logit": (0.0, 0.3, 1.0),
    "mvlgamma": (1.5, 30.0),
    "sigmoid": (38.0, 0.3),
    "sinc": (1e-10, 0.3),
    "tan": (0.3, 1.2),  # corrected for complex numbers alone
    "tanh": (20.0, 0.3),
}
OTHERS = {"mvlgamma": (2,), "logit": (0.1,)}


def derivatives(f, x):
    """Value and derivatives to third order of a function of each element."""
    found = [f(x)]
    for _ in range(3):
        found.append(torch.autograd.grad(found[-1].sum(), x, create_graph=True)[0])
    return [each.detach() for each in found]


def test_every_function_has_points():
    assert set(POINTS) == set(NAMES)


@pytest.mark.parametrize("name", POINTS)
def test_derivatives_match_the_function(name):
    others = OTHERS.get(name, ())
    x = torch.tensor(POINTS[name], dtype=D, requires_grad=True)
    with hodiff.corrected():
        expected = derivatives(lambda x: getattr(x * 1, name)(*others), x)
        got = derivatives(lambda x: getattr(x * 1, f"{name}_")(*others), x)
        written = x.detach().clone()
        assert getattr(written, f"{name}_")(*others) is written
    assert torch.equal(written, expected[0])
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("name", "f"), [("sinc", lambda x: mp.sin(mp.pi * x) / (mp.pi * x)), ("tanh", mp.tanh)])
def test_second_derivatives_match_mpmath(name, f):
    x = torch.tensor(POINTS[name], dtype=D)
    got = torch.func.vmap(torch.func.grad(torch.func.grad(hodiff.corrected()(lambda x: getattr(x * 1, f"{name}_")()))))
    with mp.workdps(80):
        expected = [float(mp.diff(f, mp.mpf(point), 2, h=mp.mpf(10) ** -25)) for point in x.tolist()]
    torch.testing.assert_close(got(x), torch.tensor(expected, dtype=D), rtol=1e-13, atol=0)
