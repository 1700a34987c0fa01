"""Tests of straight-through quantizers: torch's values, published gradients, and compiled code."""

import hypothesis.extra.numpy as arrays
import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from slow_cases import slow_except

import hodiff
from hodiff.errors import InputError
from hodiff.functions.gradients.quantization import floor_ste, quantize_ste, round_ste, sign_clipped_ste, sign_ste
from hodiff.functions.gradients.straight_through import straight_through
from hodiff.nn.quantization import FakeQuantize

INF = float("inf")
ESTIMATORS = {
    "sign": (sign_ste, torch.sign),
    "sign_clipped": (sign_clipped_ste, torch.sign),
    "round": (round_ste, torch.round),
    "floor": (floor_ste, torch.floor),
}
X = torch.tensor([-2.0, -1.0, -0.5, 0.0, 0.3, 1.0, 1.5], dtype=torch.float64)
ONES = torch.ones_like(X)


@pytest.mark.parametrize(("estimator", "value"), ESTIMATORS.values(), ids=ESTIMATORS)
@given(number=st.floats(allow_nan=False))
def test_values_are_exact(estimator, value, number):
    x = torch.tensor(number, dtype=torch.float64, requires_grad=True)
    got, expected = estimator(x), value(x.detach())
    assert torch.equal(got.detach(), expected)
    assert torch.equal(got.detach().signbit(), expected.signbit())


@pytest.mark.parametrize(("estimator", "value"), ESTIMATORS.values(), ids=ESTIMATORS)
def test_nan_input_gives_nan(estimator, value):
    assert estimator(torch.tensor(float("nan"))).isnan()
    assert quantize_ste(torch.tensor(float("nan")), 4, scale=0.1).isnan()


def test_gradients_at_kinks_and_infinities():
    x = torch.tensor([-INF, -1.0, 0.0, 1.0, INF], dtype=torch.float64)
    gradients = {name: torch.func.vmap(torch.func.grad(f))(x).tolist() for name, (f, _) in ESTIMATORS.items()}
    assert gradients.pop("sign_clipped") == [0.0, 1.0, 1.0, 1.0, 0.0]
    assert list(gradients.values()) == [[1.0] * 5] * 3


def test_result_may_be_changed_in_place():
    x = X.clone().requires_grad_()
    y = round_ste(x).mul_(2)
    y.sum().backward()
    assert torch.equal(x.grad, 2 * ONES)
    same = straight_through(lambda x: x, lambda x: 3 * x)
    same(x).zero_()
    assert torch.equal(x, X)


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_except(ESTIMATORS, ("sign_clipped",)))
def test_compiled_estimators_match(name):
    """Estimators compile in a training step, in a transform, and in forward mode, where the compiler ignores jvp."""
    estimator, value = ESTIMATORS[name]

    def compiled(f):
        return torch.compile(f, fullgraph=True, backend="aot_eager")

    def loss(x):
        return (estimator(x) * x.sin()).sum()

    x = X.clone().requires_grad_()
    got = compiled(estimator)(x)
    got.sum().backward()
    assert torch.equal(got, value(X))
    huge = 1e20 * X  # surrogate + (value - surrogate) would lose the value to rounding
    assert torch.equal(compiled(estimator)(huge), value(huge))
    infinities = torch.tensor([-INF, INF])
    assert torch.equal(compiled(estimator)(infinities), value(infinities))
    assert torch.equal(x.grad, torch.func.grad(lambda x: estimator(x).sum())(X))
    assert torch.equal(compiled(torch.func.grad(loss))(X), torch.func.grad(loss)(X))
    assert torch.equal(compiled(lambda x: hodiff.hvp(loss, x, ONES))(X), hodiff.hvp(loss, X, ONES))
    tangent = lambda x: torch.func.jvp(estimator, (x,), (ONES,))[1]  # noqa: E731
    assert torch.equal(compiled(tangent)(X), tangent(X))


def test_straight_through_forward_is_not_differentiated():
    weight = torch.tensor(2.0, requires_grad=True)
    x = torch.tensor(3.0, requires_grad=True)
    seen = []

    def forward(x):
        seen.append(x.requires_grad)
        return weight * x

    y = straight_through(forward, lambda x: x)(x)
    assert torch.autograd.grad(y, [x, weight], allow_unused=True) == (torch.tensor(1.0), None)
    assert y.item() == 6
    assert seen == [False]


def test_straight_through_rejects_bad_functions():
    with pytest.raises(InputError, match="forward: expected a callable, got int"):
        straight_through(1, torch.sin)
    with pytest.raises(InputError, match="surrogate: expected a callable, got NoneType"):
        straight_through(torch.sin, None)
    with pytest.raises(InputError, match=r"step: .*\(7,\) bool from forward and \(7,\) float64"):
        straight_through(lambda x: x > 0, lambda x: x, name="step")(X)
    with pytest.raises(InputError, match=r"\(\) float64 from forward"):
        straight_through(torch.sum, lambda x: x)(X)
    with pytest.raises(InputError, match="tuple from forward"):
        straight_through(lambda x: (x,), lambda x: x)(X)
    assert straight_through(torch.sign, torch.tanh).__name__ == "sign"


@given(
    arrays.arrays("float32", 8, elements=st.floats(-100, 100, width=32)),
    st.integers(2, 8),
    st.floats(0.015625, 4, width=32),
)
def test_values_match_fake_quantize_of_torch(values, bits, scale):
    x = torch.from_numpy(values)
    # torch multiplies by 1 / scale, so quotients at a half may round differently.
    ratio = x.double() / scale
    x = x[(ratio - ratio.floor() - 0.5).abs() > 1e-4]
    symmetric = torch.fake_quantize_per_tensor_affine(x, scale, 0, -(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    torch.testing.assert_close(quantize_ste(x, bits, scale=scale), symmetric)
    unsigned = torch.fake_quantize_per_tensor_affine(x, scale, 0, 0, 2**bits - 1)
    torch.testing.assert_close(quantize_ste(x, bits, scale=scale, symmetric=False), unsigned)


@given(arrays.arrays("float64", 8, elements=st.floats(-1e3, 1e3)), st.integers(2, 12), st.booleans())
@example(np.full(8, 5e-324), 2, False)
@example(np.array([5e-324, 1e-323, -5e-324, 0.0]), 3, True)
def test_default_grid_spans_the_range_of_x(values, bits, symmetric):
    x = torch.from_numpy(values)
    y = quantize_ste(x, bits, symmetric=symmetric)
    span = 2 * x.abs().max() if symmetric else x.max().clamp(min=0) - x.min().clamp(max=0)
    step = span / (2**bits - 2) if symmetric else span / (2**bits - 1)
    # An asymmetric grid may shift by half a step to represent zero.
    assert (x - y).abs().max() <= step * (0.5 if symmetric else 1.0) * (1 + 1e-9)
    assert torch.equal(y[x == 0], x[x == 0])


def test_gradients_match_learned_step_size_quantization():
    x = torch.tensor([-9.0, -1.1, 0.0, 0.7, 9.0], dtype=torch.float64)
    scale = torch.tensor(0.5, dtype=torch.float64)
    by_x, by_scale = torch.func.jacrev(lambda x, s: quantize_ste(x, 3, scale=s), argnums=(0, 1))(x, scale)
    assert torch.equal(by_x, torch.diag(torch.tensor([0.0, 1.0, 1.0, 1.0, 0.0], dtype=torch.float64)))
    torch.testing.assert_close(by_scale, torch.tensor([-4.0, -2 + 2.2, 0.0, 1 - 1.4, 3.0], dtype=torch.float64))


def test_gradient_by_the_upper_end_matches_pact():
    """Clipped entries move with the upper end of the range, as in PACT."""
    x = torch.tensor([0.1, 0.6, 3.0, 4.0], dtype=torch.float64)
    high = torch.tensor(1.5, dtype=torch.float64)
    gradient = torch.func.jacrev(lambda h: quantize_ste(x, 8, low=0.0, high=h, symmetric=False))(high)
    torch.testing.assert_close(gradient[2:], torch.ones(2, dtype=torch.float64))
    assert gradient[:2].abs().max() <= 0.5 / 255


@pytest.mark.parametrize("symmetric", [True, False])
def test_constant_and_empty_tensors_are_unchanged(symmetric):
    for x in (torch.zeros(3), torch.zeros(0), torch.tensor(0.0)):
        assert torch.equal(quantize_ste(x, 4, symmetric=symmetric), x)


def test_compiled_training_step_matches():
    scale = torch.tensor(0.4, dtype=torch.float64, requires_grad=True)
    x = X.clone().requires_grad_()
    compiled = torch.compile(lambda x, s: quantize_ste(x, 3, scale=s).square().sum(), fullgraph=True, backend="eager")
    got = torch.autograd.grad(compiled(x, scale), [x, scale])
    expected = torch.autograd.grad(quantize_ste(x, 3, scale=scale).square().sum(), [x, scale])
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bits": 1, "scale": 1.0}, "bits: expected an int from 2 to 16, got 1; with symmetric=True"),
        ({"bits": 0, "scale": 1.0, "symmetric": False}, "bits: expected an int from 1 to 16"),
        ({"bits": 4.0, "scale": 1.0}, "bits: .*got 4.0"),
        ({"bits": 4, "scale": 0.0}, "scale: expected a positive number, got 0.0"),
        ({"bits": 4, "scale": torch.ones(3)}, "expected shapes that broadcast"),
        ({"bits": 4, "scale": 1.0, "high": 1.0}, "expected either scale or a range"),
        ({"bits": 4, "offset": 1.0}, "expected scale together with offset"),
        ({"bits": 4, "low": -1.0, "high": 1.0}, "low: expected no low with symmetric=True"),
        ({"bits": 4, "high": 1.0, "symmetric": False}, "expected both low and high"),
        ({"bits": 4, "high": -1.0}, "expected low < high, got 0 and -1.0"),
        ({"bits": 4, "low": 1.0, "high": 1.0, "symmetric": False}, "expected low < high"),
    ],
)
def test_rejects_bad_arguments(arguments, message):
    with pytest.raises(InputError, match=message):
        quantize_ste(X, **arguments)


@pytest.mark.parametrize("function", [sign_ste, sign_clipped_ste, round_ste, floor_ste])
def test_rejects_integer_tensors(function):
    with pytest.raises(InputError, match=f"{function.__name__}: x: .*int64"):
        function(torch.ones(2, dtype=torch.int64))


def test_module_initializes_and_learns_its_scale():
    quantize = FakeQuantize(4, dtype=torch.float64)
    quantize.initialize_(X)
    assert quantize.scale.item() == pytest.approx(float(2 * X.abs().mean() / 7**0.5))
    quantize(X).sum().backward()
    plain = torch.func.grad(lambda s: quantize_ste(X, 4, scale=s).sum())(quantize.scale.detach())
    torch.testing.assert_close(quantize.scale.grad, plain / (len(X) * 7) ** 0.5)
    assert list(FakeQuantize(4, learnable=False).parameters()) == []
    with pytest.raises(InputError, match="not all zero"):
        quantize.initialize_(torch.zeros(3))
    with pytest.raises(InputError, match="bits"):
        FakeQuantize(1)
