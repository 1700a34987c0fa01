"""Tests of normalizations: agreement with torch, running statistics, modules, invariances, precision, refusals."""

import copy
import re

import pytest
import torch
import torch.nn.functional as F

import hodiff
from hodiff.checks import derivative, route_names
from hodiff.errors import InputError
from hodiff.functions.normalization.layers import batch_norm, group_norm, instance_norm, layer_norm, rms_norm
from hodiff.nn import normalization as modules


def drawn(shape, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


PAIRS = [
    ("layer_norm", lambda f, x, w, b: f(x, (x.shape[-1],), w, b), layer_norm, F.layer_norm, (5, 4, 6), 6),
    ("rms_norm", lambda f, x, w, b: f(x, (x.shape[-1],), w), rms_norm, F.rms_norm, (5, 4, 6), 6),
    ("group_norm", lambda f, x, w, b: f(x, 3, w, b), group_norm, F.group_norm, (4, 6, 3, 2), 6),
    ("instance_norm", lambda f, x, w, b: f(x, None, None, w, b), instance_norm, F.instance_norm, (4, 6, 3, 2), 6),
    ("batch_norm", lambda f, x, w, b: f(x, None, None, w, b, True), batch_norm, F.batch_norm, (4, 6, 3, 2), 6),
]
pairs = pytest.mark.parametrize(
    ("call", "ours", "by_torch", "shape", "size"), [p[1:] for p in PAIRS], ids=[p[0] for p in PAIRS]
)


@pairs
@pytest.mark.parametrize("affine", ["both", "weight", "bias", "neither"])
def test_value_and_gradient_match_torch(call, ours, by_torch, shape, size, affine):
    w = drawn(size, seed=1) if affine in {"both", "weight"} else None
    b = drawn(size, seed=2) if affine in {"both", "bias"} else None
    results = []
    for function in (ours, by_torch):
        if function is F.group_norm and affine == "bias":
            w = torch.ones(size, dtype=torch.float64)  # torch's backward raises with only a bias
        leaves = [None if each is None else each.clone().requires_grad_() for each in (drawn(shape), w, b)]
        y = call(function, *leaves)
        needed = [each for each in leaves if each is not None]
        gradients = torch.autograd.grad((y * drawn(y.shape, seed=3)).sum(), needed, allow_unused=True)
        by_leaf = iter(gradients)
        results.append([y, *(None if each is None else next(by_leaf) for each in leaves)])
    for a, e in zip(*results, strict=True):
        if a is not None:
            torch.testing.assert_close(a, e, rtol=0, atol=1e-12)


@pairs
def test_channels_last_and_expanded_inputs_match(call, ours, by_torch, shape, size):
    w, b = drawn(size, seed=1), drawn(size, seed=2)
    x = drawn(shape)
    variants = [x.transpose(0, 1).contiguous().transpose(0, 1), x[:1].expand_as(x)]
    if x.dim() == 4:
        variants.append(x.contiguous(memory_format=torch.channels_last))
    for variant in variants:
        a, e = (
            torch.func.grad(lambda x, f=f: (call(f, x, w, b) * drawn(shape, seed=3)).sum())(variant)
            for f in (ours, by_torch)
        )
        torch.testing.assert_close(a, e, rtol=0, atol=1e-12)


@pairs
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wide_parameters", [False, True])
def test_low_precision_is_computed_in_float32(call, ours, by_torch, shape, size, dtype, wide_parameters):
    parameter = torch.float32 if wide_parameters else dtype
    leaves = [drawn(shape, dtype), drawn(size, parameter, 1), drawn(size, parameter, 2)]
    doubles = [each.double() for each in leaves]
    v = [drawn(each.shape, each.dtype, 4) for each in leaves]

    def gradient(x, w, b):
        return torch.func.grad(lambda *p: call(ours, *p).to(torch.float64).square().sum(), argnums=(0, 1, 2))(x, w, b)

    value = call(ours, *leaves)
    assert value.dtype == dtype
    products = torch.func.jvp(gradient, tuple(leaves), tuple(v))
    truths = torch.func.jvp(gradient, tuple(doubles), tuple(each.double() for each in v))
    for got, exact in zip((*products[0], *products[1]), (*truths[0], *truths[1]), strict=True):
        error = (got.double() - exact).abs().max() / exact.abs().max().clamp(min=1)
        assert float(error) < 8 * torch.finfo(dtype).eps
    assert [each.dtype for each in products[0]] == [dtype, parameter, parameter]


@pytest.mark.one_in(6)
@pairs
def test_routes_agree_on_third_derivatives(call, ours, by_torch, shape, size):
    """All routes agree on third derivatives; torch's own layer_norm is wrong even in reverse mode."""
    x, w, b = drawn((2, 6, 2) if len(shape) == 4 else (2, 6)), drawn(size, seed=1), drawn(size, seed=2)

    def phi(flat):
        return (call(ours, flat.reshape(x.shape), w, b) ** 2 * drawn(x.shape, seed=3)).sum()

    u, v = drawn(x.numel(), seed=4), drawn(x.numel(), seed=5)
    found = [derivative(phi, route)(x.reshape(-1), u, v) for route in route_names(3)]
    for each in found[1:]:
        torch.testing.assert_close(each, found[0], rtol=0, atol=1e-10 * float(found[0].abs().max()))


def test_derivatives_vanish_along_shifts_and_scalings():
    """The derivatives of a layer normalization vanish along shifts and, without eps, along scalings."""
    x, v = drawn((3, 5)), drawn((3, 5), seed=1)

    def f(x):
        return (layer_norm(x, (5,), eps=0.0) * drawn((3, 5), seed=2)).sum()

    gradient = torch.func.grad(f)(x)
    shift = hodiff.hvp(f, x, torch.ones_like(x))
    assert float(shift.abs().max()) < 1e-12
    # By Euler's theorem, the gradient of a function of degree 0 has degree -1.
    torch.testing.assert_close(hodiff.hvp(f, x, x), -gradient)
    assert float((gradient * x).sum().abs()) < 1e-12
    assert float(hodiff.hvp(f, x, v).abs().max()) > 1e-2


def test_offset_loses_no_digits_of_the_hvp():
    x, v = drawn((2, 8)), drawn((2, 8), seed=1)

    def f(x):
        return (layer_norm(x, (8,)) * drawn((2, 8), seed=2)).sum()

    near, far = hodiff.hvp(f, x, v), hodiff.hvp(f, x + 2.0**20, v)
    torch.testing.assert_close(far, near, rtol=0, atol=1e-8)


@pytest.mark.parametrize(
    ("name", "momentum"),
    [
        *((f"BatchNorm{rank}d", momentum) for rank in (1, 2, 3) for momentum in (0.1, 0.7, None)),
        *((f"InstanceNorm{rank}d", momentum) for rank in (1, 2, 3) for momentum in (0.1, 0.7)),
    ],
)
def test_running_statistics_match_torch(name, momentum):
    rank = int(name[-2])
    theirs = getattr(torch.nn, name)(3, momentum=momentum, affine=True, track_running_stats=True)
    ours = getattr(modules, name)(3, momentum=momentum, affine=True, track_running_stats=True)
    for step in range(3):
        x = drawn((4, 3, *(2, 3, 2)[:rank]), torch.float32, step) * (1 + step) + step
        torch.testing.assert_close(ours(x), theirs(x))
        torch.testing.assert_close(dict(ours.state_dict()), dict(theirs.state_dict()), rtol=1e-6, atol=1e-6)
    ours.eval(), theirs.eval()
    torch.testing.assert_close(ours(x), theirs(x))
    before = copy.deepcopy(ours.state_dict())
    ours(x)
    torch.testing.assert_close(ours.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize("options", [{"affine": False}, {"track_running_stats": False}])
@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_modules_match_torch(options, training):
    theirs, ours = torch.nn.BatchNorm1d(4, **options).train(training), modules.BatchNorm1d(4, **options).train(training)
    x = drawn((5, 4), torch.float32)
    torch.testing.assert_close(ours(x), theirs(x))


@pytest.mark.parametrize(
    ("name", "arguments", "shape"),
    [
        ("LayerNorm", ((3, 2),), (4, 3, 2)),
        ("RMSNorm", (2,), (4, 3, 2)),
        ("GroupNorm", (2, 4), (3, 4, 2)),
        ("InstanceNorm1d", (3,), (3, 5)),
    ],
)
def test_modules_match_torch(name, arguments, shape):
    theirs, ours = getattr(torch.nn, name)(*arguments), getattr(modules, name)(*arguments)
    ours.load_state_dict(theirs.state_dict())
    x = drawn(shape, torch.float32)
    torch.testing.assert_close(ours(x), theirs(x))


def test_running_statistics_inside_transforms_match_torch():
    """A captured buffer is updated once per evaluation, like in torch's own batch_norm."""
    x = drawn((5, 3))
    for transform in (torch.func.grad, lambda f: lambda x: torch.func.jvp(f, (x,), (x,))):
        states = []
        for function in (batch_norm, F.batch_norm):
            mean, variance = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
            transform(lambda x, f=function, m=mean, v=variance: f(x, m, v, training=True).square().sum())(x)
            states.append((mean, variance))
        torch.testing.assert_close(states[0], states[1])
        assert bool(states[0][0].any())


def test_vmap_over_parameters_and_inputs_matches_a_loop():
    x, w, b = drawn((3, 4, 6, 2)), drawn((3, 6), seed=1), drawn((3, 6), seed=2)

    def f(x, w, b):
        return group_norm(x, 2, w, b)

    g = torch.func.grad(lambda *p: f(*p).pow(3).sum(), argnums=(0, 1, 2))
    for dims in [(0, None, None), (None, 0, None), (None, None, 0), (0, 0, None), (0, 0, 0)]:
        arguments = [each if dim == 0 else each[0] for each, dim in zip((x, w, b), dims, strict=True)]
        batched = torch.func.vmap(g, in_dims=dims)(*arguments)
        for k in range(3):
            one = g(*(each[k] if dim == 0 else each for each, dim in zip(arguments, dims, strict=True)))
            torch.testing.assert_close(tuple(each[k] for each in batched), one)


def test_evaluation_mode_is_differentiable_by_running_statistics():
    x, mean, variance = drawn((3, 2)), drawn(2, seed=1), drawn(2, seed=2).exp()

    def f(mean, variance):
        return batch_norm(x, mean, variance).pow(3).sum()

    def expected(mean, variance):
        return ((x - mean) / (variance + 1e-5).sqrt()).pow(3).sum()

    ours, truth = (torch.func.grad(g, argnums=(0, 1))(mean, variance) for g in (f, expected))
    torch.testing.assert_close(ours, truth)


def test_zero_cotangents_without_storage_are_accepted():
    """Reverse over a tangent passes zeros without storage to the kernels of the value's gradient."""
    x, w, t = drawn((2, 4, 2)), drawn(4, seed=1), drawn((2, 4, 2), seed=2)
    c = drawn((2, 4, 2), seed=3)

    def f(w):
        return (torch.func.jvp(lambda x: group_norm(x, 2, w) * c, (x,), (t,))[1]).sum()

    expected = torch.func.jvp(lambda x: group_norm(x, 2) * c, (x,), (t,))[1].sum((0, 2))
    for _ in range(10):
        torch.testing.assert_close(torch.func.grad(f)(w), expected)


X = torch.zeros(2, 4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: layer_norm(X.int(), (4,)), "layer_norm: x: expected a floating-point tensor, got int32"),
        (
            lambda: layer_norm(X, (3,)),
            "layer_norm: normalized_shape: expected the trailing sizes of x (2, 4), got (3,)",
        ),
        (lambda: layer_norm(X, (4,), torch.ones(3)), "layer_norm: weight: expected (4,) float32, got (3,) float32"),
        (lambda: layer_norm(X, (4,), torch.ones(4).double()), "weight: expected (4,) float32, got (4,) float64"),
        (lambda: layer_norm(X, (4,), eps="1"), "eps: expected a number, got '1'"),
        (
            lambda: layer_norm(X.half(), (4,), torch.ones(4), torch.ones(4).half()),
            "bias: expected the dtype of weight, float32, got float16",
        ),
        (lambda: rms_norm(X, ()), "rms_norm: normalized_shape"),
        (lambda: group_norm(X, 3), "num_groups: expected an int that divides the 4 channels of x, got 3"),
        (lambda: group_norm(X[0], 2), "x: expected at least the two dimensions (N, C, ...), got (4,)"),
        (lambda: batch_norm(X, None, None), "running_mean: expected a tensor (4,), got None"),
        (lambda: batch_norm(X, X[0, :3], X[0]), "running_mean: expected shape (4,), got (3,)"),
        (lambda: batch_norm(X[:1], None, None, training=True), "expected more than one value for each channel"),
        (lambda: instance_norm(X[..., None]), "expected more than one value for each instance"),
    ],
)
def test_rejects_bad_arguments(call, message):
    with pytest.raises(InputError, match=re.escape(message)):
        call()
