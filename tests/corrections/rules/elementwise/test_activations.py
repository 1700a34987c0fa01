"""Activations: torch's values, correct derivatives by every route, and torch's derivatives at kinks."""

import pytest
import torch
import torch.nn.functional as F
from corrections.against_torch import same_error
from torch import nn

import hodiff

D = torch.float64
corrected = hodiff.corrected()
X = torch.tensor([-4.0, -1.3, 0.2, 2.5, 3.7, 0.9], dtype=D)

CALLS = {
    "hardsigmoid": F.hardsigmoid,
    "Hardsigmoid": nn.Hardsigmoid(),
    "operator": torch._C._nn.hardsigmoid,
    "glu": F.glu,
    "GLU": lambda x: nn.GLU(0)(x.reshape(2, 3)),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["hardsigmoid", "glu"])
def test_derivatives_match_differences_by_every_route(name):
    hodiff.assert_differentiable(corrected(lambda x: CALLS[name](x.sin() * x)), X, vmap=False, scipy=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_third_order_vmapped_and_compiled_derivatives_match_differences(name):
    """Modules and operators run the rules of the two functions, which alone are compiled."""
    backend = "aot_eager" if name in ("hardsigmoid", "glu") else False
    hodiff.assert_differentiable(corrected(CALLS[name]), X, order=3, compile=backend)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_values_match_torch(name, dtype):
    x = torch.cat([X, torch.tensor([float("inf"), -float("inf"), 3.0, -3.0, 1e-9, 0.0], dtype=D)]).to(dtype)
    x = x[:6] if name == "GLU" else x
    expected = CALLS[name](x)
    with corrected:
        got = CALLS[name](x)
    assert got.dtype == dtype
    torch.testing.assert_close(got, expected, equal_nan=True)


def test_hard_sigmoid_derivatives_at_kinks():
    x = torch.tensor([-5.0, -3.0, 0.0, 3.0, 5.0, float("nan")], dtype=D, requires_grad=True)
    slopes = torch.tensor([0, 0, 1, 0, 0, 0], dtype=D) / 6
    with corrected:
        (first,) = torch.autograd.grad(F.hardsigmoid(x).sum(), x, create_graph=True)
    torch.testing.assert_close(first.detach(), slopes, rtol=1e-15, atol=0)
    (by_torch,) = torch.autograd.grad(F.hardsigmoid(x).sum(), x)
    torch.testing.assert_close(first.detach(), by_torch, rtol=1e-7, atol=0)  # torch's 1/6 is a float32
    assert not torch.autograd.grad(first.sum(), x)[0].any()


def test_glu_second_derivatives_match_closed_form():
    """The mixed derivative of a σ(b) is σ(b) σ(-b); the second by b is a σ(b) σ(-b) (1 - 2 σ(b))."""
    x = torch.tensor([1.5, -0.4], dtype=D)
    s = torch.sigmoid(x[1])
    bell = s * (1 - s)
    expected = torch.stack([torch.stack([0 * s, bell]), torch.stack([bell, x[0] * bell * (1 - 2 * s)])])
    for route in hodiff.ROUTES:
        torch.testing.assert_close(hodiff.hessian(lambda x: F.glu(x)[0], route=route)(x), expected)


def test_in_place_hardsigmoid_writes_in_place():
    x = torch.tensor([-1.0, 1.0])
    with corrected:
        assert F.hardsigmoid(x, inplace=True) is x
    assert x.tolist() == pytest.approx([1 / 3, 2 / 3])


@pytest.mark.parametrize("route", hodiff.ROUTES)
def test_in_place_hardsigmoid_hvp_matches_closed_form(route):
    """Between the kinks, the product is that of ((x + 3) / 6)³."""
    x = torch.tensor([-4.0, -1.0, 2.0, 5.0], dtype=D)

    got = hodiff.hvp(lambda x: F.hardsigmoid(x * 1, inplace=True).pow(3).sum(), x, torch.ones_like(x), route=route)
    torch.testing.assert_close(got, torch.where(x.abs() < 3, (x + 3) / 36, 0))


@pytest.mark.parametrize("call", [lambda: F.glu(torch.ones(3)), lambda: F.glu(torch.tensor(1.0))])
def test_errors_match_torch(call):
    same_error(call)


@pytest.mark.parametrize("act", [F.silu, F.mish])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_hvp_by_every_route_inside_no_grad(act, mode):
    x = torch.tensor([-1.5, 0.3, 2.0], dtype=D)

    def f(x):
        return act(x).pow(3).sum()

    expected = torch.autograd.functional.hessian(f, x)
    third = torch.func.jacrev(torch.func.hessian(f))(x)
    with mode():
        for route in hodiff.ROUTES:
            torch.testing.assert_close(hodiff.hvp(f, x, torch.ones(3, dtype=D), route=route), expected.sum(1))
    with torch.no_grad(), corrected:
        for second in (torch.func.hessian(f), torch.func.jacfwd(torch.func.jacfwd(f))):
            torch.testing.assert_close(second(x), expected)
        torch.testing.assert_close(torch.func.jacfwd(torch.func.hessian(f))(x), third)


CELU = {
    "torch.celu": torch.celu,
    "torch.celu_": lambda x, alpha: torch.celu_(x.clone(), alpha),
    "F.celu": F.celu,
    "F.celu in place": lambda x, alpha: F.celu(x.clone(), alpha, inplace=True),
    "nn.CELU": lambda x, alpha: nn.CELU(alpha)(x),
    "aten.celu": torch.ops.aten.celu.default,
}


@pytest.mark.parametrize("name", CELU)
@pytest.mark.parametrize("alpha", [0.1, 0.4, 1.0, -0.3])
def test_celu_has_all_digits_of_alpha(name, alpha):
    x = torch.tensor([-0.9, -0.05, 0.3], dtype=D)
    expected = torch.where(x < 0, torch.exp(x / alpha), 1.0), torch.where(x < 0, torch.exp(x / alpha) / alpha, 0.0)
    for route in hodiff.ROUTES:
        found = hodiff.value_grad_hvp(lambda x: CELU[name](x, alpha).sum(), x, torch.ones_like(x), route=route)
        torch.testing.assert_close(found[1:], expected, rtol=1e-14, atol=0)
    with corrected, pytest.raises((RuntimeError, ZeroDivisionError), match=r"zero|0"):
        CELU[name](x, 0.0)
