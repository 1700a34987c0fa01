"""Tests of activations, rectifiers and log-probabilities: conventions at kinks, memory, error messages and modules."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from functions.case import normal
from torch import nn

import hodiff
from hodiff.checks import derivative, route_names
from hodiff.errors import InputError
from hodiff.functions.activations.bias_act import bias_act
from hodiff.functions.activations.gated import gelu, mish, silu, swish
from hodiff.functions.activations.rectifiers import clipped_relu, relu, softplus
from hodiff.functions.logarithms import log1mexp, log_sigmoid, logit, xlogy
from hodiff.functions.logistic import Bell, scaled_sigmoid
from hodiff.nn import activations as modules

INF = float("inf")


def f64(*values):
    return torch.tensor(values, dtype=torch.float64)


def gradient(f, *inputs):
    leaves = [x.clone().requires_grad_() for x in inputs]
    return torch.autograd.grad(f(*leaves).sum(), leaves)


class TestKinks:
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
    def test_relu_slope_at_zero_is_zero(self, dtype):
        x = torch.tensor([-INF, -1, -0.0, 0, 1, INF], dtype=dtype)
        assert torch.equal(gradient(relu, x)[0], torch.tensor([0, 0, 0, 0, 1, 1], dtype=dtype))

    # bfloat16 rounds 0.7 down and 0.3 up.
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("top", [0.3, 0.7, 6])
    def test_clipped_relu_slope_at_its_kinks_is_zero(self, dtype, top):
        x = torch.tensor([-INF, -1, 0, 0.1, top, 9, INF], dtype=dtype)
        expected = torch.tensor([0, 0, 0, 1, 0, 0, 0], dtype=dtype)
        y = clipped_relu(x, top)
        assert torch.equal(y, x.clamp(0, top))
        assert torch.equal(gradient(lambda x: clipped_relu(x, top), x)[0], expected)
        forward = torch.func.jvp(lambda x: clipped_relu(x, top), (x,), (torch.ones_like(x),))[1]
        assert torch.equal(forward, expected)

    @pytest.mark.parametrize("f", [relu, lambda x: clipped_relu(x, 6.0)], ids=["relu", "clipped_relu"])
    def test_nan_input_gives_nan(self, f):
        x = f64(float("nan"))
        assert f(x).isnan().all()
        assert gradient(lambda x: 2 * f(x), x)[0].item() == 2

    def test_softplus_above_the_threshold_is_linear(self):
        x, beta = f64(9.9, 10.1), f64(2.0)

        def f(x, beta):
            return softplus(x, beta, threshold=20.0)

        assert f(x, beta)[1] == x[1]
        assert f(x, beta)[0] > x[0]
        for k in range(2):
            parts = [torch.func.grad(f, (0, 1))(x[k], beta[0]), torch.func.hessian(f, (0, 1))(x[k], beta[0])]
            (by_x, by_beta), ((xx, xb), (bx, bb)) = parts
            linear = (by_x == 1) and all(each == 0 for each in (by_beta, xx, xb, bx, bb))
            assert bool(linear) == (k == 1)

    def test_softplus_with_a_threshold_matches_torch(self):
        x = torch.linspace(-30, 30, 61, dtype=torch.float64)
        assert torch.allclose(softplus(x, 0.7, 20.0), nn.functional.softplus(x, 0.7, 20.0), rtol=1e-14)


class TestRectifiersAreLean:
    """No graph is recorded for a second derivative that is zero."""

    @pytest.mark.parametrize(
        "f",
        [relu, lambda x: clipped_relu(x, 0.5), lambda x: bias_act(x, torch.zeros(5, dtype=x.dtype), "relu")],
        ids=["relu", "clipped_relu", "bias_act"],
    )
    def test_second_derivative_is_zero_without_a_graph(self, f):
        x = torch.randn(5, dtype=torch.float64, requires_grad=True)
        (g,) = torch.autograd.grad(f(x).sum(), x, create_graph=True)
        assert not g.requires_grad
        cotangent = torch.ones(5, dtype=torch.float64, requires_grad=True)
        (g,) = torch.autograd.grad(f(x), x, cotangent, create_graph=True)
        assert torch.autograd.grad(g.sum(), x, allow_unused=True, retain_graph=True) == (None,)
        assert torch.equal(torch.autograd.grad(g.sum(), cotangent)[0], g)

    @pytest.mark.one_in(2)
    @pytest.mark.parametrize("f", [relu, lambda x: clipped_relu(x, 0.5)], ids=["relu", "clipped_relu"])
    def test_saves_the_output_and_frees_the_input(self, f):
        leaf = torch.randn(5, requires_grad=True)
        x = leaf * 1
        gone = weakref.ref(x)
        y = f(x)
        assert y.grad_fn.saved_tensors[0].data_ptr() == y.data_ptr()
        del x
        gc.collect()
        assert gone() is None
        assert torch.equal(torch.autograd.grad(y.sum(), leaf)[0], ((leaf > 0) & (f(leaf) < 0.5) | (y == leaf)).float())

    def test_hvp_of_a_network_matches(self):
        generator = torch.Generator().manual_seed(0)
        x, w, u, v = (normal((4, 4), torch.float64, generator) for _ in range(4))

        def loss(f):
            return lambda flat: (f(x @ f(flat.reshape(4, 4))) @ u).square().sum()

        def clipped(x):
            return clipped_relu(x, 1.0)

        for f, theirs in ((relu, torch.relu), (clipped, lambda x: nn.functional.hardtanh(x, 0, 1))):
            expected = torch.func.jvp(torch.func.grad(loss(theirs)), (w.reshape(16),), (v.reshape(16),))[1]
            for route in route_names(2):
                torch.testing.assert_close(derivative(loss(f), route)(w.reshape(16), v.reshape(16)), expected)


class TestScaledSigmoid:
    def test_scaled_sigmoid_saves_its_output_only(self):
        x = torch.randn(5, requires_grad=True)
        y = scaled_sigmoid(x, 3.0)
        assert [each.data_ptr() for each in y.grad_fn.saved_tensors if each is not None] == [y.data_ptr()]

    def test_scaled_sigmoid_derivatives_are_accurate_where_it_saturates(self):
        x = torch.linspace(1, 60, 119, dtype=torch.float64)
        first = torch.func.vmap(torch.func.grad(lambda x: scaled_sigmoid(x, 3.0)))
        second = torch.func.vmap(torch.func.grad(torch.func.grad(lambda x: scaled_sigmoid(x, 3.0))))
        slope_of_bell = torch.func.vmap(torch.func.grad(Bell.apply))
        assert float((first(x) - 3 * Bell.apply(x)).abs().max()) < 3e-15
        assert float((second(x) - 3 * slope_of_bell(x)).abs().max()) < 3e-15

    @pytest.mark.parametrize("scale", [0.0, f64(0.0)[0]], ids=["constant", "learned"])
    def test_scaled_sigmoid_with_zero_scale_is_zero(self, scale):
        x = f64(-1.0, 2.0)
        assert torch.equal(scaled_sigmoid(x, scale), torch.zeros(2, dtype=torch.float64))
        assert torch.equal(gradient(lambda x: scaled_sigmoid(x, scale), x)[0], torch.zeros(2, dtype=torch.float64))

    def test_scaled_sigmoid_has_a_gradient_by_a_zero_scale(self):
        x, scale = f64(-1.0, 2.0), f64(0.0)
        assert torch.allclose(gradient(scaled_sigmoid, x, scale)[1], torch.sigmoid(x).sum())
        mixed = torch.func.jacrev(torch.func.grad(lambda x, s: scaled_sigmoid(x, s).sum()), argnums=1)(x, scale)
        assert torch.allclose(mixed[:, 0], Bell.apply(x))


class TestLogarithms:
    def test_log_sigmoid_gradient_is_finite_where_the_formula_gives_nan(self):
        x = f64(-800.0)
        assert gradient(lambda x: torch.log(torch.sigmoid(x)), x)[0].isnan().all()
        assert gradient(log_sigmoid, x)[0].item() == 1

    def test_log_probabilities_and_complements_are_consistent(self):
        x = torch.linspace(-40, 40, 81, dtype=torch.float64)
        assert torch.allclose(log1mexp(-log_sigmoid(x)), log_sigmoid(-x), rtol=1e-13)
        assert torch.allclose(logit(torch.sigmoid(x[x < 1])), x[x < 1], rtol=1e-12)

    def test_entropy_derivatives_at_zero_probability_are_zero(self):
        """All derivatives of a term 0 log 0 are zero and symmetric, in every route."""
        p, v = f64(0.0, 0.25, 0.75), f64(1.0, 2.0, -3.0)
        entropy = lambda p: -xlogy(p, p).sum()  # noqa: E731
        assert torch.allclose(torch.func.grad(entropy)(p), torch.where(p > 0, -p.log() - 1, 0))
        for route in route_names(2):
            assert torch.allclose(derivative(entropy, route)(p, v), torch.where(p > 0, -v / p, 0))

    def test_xlogy_derivatives_at_zero(self):
        x, y = f64(0.0, 0.0, 0.0), f64(0.0, -2.0, 2.0)
        hessian = torch.func.vmap(torch.func.hessian(xlogy, (0, 1)))(x, y)
        assert torch.equal(xlogy(x, y), torch.zeros(3, dtype=torch.float64))
        assert torch.equal(hessian[0][1], f64(0, 0, 0.5))
        assert torch.equal(hessian[1][0], f64(0, 0, 0.5))
        assert torch.equal(hessian[0][0], f64(0, 0, 0))
        assert torch.equal(hessian[1][1], f64(0, 0, 0))
        by_x, by_y = gradient(xlogy, x, y)
        assert torch.equal(by_x, f64(0, 0, 2).log().nan_to_num(neginf=0) * f64(0, 0, 1))
        assert torch.equal(by_y, f64(0, 0, 0))


class TestBiasAct:
    @pytest.mark.parametrize("act", ["identity", "relu", "sigmoid", "tanh", "gelu", "silu"])
    @pytest.mark.parametrize("shapes", [((2, 3), (3,)), ((2, 3), ()), ((3,), (2, 1)), ((2, 3, 1), (1, 3, 2))])
    def test_bias_act_sums_gradients_of_broadcast_arguments(self, act, shapes):
        generator = torch.Generator().manual_seed(0)
        x, b = (normal(shape, torch.float64, generator) for shape in shapes)
        zero = torch.zeros((), dtype=torch.float64)
        expected = gradient(lambda x, b: bias_act(x + b, zero, act), x, b)
        for ours, theirs in zip(gradient(lambda x, b: bias_act(x, b, act), x, b), expected, strict=True):
            torch.testing.assert_close(ours, theirs)


def test_clipped_relu_is_relu6_by_default():
    x = torch.tensor([-1.0, 0.5, 6.0, 7.0])
    assert torch.equal(clipped_relu(x), torch.nn.functional.relu6(x))


MESSAGES = {
    "swish: x: expected a floating-point tensor, got float": lambda: swish(1.0),
    "swish: expected shapes that broadcast": lambda: swish(torch.ones(3), torch.ones(2)),
    "swish: beta: expected a number or a floating-point tensor, got str": lambda: swish(torch.ones(3), "one"),
    "silu: x: expected a floating-point tensor, got int64": lambda: silu(torch.arange(3)),
    "gelu: approximate: expected one of 'none', 'tanh', got 'erf'": lambda: gelu(torch.ones(3), "erf"),
    "mish: x: expected": lambda: mish([1.0]),
    "scaled_sigmoid: scale: expected": lambda: scaled_sigmoid(torch.ones(3), None),
    "clipped_relu: max: expected a positive number, got 0": lambda: clipped_relu(torch.ones(3), 0),
    "clipped_relu: max: expected a positive number, got nan": lambda: clipped_relu(torch.ones(3), float("nan")),
    "softplus: beta: expected a number other than zero, got 0": lambda: softplus(torch.ones(3), 0),
    "softplus: threshold: expected a number or None, got '20'": lambda: softplus(torch.ones(3), threshold="20"),
    "bias_act: act: expected one of 'identity', 'relu'": lambda: bias_act(torch.ones(3), torch.ones(3), "elu"),
    "bias_act: b: expected a floating-point tensor, got NoneType": lambda: bias_act(torch.ones(3), None),
    "xlogy: expected shapes that broadcast, got x \\(3,\\), y \\(2,\\)": lambda: xlogy(torch.ones(3), torch.ones(2)),
    "ClippedReLU: max: expected a positive number": lambda: modules.ClippedReLU(-1.0),
    "GELU: approximate: expected one of": lambda: modules.GELU("erf"),
    "Swish: beta: expected": lambda: modules.Swish("one"),
}


@pytest.mark.parametrize("message", MESSAGES)
def test_rejects_bad_arguments(message):
    with pytest.raises(InputError, match=message):
        MESSAGES[message]()


BUILT = {
    "Swish(beta=1)": modules.Swish(),
    "Swish(beta=(3,))": modules.Swish(torch.ones(3)),
    "ScaledSigmoid(scale=2.0, learned=False)": modules.ScaledSigmoid(2.0),
    "ScaledSigmoid(scale=2, learned=True)": modules.ScaledSigmoid(2.0, learned=True),
    "ScaledSigmoid(scale=(3,), learned=False)": modules.ScaledSigmoid(torch.ones(3)),
    "ClippedReLU(max=6.0)": modules.ClippedReLU(),
    "ReLU()": modules.ReLU(),
    "SiLU()": modules.SiLU(),
    "GELU(approximate='tanh')": modules.GELU("tanh"),
    "Mish()": modules.Mish(),
    "Softplus(beta=2.0, threshold=20.0, learned=False)": modules.Softplus(2.0, 20.0),
    "Softplus(beta=(3,), threshold=None, learned=True)": modules.Softplus(torch.ones(3), learned=True),
    "LogSigmoid()": modules.LogSigmoid(),
}


@pytest.mark.parametrize("description", BUILT)
def test_modules_are_copied_pickled_and_printed(description):
    module = BUILT[description]
    assert repr(module) == description
    x = torch.randn(2, 3, requires_grad=True)
    expected = module(x)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(other(x), expected)
        assert [name for name, _ in other.named_parameters()] == [name for name, _ in module.named_parameters()]
    other.load_state_dict(module.state_dict())
    other.double()(x.double()).sum().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in other.parameters())
    product = hodiff.hvp(lambda x: module(x).square().sum(), x.detach(), torch.ones(2, 3))
    assert bool(product.isfinite().all())


@pytest.mark.parametrize("f", [silu, gelu, mish, log_sigmoid, softplus, swish, relu])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_derivatives_are_finite_up_to_the_largest_number(f, dtype):
    top = torch.finfo(dtype).max
    x = torch.tensor([-top, -100, -1, 0, 1, 100, top], dtype=dtype)
    g = torch.func.grad(lambda x: f(x).float().sum())(x)
    h = torch.func.grad(lambda x: torch.func.grad(lambda x: f(x).float().sum())(x).float().sum())(x)
    assert f(x).dtype == g.dtype == h.dtype == dtype
    for each in (f(x), g, h):
        assert bool(each.isfinite().all())
