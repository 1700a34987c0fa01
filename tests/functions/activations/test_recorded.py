"""Tests of the activations that cache their derivatives, against mpmath, torch and `hodiff.check`."""

import mpmath
import pytest
import torch
import torch.nn.functional as F
from mpmath import mp
from torch.func import functional_call, grad, jvp, vmap

import hodiff
from hodiff.functions.activations.recorded import SMOOTH, record
from hodiff.kernels import fused

INF, NAN = float("inf"), float("nan")
POINTS = [0.0, -0.0, 1e-40, -1e-40, 1e-8, 0.3, -0.3, 1.0, -1.0, 2.5, -2.5, 5.0, -5.0, 9.0, -9.0]
TAILS = [13.0, -13.0, 19.0, -19.0, 21.0, -21.0, 40.0, -40.0, 100.0, -100.0, 1e4, -1e4]


def _gelu(x):
    phi = mp.npdf(x)
    return mp.ncdf(x) + x * phi, phi * (2 - x * x), phi * (x**3 - 4 * x)


def _logistic(z):
    return 1 / (1 + mp.exp(-z)), 1 / ((1 + mp.exp(-z)) * (1 + mp.exp(z))), mp.tanh(z / 2)


def _silu(z):
    s, b, t = _logistic(z)
    return s + z * b, b * (2 - z * t), b * (z * (t * t - 2 * b) - 3 * t)


def _softplus(z):
    s, b, t = _logistic(z)
    return (s, b, -b * t) if z <= 20 else (mp.mpf(1), mp.mpf(0), mp.mpf(0))


def _differences(f):
    return lambda x: [mp.diff(f, x, n) for n in (1, 2, 3)]


# First three derivatives. gelu_tanh and mish use mpmath differences, which are accurate over a shorter range.
EXACT = {
    "gelu": (_gelu, TAILS),
    "silu": (_silu, TAILS),
    "softplus": (_softplus, TAILS),
    "gelu_tanh": (
        _differences(lambda x: x / 2 * (1 + mp.tanh(mp.sqrt(2 / mp.pi) * (x + mp.mpf("0.044715") * x**3)))),
        [],
    ),
    "mish": (_differences(lambda x: x * mp.tanh(mp.log(1 + mp.exp(x)))), []),
}


def _pulled(x, name, weights, u):
    """Return the gradient of the weighted sum, its pullback without and with a graph, and its third derivative."""
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad((weights * record(x, name)).sum(), x, create_graph=True)
    (numbers,) = torch.autograd.grad(gradient, x, u, retain_graph=True)
    (recorded,) = torch.autograd.grad(gradient, x, u, create_graph=True)
    (third,) = torch.autograd.grad(recorded.sum(), x)
    return gradient, numbers, recorded, third


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", EXACT)
def test_pullbacks_match_mpmath(name, dtype):
    exact, tails = EXACT[name]
    x = torch.tensor([*POINTS, *tails], dtype=dtype)
    with mpmath.workdps(120):
        rows = [exact(mp.mpf(each)) for each in x.tolist()]
        first, second, third = (torch.tensor([float(row[k]) for row in rows], dtype=torch.float64) for k in range(3))
    weights, u = torch.full_like(x, 0.75), torch.full_like(x, -1.5)
    found = _pulled(x, name, weights, u)
    eps, tiny = torch.finfo(dtype).eps, torch.finfo(dtype).tiny
    size = x.double().abs().clamp(min=1)
    # Error from rounding the result or the argument. The third derivative has no fourth to scale by.
    scales = {
        "first": torch.maximum(first.abs(), size * second.abs()),
        "second": torch.maximum(second.abs(), size * third.abs()),
        "third": 4 * (second.abs() + size * third.abs()),
    }
    truths = {"first": 0.75 * first, "second": -1.125 * second, "third": -1.125 * third}
    for got, order in zip(found, ("first", "second", "second", "third"), strict=True):
        error = (got.double() - truths[order]).abs()
        wrong = error > 16 * eps * scales[order] + 4 * tiny
        assert not bool(wrong.any()), (order, x[wrong], got[wrong], truths[order][wrong])


@pytest.mark.parametrize("name", SMOOTH)
def test_derivatives_at_infinity_are_constant_and_nan_propagates(name):
    x = torch.tensor([INF, -INF, NAN])
    ones = torch.ones(3)
    gradient, numbers, recorded, _ = _pulled(x, name, ones, ones)
    assert gradient[:2].tolist() == [1.0, 0.0]
    assert numbers[:2].tolist() == recorded[:2].tolist() == [0.0, 0.0]
    assert bool(torch.stack([gradient, numbers, recorded])[:, 2].isnan().all())


@pytest.mark.slow
@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", SMOOTH)
def test_check_passes_to_third_order(name):
    x = torch.tensor([-2.0, -0.4, 0.0, 0.7, 3.0], dtype=torch.float64)
    report = hodiff.check(lambda x: record(x, name), x)
    assert report.ok, report
    weights = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
    second = vmap(vmap(grad(grad(lambda w, x: w * record(x, name), 1), 1), (None, 0)), (0, None))(weights, x)
    alone = torch.stack([_pulled(x, name, w.expand(5), torch.ones_like(x))[1] for w in weights])
    torch.testing.assert_close(second, alone)
    # Batch along other dimensions, one argument or both.
    points, rows = torch.stack([x, -x, 2 * x], 1), torch.stack([weights, 2 * weights])

    def product(weight, x):
        return grad(lambda x: grad(lambda x: (weight * record(x, name)).sum())(x).sum())(x)

    expected = torch.stack([product(w, p) for w, p in zip(weights, points.unbind(1), strict=True)])
    torch.testing.assert_close(vmap(product, (0, 1))(weights, points), expected)
    torch.testing.assert_close(vmap(vmap(product, (0, 1)), (0, None))(rows, points)[1], 2 * expected)
    ones = torch.ones(5, dtype=torch.float64)
    torch.testing.assert_close(vmap(product, (None, 1))(ones, points)[0], expected[0] / weights[0])


def _loss(x, layers):
    """A network of all activations; the values choose between hodiff's and torch's derivative kernels."""
    y = x
    for k, layer in enumerate(layers):
        y = layer(y @ y.mT / 5) if k % 2 else layer(y + 0.1 * k)
    return y.square().sum() + F.rms_norm(x, (5,), x[0], 1e-3).sum()


LAYERS = [F.gelu, F.silu, F.mish, F.softplus, lambda x: F.gelu(x, approximate="tanh")]


@pytest.mark.parametrize("chunk_size", [1, 5])
def test_hessian_operator_products_match_torch(chunk_size):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 5, dtype=torch.float64, generator=generator)
    v = torch.randn(25, 6, dtype=torch.float64, generator=generator)

    def loss(x):
        return _loss(x, LAYERS)

    expected = torch.stack([jvp(grad(loss), (x,), (each.view(5, 5),))[1].flatten() for each in v.unbind(1)], 1)
    A = hodiff.HessianOperator(loss, x, chunk_size=chunk_size)
    torch.testing.assert_close(A @ v, expected)
    torch.testing.assert_close(A @ v[:, 0], expected[:, 0])
    # The outer variable requires grad, so the product itself is differentiated by the point.
    outer = x.clone().requires_grad_()
    direction = v[:, 0].view(5, 5)
    third = torch.autograd.grad(hodiff.hvp(loss, outer, direction).sum(), outer)[0]
    ones = torch.ones_like(x)
    torch.testing.assert_close(third, grad(lambda x: (jvp(grad(loss), (x,), (direction,))[1] * ones).sum())(x))


@pytest.mark.parametrize("layer", LAYERS)
def test_hessian_products_compute_no_exponentials(layer, monkeypatch):
    model = torch.nn.Linear(3, 4)
    inputs = torch.randn(7, 3)
    parameters = {name: each.detach() for name, each in model.named_parameters()}
    A = hodiff.HessianOperator(lambda p: layer(functional_call(model, p, (inputs,))).square().sum(), parameters)
    expected = A @ torch.ones(16)
    # The profiler does not see hodiff's kernels, so disable them.
    monkeypatch.setattr(fused, "run", None)
    with torch.profiler.profile() as profile:
        got = A @ torch.ones(16)
    assert torch.equal(got, expected)
    calls = {event.key.removeprefix("aten::") for event in profile.key_averages()}
    assert calls & {"mul", "mm"}
    assert not calls & {
        *("exp", "erf", "erfc", "sigmoid", "tanh", "tanh_backward", "sigmoid_backward", "gelu_backward"),
        *("silu_backward", "mish_backward", "softplus_backward"),
    }


def test_user_correction_takes_precedence():
    x = torch.tensor([0.3, -0.2])
    hodiff.corrections.register(F.softplus, reason="for the test's sake")(lambda input: input**3)
    try:
        assert torch.allclose(hodiff.HessianOperator(lambda x: F.softplus(x).sum(), x) @ torch.ones(2), 6 * x)
    finally:
        hodiff.corrections.unregister(F.softplus)
