"""Tests of the Laplacian against closed forms, and against the trace of a Hessian of primitives."""

import itertools

import pytest
import torch
from drawing import normals, seeded
from mpmath_series import D
from torch.nn import functional

import hodiff
from hodiff.taylor import value_grad_laplacian

randn = normals(seeded())

W1, W2 = randn(7, 4) / 2, randn(3, 7) / 2


def network(x):
    """Apply a network with three outputs."""
    return functional.linear(torch.tanh(functional.linear(x, W1)), W2)


def exact_laplacian(x):
    """Compute the network's Laplacian: tanh'' = -2 tanh (1 - tanh²), times the squared length of each weight row."""
    t = torch.tanh(x @ W1.mT)
    return (-2 * t * (1 - t * t) * W1.square().sum(1)) @ W2.mT


def test_laplacian_of_a_network_matches():
    x = randn(4)
    torch.testing.assert_close(hodiff.laplacian(network)(x), exact_laplacian(x))


@pytest.mark.parametrize("chunk_size", [None, 1, 3])
def test_laplacian_of_a_batch_matches(chunk_size):
    x = randn(5, 4)
    torch.testing.assert_close(hodiff.laplacian(network, batched=True, chunk_size=chunk_size)(x), exact_laplacian(x))


def test_laplacian_by_vmap_matches():
    x = randn(5, 4)
    torch.testing.assert_close(torch.func.vmap(hodiff.laplacian(network))(x), exact_laplacian(x))


def test_laplacian_of_harmonic_function_is_zero():
    x = randn(3)
    potential = lambda x: 1 / (x * x).sum().sqrt()  # noqa: E731
    assert hodiff.laplacian(potential)(x).abs() < 1e-13
    power = lambda x: (x * x).sum() ** 1.5  # noqa: E731
    # Δ rᵖ = p (p + n - 2) rᵖ⁻²
    torch.testing.assert_close(hodiff.laplacian(power)(x), 12 * x.norm())


def test_nested_laplacian_of_a_power_of_the_radius_matches_closed_form():
    x = randn(3)
    twice = hodiff.laplacian(hodiff.laplacian(lambda x: (x * x).sum() ** 2.5))
    # Δ Δ r⁵ = 30 · 12 r
    torch.testing.assert_close(twice(x), 360 * x.norm())


def test_weighted_laplacian_matches():
    x, sigma, B = randn(4), randn(2, 4), randn(4, 4)
    f = lambda x: (x @ B @ x) * x.sum()  # noqa: E731
    H = (B + B.mT) * x.sum() + torch.outer((B + B.mT) @ x, torch.ones(4, dtype=D))
    H = H + torch.outer(torch.ones(4, dtype=D), (B + B.mT) @ x)
    torch.testing.assert_close(hodiff.laplacian(f, weights=sigma)(x), torch.trace(sigma @ H @ sigma.mT))


def test_weights_of_a_batch_may_be_the_same_at_all_points():
    x, sigma = randn(5, 3), randn(2, 3)
    W = randn(3, 3)

    def f(x):
        return torch.sin(x @ W).sum(-1)

    # Σ_r of the second derivative of Σ_j sin(x · W_j) along w_r
    expected = -(torch.sin(x @ W) * (sigma @ W).square().sum(0)).sum(-1)
    for weights in (sigma, sigma[:, None].expand(2, 5, 3)):
        torch.testing.assert_close(hodiff.laplacian(f, weights=weights, batched=True)(x), expected)
    with pytest.raises(hodiff.InputError, match=r"weights: expected \(R, 5, 3\) or \(R, 3\) float64, .* got \(2, 4\)"):
        hodiff.laplacian(f, weights=randn(2, 4), batched=True)(x)


def test_value_and_gradient_match():
    x = {"a": randn(3), "b": randn(2, 2)}
    f = lambda x: (x["a"] ** 3).sum() * x["b"].sin().sum()  # noqa: E731
    value, gradient, total = value_grad_laplacian(f)(x)
    cubes, sines = (x["a"] ** 3).sum(), x["b"].sin().sum()
    torch.testing.assert_close(value, cubes * sines)
    torch.testing.assert_close(gradient, {"a": 3 * x["a"] ** 2 * sines, "b": cubes * x["b"].cos()})
    torch.testing.assert_close(total, (6 * x["a"]).sum() * sines - cubes * sines)


def test_value_and_gradient_of_a_batch_match():
    x = randn(5, 4)
    value, gradient, total = value_grad_laplacian(lambda x: network(x)[:, 0], batched=True)(x)
    t = torch.tanh(x @ W1.mT)
    torch.testing.assert_close(value, network(x)[:, 0])
    torch.testing.assert_close(gradient, ((1 - t * t) * W2[0]) @ W1)
    torch.testing.assert_close(total, exact_laplacian(x)[:, 0])


def test_empty_batch_is_accepted():
    found = value_grad_laplacian(lambda x: x.square().sum(-1), batched=True)(torch.zeros(0, 3))
    assert [tuple(each.shape) for each in found] == [(0,), (0, 3), (0,)]


def test_argnums_selects_the_second_argument():
    a, x = randn(4), randn(4)
    found = hodiff.laplacian(lambda a, x: (a * x * x).sum() + (a**4).sum(), argnums=1)(a, x)
    torch.testing.assert_close(found, 2 * a.sum())


def test_laplacian_is_differentiable_by_parameters():
    """The gradient by the weights matches the gradient of the closed form."""
    x, W = randn(5, 4), W1.clone().requires_grad_()

    def loss(W, total):
        return total(W).square().sum()

    def series(W):
        return hodiff.laplacian(lambda x: torch.tanh(x @ W.mT) @ W2.mT, batched=True)(x)

    def closed(W):
        t = torch.tanh(x @ W.mT)
        return (-2 * t * (1 - t * t) * W.square().sum(1)) @ W2.mT

    (found,) = torch.autograd.grad(loss(W, series), W)
    (right,) = torch.autograd.grad(loss(W, closed), W)
    torch.testing.assert_close(found, right)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_laplacian_matches(backend):
    x = randn(5, 4)
    found = hodiff.laplacian(network, batched=True)
    compiled = torch.compile(lambda x: found(x), fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(x), exact_laplacian(x))


@pytest.mark.slow
def test_compiled_laplacian_of_joined_jets_matches():
    """These rules call `torch.cat`, in whose tuples dynamo finds no jets."""

    def f(x):
        return torch.prod(x, 1).sin().sum() + torch.cumprod(x, 1).cos().sum() + torch.logcumsumexp(x, 1).exp().sum()

    x = randn(2, 3)
    compiled = torch.compile(lambda x: hodiff.laplacian(f)(x), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), hodiff.hessian_matrix(f, x).trace())


@pytest.mark.slow
def test_product_that_dynamo_reverses_is_rejected():
    W, x = randn(4, 4), randn(4, 4)
    turned = hodiff.laplacian(lambda x: (x @ W).sin(), batched=True)
    compiled = torch.compile(lambda x: turned(x), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=r"write torch\.matmul\(a, b\)"):
        compiled(x)
    named = hodiff.laplacian(lambda x: torch.matmul(x, W).sin(), batched=True)
    by_name = torch.compile(lambda x: named(x), fullgraph=True, backend="eager")
    torch.testing.assert_close(by_name(x), hodiff.laplacian(lambda x: (x @ W).sin(), batched=True)(x))


def test_constant_and_linear_functions_have_zero_laplacian():
    x = randn(4)
    assert hodiff.laplacian(lambda x: torch.ones(2, dtype=D))(x).tolist() == [0.0, 0.0]
    assert hodiff.laplacian(lambda x: 3 * x)(x).tolist() == [0.0] * 4


WRONG = {
    "options": ({"argnums": True}, "laplacian: argnums: expected an int"),
    "called at once": ({"argnums": torch.ones(2)}, r"write laplacian\(f, \.\.\.\)\(x\)"),
    "chunks": ({"chunk_size": 0}, "laplacian: chunk_size: expected an int"),
    "batched": ({"batched": 1}, "laplacian: batched: expected True or False"),
}


@pytest.mark.parametrize("case", WRONG)
def test_rejects_bad_options(case):
    options, words = WRONG[case]
    with pytest.raises(hodiff.InputError, match=words):
        hodiff.laplacian(network, **options)


def test_rejects_bad_arguments():
    for f, options, x, words in (
        (network, {}, torch.ones(4, dtype=torch.int64), "argument 0: expected a real floating-point tensor"),
        (network, {}, torch.ones(4, dtype=torch.complex128), "argument 0: expected a real tensor"),
        (network, {"argnums": 1}, randn(4), "argnums: expected one of 1 positional"),
        (network, {"weights": randn(2, 3)}, randn(4), r"weights: expected \(R, 4\) float64, .* got \(2, 3\)"),
        (network, {"weights": [randn(2, 4)]}, randn(4), "weights: expected the structure"),
        (torch.sin, {"batched": True}, randn(), "with a leading dimension of points"),
    ):
        with pytest.raises(hodiff.InputError, match=words):
            hodiff.laplacian(f, **options)(x)
    with pytest.raises(hodiff.InputError, match=r"f: expected an output of shape \(\), got \(3,\)"):
        value_grad_laplacian(network)(randn(4))


@pytest.mark.parametrize(
    "derivative",
    [
        lambda f: hodiff.laplacian(f, chunk_size=1),
        lambda f: hodiff.bilaplacian(f, chunk_size=1),
        lambda f: hodiff.taylor.pure_second_derivatives(f, chunk_size=1),
    ],
)
def test_function_that_changes_between_chunks_is_rejected(derivative):
    factors = itertools.count(1)
    with pytest.raises(hodiff.InputError, match="expected the same value in each call"):
        derivative(lambda x: (x**3).sum() * next(factors))(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))


def test_works_under_another_default_device():
    x = torch.tensor([0.5, -1.0, 0.3], dtype=D)

    def f(x):
        return (x**4).sum() + (x[0] * x[1]) ** 2

    with torch.device("meta"):
        found = hodiff.bilaplacian(f)(x), hodiff.laplacian(f)(x)
    expected = torch.tensor(24 * 3 + 8.0, dtype=D), 12 * (x**2).sum() + 2 * (x[0] ** 2 + x[1] ** 2)
    torch.testing.assert_close(found, expected)
