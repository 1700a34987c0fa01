"""Tests of gradient scaling, reversal and clipping, in every kind of pass."""

import logging
import unittest

import hypothesis.extra.numpy as arrays
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import forward_ad

import hodiff
from hodiff.errors import InputError, RouteError
from hodiff.functions.gradients.control import (
    clip_gradient,
    gradient_hook,
    log_gradient,
    noise_gradient,
    reverse_gradient,
    scale_gradient,
    stop_gradient,
)

X = torch.tensor([3.0, -4.0, 0.5], dtype=torch.float64)
ONES = torch.ones_like(X)


def generator():
    return torch.Generator().manual_seed(0)


REVERSE_ONLY = {
    "clip": lambda x: clip_gradient(x, -1, 1),
    "clip-norm": lambda x: clip_gradient(x, max_norm=1),
    "noise": lambda x: noise_gradient(x, 0.1, generator()),
}


def test_stop_gradient_is_constant_by_every_route():
    def loss(x):
        return (x * stop_gradient(x**2)).sum()

    assert torch.equal(torch.func.grad(loss)(X), X**2)
    assert torch.equal(torch.func.jvp(loss, (X,), (ONES,))[1], (X**2).sum())
    for route in hodiff.ROUTES:
        assert torch.equal(hodiff.hvp(loss, X, ONES, route=route), 0 * X)
    assert torch.equal(torch.func.vmap(torch.func.grad(lambda x: x * stop_gradient(x)))(X), X)


@pytest.mark.parametrize("control", [*REVERSE_ONLY.values(), scale_gradient, log_gradient])
def test_result_may_be_changed_in_place(control):
    """Changing the result in place, as ReLU(inplace=True) does, leaves x intact for other branches."""
    x = X.clone().requires_grad_()
    y = control(x, 0.5) if control is scale_gradient else control(x)
    y.mul_(2).sum().backward()
    assert torch.equal(x, X)
    assert x.grad.isfinite().all()


def test_scale_gradient_factors_multiply_in_second_order():
    """A scaled inner gradient that is differentiated through the scaling has the squared factor."""
    for route in hodiff.ROUTES:
        product = hodiff.hvp(lambda x: (scale_gradient(x, 0.5) ** 3).sum(), X, ONES, route=route)
        torch.testing.assert_close(product, 0.25 * 6 * X, rtol=1e-15, atol=0)


@given(arrays.arrays("float64", 4, elements=st.floats(-1e6, 1e6)), st.floats(-10, 0), st.floats(0, 10))
def test_clip_by_value_matches_clamp(values, low, high):
    weights = torch.from_numpy(values)
    gradient = torch.func.grad(lambda x: (weights * clip_gradient(x, low, high)).sum())(torch.zeros_like(weights))
    assert torch.equal(gradient, weights.clamp(low, high))


@given(arrays.arrays("float64", (2, 3), elements=st.floats(-1e6, 1e6)), st.floats(1e-3, 1e3))
def test_clip_by_norm_keeps_directions(values, bound):
    weights = torch.from_numpy(values)
    for dim in (None, 0, (0, 1)):
        gradient = torch.func.grad(lambda x: (weights * clip_gradient(x, max_norm=bound, dim=dim)).sum())(
            torch.zeros_like(weights)
        )
        dims = (0, 1) if dim is None else dim
        norms = weights.norm(dim=dims, keepdim=True)
        expected = torch.where(norms > bound, weights * (bound / norms), weights)
        torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-300)


def test_clip_accepts_one_bound_and_python_numbers():
    assert torch.equal(torch.func.grad(lambda x: clip_gradient(x, high=1.0) * 5)(X[0]), ONES[0])
    assert torch.equal(torch.func.grad(lambda x: clip_gradient(x, low=1.0) * -5)(X[0]), ONES[0])
    assert torch.equal(torch.func.grad(lambda x: clip_gradient(x, max_norm=2.0) * -5)(X[0]), -2 * ONES[0])


def test_clip_applies_to_both_passes_of_double_backward():
    """The gradient clamp(2x, -4, 4) has derivative 2 inside, and the second backward pass clips again."""
    x = torch.tensor([1.0, 3.0], dtype=torch.float64, requires_grad=True)
    loss = clip_gradient(x, -4, 4).square().sum()
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    assert gradient.tolist() == [2.0, 4.0]
    assert torch.autograd.grad((gradient * ONES[:2]).sum(), x, retain_graph=True)[0].tolist() == [2.0, 0.0]
    assert torch.autograd.grad((gradient * 3).sum(), x)[0].tolist() == [4.0, 0.0]


@pytest.mark.parametrize("control", REVERSE_ONLY.values(), ids=REVERSE_ONLY)
def test_forward_mode_is_rejected(control):
    def loss(x):
        return control(x).square().sum()

    with pytest.raises(RouteError, match="reverse-over-reverse"):
        torch.func.jvp(loss, (X,), (ONES,))
    with pytest.raises(RouteError, match="no Jacobian"):
        torch.func.jvp(torch.func.vmap(control), (X,), (ONES,))
    with forward_ad.dual_level(), pytest.raises(RouteError):
        control(forward_ad.make_dual(X, ONES))
    for route in hodiff.ROUTES[1:]:
        with pytest.raises(RouteError):
            hodiff.hvp(loss, X, ONES, route=route)


def test_clip_by_norm_under_vmap_clips_each_example():
    batch = torch.tensor([[3.0, 4.0], [30.0, 40.0]], dtype=torch.float64)
    weights = batch.clone()
    unit = torch.tensor([[0.6, 0.8], [0.6, 0.8]], dtype=torch.float64)
    inside = torch.func.vmap(torch.func.grad(lambda x, w: (w * clip_gradient(x, max_norm=1)).sum()))(batch, weights)
    outside = torch.func.grad(lambda x: (weights * torch.func.vmap(lambda x: clip_gradient(x, max_norm=1))(x)).sum())(
        batch
    )
    torch.testing.assert_close(inside, unit)
    torch.testing.assert_close(outside, unit)


def test_noise_comes_from_the_generator():
    expected = 0.5 * torch.randn(3, generator=generator(), dtype=torch.float64)
    got = torch.func.grad(lambda x: noise_gradient(x, 0.5, generator()).sum())(X)
    torch.testing.assert_close(got, 1 + expected, rtol=1e-15, atol=0)
    state = torch.get_rng_state()
    torch.func.grad(lambda x: noise_gradient(x, 0.5, generator()).sum())(X)
    assert torch.equal(torch.get_rng_state(), state)


def test_noise_differs_per_example_under_vmap():
    batched = torch.func.vmap(torch.func.grad(lambda x: noise_gradient(x, 1.0, shared)))
    shared = generator()
    noise = batched(torch.zeros(1000, dtype=torch.float64)) - 1
    assert len(noise.unique()) == 1000
    assert abs(float(noise.std()) - 1) < 0.1


def test_log_gradient_is_called_for_each_reverse_pass():
    seen = []
    x = X.clone().requires_grad_()
    loss = (log_gradient(x, seen.append) ** 3).sum()
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    assert [each.tolist() for each in seen] == [(3 * X**2).tolist()]
    assert not seen[0].requires_grad
    gradient.sum().backward()
    assert len(seen) == 2
    torch.testing.assert_close(seen[1], 6 * X)
    torch.func.jvp(lambda x: log_gradient(x, seen.append), (X,), (ONES,))
    assert len(seen) == 2


def test_log_gradient_receives_whole_batches():
    seen = []
    torch.func.vmap(torch.func.vmap(torch.func.grad(lambda x: log_gradient(x, seen.append) ** 2)))(X.expand(2, 3))
    assert [each.tolist() for each in seen] == [(2 * X.expand(2, 3)).tolist()]
    assert type(seen[0]) is torch.Tensor


def test_log_gradient_passes_a_copy():
    gradient = torch.func.grad(lambda x: log_gradient(x, lambda gradient: gradient.zero_()).square().sum())(X)
    assert torch.equal(gradient, 2 * X)


@pytest.mark.parametrize(
    "control", [lambda x: scale_gradient(x, 0.5), lambda x: log_gradient(x, lambda gradient: None)]
)
def test_forward_ad_tangents_match(control):
    """torch's dual numbers, which have stricter rules for views than torch.func, give the same tangent."""
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(control(forward_ad.make_dual(X, ONES))).tangent
    assert torch.equal(tangent, torch.func.jvp(control, (X,), (ONES,))[1])


def test_log_gradient_writes_to_the_logger():
    with unittest.TestCase().assertLogs("hodiff", logging.INFO) as seen:
        torch.func.grad(lambda x: (2 * log_gradient(x, name="first layer")).sum())(X)
    assert [record.getMessage() for record in seen.records] == ["first layer: norm 3.46, largest magnitude 2"]


@pytest.mark.parametrize(
    ("hook", "expected"),
    [
        (gradient_hook(stop_gradient), 0 * X),
        (gradient_hook(scale_gradient, 0.5), X),
        (gradient_hook(reverse_gradient), -2 * X),
        (gradient_hook(clip_gradient, -1.0, 2.0), (2 * X).clamp(-1, 2)),
        (gradient_hook(noise_gradient, 0.0, generator()), 2 * X),
        (gradient_hook(log_gradient, lambda gradient: None), 2 * X),
    ],
    ids=["stop", "scale", "reverse", "clip", "noise", "log"],
)
def test_gradient_hook_changes_the_gradient(hook, expected):
    x = X.clone().requires_grad_()
    x.register_hook(hook)
    x.square().sum().backward()
    torch.testing.assert_close(x.grad, expected)
    assert not x.grad.requires_grad


def test_gradient_hook_is_differentiable():
    x = X.clone().requires_grad_()
    y = 1 * x
    y.register_hook(gradient_hook(scale_gradient, 0.5))
    (gradient,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
    torch.testing.assert_close(gradient, 1.5 * X**2)
    torch.testing.assert_close(torch.autograd.grad(gradient.sum(), x)[0], 0.25 * 6 * X)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: stop_gradient(1.0), "stop_gradient: x: expected a tensor, got float"),
        (lambda: scale_gradient(X.long(), 1.0), "scale_gradient: x: .*int64"),
        (lambda: scale_gradient(X, "a"), "scale_gradient: factor: .*str"),
        (lambda: scale_gradient(X, torch.ones(2)), r"factor: .*\(3,\), got \(2,\)"),
        (lambda: reverse_gradient(X, torch.ones(2, 3)), r"strength: .*\(3,\), got \(2, 3\)"),
        (lambda: clip_gradient(X), "got none"),
        (lambda: clip_gradient(X, 0.0, max_norm=1.0), "got low, max_norm"),
        (lambda: clip_gradient(X, 1.0, 0.0), "low: expected at most high"),
        (lambda: clip_gradient(X, True), "low: expected a number or None, got True"),
        (lambda: clip_gradient(X, max_norm=0.0), "max_norm: expected a positive number"),
        (lambda: clip_gradient(X, 0.0, dim=0), "dim: expected max_norm"),
        (lambda: clip_gradient(X, max_norm=1.0, dim=1), "dim: expected ints"),
        (lambda: noise_gradient(X, -1.0, generator()), "std: expected a nonnegative number"),
        (lambda: noise_gradient(X, 1.0, None), "generator: .*NoneType"),
        (lambda: log_gradient(X, 1), "record: expected a callable"),
    ],
)
def test_rejects_bad_arguments(call, message):
    with pytest.raises(InputError, match=message):
        call()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("function", [lambda x: scale_gradient(x, 0.5), lambda x: scale_gradient(x, FACTOR)])
def test_compiled_training_step_and_forward_mode_match(function):
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    x = X.clone().requires_grad_()
    value = compiled(x)
    value.sum().backward()
    assert torch.equal(value, X)
    assert torch.equal(x.grad, torch.full_like(X, 0.5))
    tangent = torch.compile(lambda x: torch.func.jvp(function, (x,), (ONES,))[1], fullgraph=True, backend="aot_eager")
    assert torch.equal(tangent(X), torch.full_like(X, 0.5))


FACTOR = torch.tensor(0.5, dtype=torch.float64)


# Dynamo inspects the gradient at a graph break, and warns that it does not trace the callback.
@pytest.mark.filterwarnings("ignore:The .grad attribute", "ignore:Dynamo does not know how to trace")
@pytest.mark.slow
def test_backward_callbacks_run_eagerly_when_compiled():
    """The callback runs on every backward pass, and compiled gradients are clipped."""
    seen = []

    def loss(x):
        return (log_gradient(clip_gradient(2 * x, -1, 1), seen.append) ** 2).sum()

    compiled = torch.compile(loss, backend="aot_eager")
    for _ in range(2):
        x = X.clone().requires_grad_()
        compiled(x).backward()
        assert torch.equal(x.grad, 2 * (4 * X).clamp(-1, 1))
    assert [each.tolist() for each in seen] == 2 * [(4 * X).tolist()]
    torch.compile(torch.func.grad(loss), backend="aot_eager")(X)
    assert len(seen) == 3
    forward = torch.compile(lambda x: torch.func.jvp(loss, (x,), (ONES,))[1], backend="aot_eager")
    with pytest.raises(RouteError):
        forward(X)
