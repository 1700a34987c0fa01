"""Tests of the float32 kernels against mpmath and the formulas that they replace, and of the fallback to torch."""

import math

import mpmath
import numpy as np
import pytest
import torch
from drawing import draw
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

from hodiff import assert_differentiable
from hodiff import functions as hf
from hodiff.functions.activations.gated import GatePullback
from hodiff.kernels import fused, fused_library
from hodiff.kernels.transposed_blocks import turned

needs_kernels = pytest.mark.skipif(not fused.available(), reason="hodiff was installed without a C++ compiler")


def sigmoid(z):
    return 1 / (1 + mpmath.exp(-z))


TOWERS = {
    "silu": lambda x: x * sigmoid(x),
    "gelu": lambda x: x * mpmath.erfc(-x / mpmath.sqrt(2)) / 2,
    "gelu_tanh": lambda x: x * sigmoid(2 * mpmath.sqrt(2 / mpmath.pi) * (x + mpmath.mpf("0.044715") * x**3)),
    "mish": lambda x: x * mpmath.tanh(mpmath.log1p(mpmath.exp(x))),
}
EXACT = {
    "sigmoid": (sigmoid, 0),
    "bell": (sigmoid, 1),
    "bell_slope": (sigmoid, 2),
    **{name: (f, 0) for name, f in TOWERS.items()},
    **{f"{name}_slope": (f, 1) for name, f in TOWERS.items()},
    **{f"{name}_curvature": (f, 2) for name, f in TOWERS.items()},
}


def points():
    generator = np.random.default_rng(0)
    special = [0, 1e-30, -1e-30, 1e-4, -1e-4, 1e-2, -0.02, 12, -12, 14, -14, 50, -50, 87, -87, 90, -90]
    return np.concatenate([3 * generator.normal(size=40), 20 * generator.normal(size=10), special]).astype(np.float32)


@needs_kernels
def test_every_formula_is_tested():
    assert set(fused.formulas()) == {*EXACT, "gate"}
    assert set(fused.pullbacks()) <= {*EXACT, "gate"}


@needs_kernels
@pytest.mark.parametrize("name", EXACT)
def test_values_are_within_half_a_unit_in_the_last_place(name):
    f, order = EXACT[name]
    x = points()
    found = fused.elementwise(name, torch.from_numpy(x)).tolist()
    with mpmath.workdps(60):
        for argument, value in zip(x.tolist(), found, strict=True):
            exact = mpmath.diff(f, mpmath.mpf(argument), order)
            unit = max(float(np.spacing(np.float32(abs(float(exact))))), float(np.float32(2**-149)))
            assert abs(mpmath.mpf(value) - exact) <= 0.52 * unit, argument


@pytest.mark.parametrize("f", [hf.softplus, hf.log_sigmoid])
def test_torch_kernels_are_within_two_units_in_the_last_place(f):
    x = torch.cat([torch.linspace(-80, 80, 100_000), torch.linspace(-3, 3, 100_000)])
    exact = f(x.double())
    unit = torch.from_numpy(np.spacing(exact.abs().float().numpy())).double()
    assert ((f(x).double() - exact).abs() / unit).max() <= 2


@needs_kernels
@pytest.mark.parametrize("name", [name for name in EXACT if "slope" not in name])
def test_infinities_and_nan_match_limits(name):
    values = fused.elementwise(name, torch.tensor([-math.inf, math.inf, math.nan] * 9))[-3:].tolist()
    right = 1.0 if name == "sigmoid" else math.inf if name in TOWERS else 0.0
    assert values[:2] == [0.0, right]
    assert math.isnan(values[2])


@needs_kernels
@pytest.mark.parametrize("name", sorted(set(EXACT) & set(fused.pullbacks())))
@pytest.mark.parametrize("n", [1, 7, 2048, 40_001])
def test_products_and_pullbacks_match_for_every_length(name, n):
    """Products and pullbacks match for every length, on one thread and on several."""
    x, by, c = (torch.randn(n, generator=torch.Generator().manual_seed(k)) for k in range(3))
    slope = list(EXACT)[[EXACT[each] for each in EXACT].index((EXACT[name][0], EXACT[name][1] + 1))]
    torch.testing.assert_close(fused.elementwise(name, x, by), by * fused.elementwise(name, x))
    by_by, by_x = fused.pullback(name, x, by, c)
    torch.testing.assert_close(by_by, c * fused.elementwise(name, x))
    torch.testing.assert_close(by_x, c * by * fused.elementwise(slope, x))


@pytest.mark.slow
def test_swish_pullback_second_derivatives_match_differences():
    assert_differentiable(GatePullback, tuple(draw(2, 1, seed=k) for k in range(3)), order=2)


@pytest.mark.slow
def test_swish_pullback_third_derivatives_match_differences():
    assert_differentiable(GatePullback, tuple(draw(2, 2, seed=k) for k in range(3)), order=3)


@needs_kernels
def test_swish_pullback_kernel_matches_float64():
    inputs = [draw(3, 5, seed=k).float().requires_grad_() for k in range(3)]
    cotangents = [draw(3, 5, seed=k).float() for k in (3, 4)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    found = torch.autograd.grad(GatePullback.call(*inputs), inputs, cotangents)
    expected = torch.autograd.grad(GatePullback.call(*exact), exact, [c.double() for c in cotangents])
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other.float())


@needs_kernels
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 1000), (64, 513), (0, 3), (2, 0)])
def test_softmax_and_row_kernels_match_float64(shape):
    x, v, u = (3 * draw(*shape, seed=k).float() for k in range(3))
    scale = draw(shape[0], 1, seed=4).float()
    p = x.double().softmax(-1)
    torch.testing.assert_close(fused.softmax(x, scale, bounded=True), (scale * p).float())
    product, mean = fused.softmax_product(x, scale, v, bounded=True)
    exact_mean = (p * v).sum(-1, keepdim=True)
    torch.testing.assert_close(mean, exact_mean.float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(product, (scale * p * (v - exact_mean)).float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(fused.logsumexp(x), x.double().logsumexp(-1, keepdim=True).float())
    torch.testing.assert_close(fused.weighted(p.float(), v), (p * (v - exact_mean)).float(), rtol=1e-5, atol=1e-6)
    exact = torch.autograd.functional.vjp(
        lambda p, v: p * v - p * (p * v).sum(-1, keepdim=True), (p, v.double()), u.double()
    )[1]
    for found, expected in zip(fused.weighted_pullback(p.float(), v, u), exact, strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@needs_kernels
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 1000), (64, 513), (0, 3), (2, 0)])
def test_softmax_curvature_kernel_matches_float64(shape):
    scores, s_t, p_bar, p_bar_t = (draw(*shape, seed=k) for k in range(4))

    def cotangent_of_scores(scores, p_bar):
        p = scores.softmax(-1)
        return p, p * (p_bar - (p * p_bar).sum(-1, keepdim=True))

    exact = torch.func.jvp(cotangent_of_scores, (scores, p_bar), (s_t, p_bar_t))
    p, s_bar, p_t, s_bar_t = (*exact[0], *exact[1])
    found = fused.softmax_curvature(*(each.float() for each in (p, s_t, p_bar, p_bar_t)))
    for one, other in zip(found, (p_t, s_bar, s_bar_t), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-6)


@needs_kernels
@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("shape", [(3, 7), (2, 5, 33), (64, 513), (1, 2)])
@pytest.mark.parametrize("weighted", [True, False])
def test_normalization_curvature_kernel_matches_float64(norm, shape, weighted, monkeypatch):
    calls = []
    kernel = fused.normalization_curvature
    monkeypatch.setattr(fused, "normalization_curvature", lambda *a, **k: calls.append(1) or kernel(*a, **k))
    x, g, u = (draw(*shape, seed=k) + k for k in range(3))
    w, a, b, c = (draw(shape[-1], seed=k) for k in range(3, 7))
    affine = {"weight": (w, a), "bias": (b, c)} if weighted else {}
    if norm == "rms_norm":
        affine.pop("bias", None)

    def product(dtype, function):
        leaves = {
            name: each.to(dtype).requires_grad_()
            for name, each in [("x", x), *((n, p) for n, (p, _) in affine.items())]
        }
        cotangents = [each.to(dtype) for each in (u, *(c for _, c in affine.values()))]
        cotangent = g.to(dtype).requires_grad_()
        inputs = list(leaves.values())
        first = torch.autograd.grad(function(**leaves), inputs, cotangent, create_graph=True)
        return torch.autograd.grad(first, [leaves["x"], cotangent, *inputs[1:2]], cotangents)

    def by_hand(x, weight=1.0, bias=0.0):
        centred = x - x.mean(-1, keepdim=True) if norm == "layer_norm" else x
        return centred * (centred.square().mean(-1, keepdim=True) + 1e-5) ** -0.5 * weight + bias

    def ours(x, **affine):
        options = {"eps": 1e-5, **affine}
        return getattr(hf, norm)(x, shape[-1:], **options)

    found, expected = product(torch.float32, ours), product(torch.float64, by_hand)
    assert calls
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5 * float(other.abs().max()))


@needs_kernels
def test_normalization_curvature_includes_bias_and_falls_back_for_third_derivatives():
    x, g, w, b = (draw(*shape, seed=k).float().requires_grad_() for k, shape in enumerate([(4, 6), (4, 6), (6,), (6,)]))
    first = torch.autograd.grad(hf.layer_norm(x, (6,), w, b), (x, w, b), g, create_graph=True)
    cotangents = [draw(*each.shape, seed=9).float() for each in first]
    recorded = torch.autograd.grad(first, (x, g, w), cotangents, create_graph=True)  # by formulas, without kernels
    assert all(each.requires_grad for each in recorded)
    for one, other in zip(torch.autograd.grad(first, (x, g, w), cotangents), recorded, strict=True):
        torch.testing.assert_close(one, other.detach(), rtol=1e-5, atol=1e-5)
    x = x.detach()
    x[1, 2] = math.nan
    found = torch.autograd.grad(
        torch.autograd.grad(hf.layer_norm(x.requires_grad_(), (6,), w, b), x, g, create_graph=True), x, torch.ones(4, 6)
    )[0]
    assert found.isnan().all(-1).tolist() == [False, True, False, False]


@needs_kernels
def test_row_kernels_at_infinities_and_nan_match_torch():
    inf, nan = math.inf, math.nan
    rows = torch.tensor([[-inf, -inf], [inf, 0.0], [nan, 1.0], [inf, nan], [-inf, nan], [-inf, 2.0]])
    torch.testing.assert_close(fused.logsumexp(rows), torch.logsumexp(rows, -1, keepdim=True), equal_nan=True)
    torch.testing.assert_close(fused.softmax(rows, None, bounded=False), torch.softmax(rows, -1), equal_nan=True)
    limits = torch.tensor([[0.5, 0.5], [1, 0], [nan, nan], [nan, nan], [nan, nan], [0, 1]])
    torch.testing.assert_close(fused.softmax(rows, None, bounded=True), limits, equal_nan=True)
    assert fused.logsumexp(torch.zeros(2, 0)).tolist() == [[-inf], [-inf]]


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [0, 1, 31, 32, 33, 200])
def test_average_with_transpose_matches(n, dtype):
    whole = torch.randn(n + 3, n + 5, dtype=dtype, generator=torch.Generator().manual_seed(0))
    square, untouched = whole[2 : n + 2, 1 : n + 1], whole.clone()
    before = square.clone()
    gap, size = fused.average_with_transpose(square)
    assert torch.equal(square, (before + before.mT) / 2)
    assert torch.equal(square, square.mT)
    assert gap == ((before - before.mT).abs().max().item() if n else 0)
    assert size == (before.abs().max().item() if n else 0)
    untouched[2 : n + 2, 1 : n + 1] = square
    assert torch.equal(whole, untouched)
    if n:
        square[0, n - 1] = math.nan
        assert all(map(math.isnan, fused.average_with_transpose(square)))


@needs_kernels
def test_mask_kernels_match():
    x = torch.tensor([-1.0, 0.0, 2.0, math.nan])
    value, mask = fused.add_relu(x)
    torch.testing.assert_close(value, torch.relu(x), equal_nan=True)
    assert mask.tolist() == [False, False, True, True]
    assert fused.masked(torch.ones(4), mask).tolist() == [0, 0, 1, 1]
    assert fused.add_relu(x, torch.ones(4))[1].tolist() == [False, True, True, True]


@needs_kernels
def test_kernels_reject_unsupported_tensors():
    x = torch.ones(4, 2)
    assert fused.takes(x)
    assert not fused.takes(x.double())
    assert not fused.takes(x.mT)
    assert not fused.takes(x.clone().requires_grad_())
    assert not fused.takes(x, mask=torch.ones(2, 4, dtype=torch.bool).mT)
    assert not fused.takes(torch.ones(2, dtype=torch.complex64).conj().imag)
    assert not fused.takes(torch._efficientzerotensor((2,)))
    assert not torch.func.vmap(lambda row: torch.tensor(fused.takes(row)))(x).any()
    with forward_ad.dual_level():
        assert not fused.takes(forward_ad.make_dual(x, x))
    with FlopCounterMode(display=False):
        assert not fused.takes(x)


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (hf.silu, ((5, 3),)),
        (hf.gelu, ((5, 3),)),
        (lambda x: hf.gelu(x, "tanh"), ((5, 3),)),
        (hf.mish, ((5, 3),)),
        (hf.swish, ((5, 3), ())),
        (hf.swish, ((5, 3), (3,))),
        (lambda x: hf.logsumexp(x, -1), ((5, 3),)),
        (lambda x: hf.softmax(x, -1), ((5, 3),)),
        (lambda x, w, b: hf.layer_norm(x, (3,), w, b), ((5, 3), (3,), (3,))),
        (hf.fused_add_relu, ((5, 3), (5, 3))),
        (lambda x, b: hf.bias_act(x, b, "gelu"), ((5, 3), (3,))),
        (lambda x, w, b: hf.fused_linear(x, w, b, "relu"), ((5, 3), (2, 3), (2,))),
        (lambda x, w, b: hf.fused_linear(x, w, b, "silu"), ((5, 3), (2, 3), (2,))),
    ],
)
@pytest.mark.parametrize("built", [True, False])
def test_derivatives_match_with_and_without_kernels(function, shapes, built, monkeypatch):
    """Value, gradient, product and third order in float32 match float64, which has no kernels."""
    if not built:
        monkeypatch.setattr(fused_library, "library", lambda: None)

    def tower(dtype):
        inputs = [draw(*shape, seed=k).to(dtype).requires_grad_() for k, shape in enumerate(shapes)]
        found = [function(*inputs)]
        scalar = 0.5 * found[0].square().sum()
        for _ in range(3):
            gradients = torch.autograd.grad(scalar, inputs, create_graph=True)
            found += gradients
            scalar = sum((g * x.detach()).sum() for g, x in zip(gradients, inputs, strict=True))
        return found

    for single, double in zip(tower(torch.float32), tower(torch.float64), strict=True):
        torch.testing.assert_close(single.double(), double, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(1, 3), (5, 1), (3, 2), (4097, 8), (20011, 3), (7, 9001), (0, 4), (4, 0)])
def test_turned_blocks_match_transposes(shape):
    block = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
    for each in (block, block.double(), block[::2], block.t().contiguous().t()):
        assert torch.equal(turned(each), each.t())
        assert turned(each).is_contiguous()
