"""Tests of operators by random directions: unbiased estimates, and standard errors that match the true errors."""

import resource

import pytest
import torch
from drawing import normals
from mpmath_series import D

import hodiff
from hodiff.taylor import RandomisedEstimate, divergence

GENERATOR = torch.Generator().manual_seed(0)

randn = normals(GENERATOR)

N = 5
K, A, X = randn(N) / 2, randn(N, N), randn(N)
REPEATS = 2000


def wave(x):
    return torch.sin(x @ K) + (x**4).sum(-1) / 24


def field(x):
    return torch.sin(x @ A.mT)


W = randn(4, N)


def assert_same(found, value, error):
    torch.testing.assert_close((found.value, found.standard_error), (value, error))


SECOND = -torch.outer(K, K) * torch.sin(X @ K) + torch.diag(X**2 / 2)
# Operator, function, options, and the exact value.
CASES = {
    "laplacian": (hodiff.laplacian, wave, {}, torch.trace(SECOND)),
    "weighted": (
        hodiff.laplacian,
        wave,
        {"weights": W[:, None].expand(-1, REPEATS, -1)},
        torch.trace(W @ SECOND @ W.mT),
    ),
    "divergence": (divergence, field, {}, (torch.cos(A @ X) * A.diagonal()).sum()),
    "bilaplacian": (hodiff.bilaplacian, lambda x: x.square().sum(-1) ** 2, {}, 8 * N * (N + 2)),
}
PAIRS = [
    (case, kind)
    for case in CASES
    for kind in ("rademacher", "gaussian", "coordinates")
    if case != "bilaplacian" or kind == "gaussian"
]


@pytest.mark.parametrize(("case", "kind"), PAIRS)
def test_estimates_are_unbiased_with_right_standard_error(case, kind):
    """Repeated points give independent estimates."""
    operator, f, options, right = CASES[case]
    generator = torch.Generator().manual_seed(1)
    found = operator(f, batched=True, randomised=kind, samples=3, generator=generator, **options)(X.expand(REPEATS, N))
    assert isinstance(found, RandomisedEstimate)
    assert found.value.shape == found.standard_error.shape == (REPEATS,)
    assert found.value.std() > 0
    assert (found.value.mean() - right).abs() < 5 * found.value.std() / REPEATS**0.5
    # Squared standard errors are unbiased, but fourth powers of normal numbers have a large variance.
    tolerance = 0.35 if case == "bilaplacian" else 0.15
    torch.testing.assert_close(found.standard_error.square().mean(), found.value.var(), rtol=tolerance, atol=0)


def test_weights_may_differ_per_point():
    x, weights = randn(3, N), randn(4, 3, N)
    exact = hodiff.laplacian(wave, batched=True, weights=weights)(x)
    every = hodiff.laplacian(wave, batched=True, weights=weights, randomised="coordinates", samples=4)(x)
    assert_same(every, exact, torch.zeros(3, dtype=D))
    drawn = hodiff.laplacian(wave, batched=True, weights=weights, randomised="gaussian", samples=4000)(x)
    assert ((drawn.value - exact).abs() < 5 * drawn.standard_error).all()


@pytest.mark.parametrize("case", ["laplacian", "weighted", "divergence"])
@pytest.mark.parametrize("samples", [N, 100])
def test_all_coordinates_give_the_exact_value(case, samples):
    operator, f, options, right = CASES[case]
    options = {"weights": W} if options else {}
    found = operator(f, randomised="coordinates", samples=samples, **options)(X)
    assert_same(found, right, torch.zeros((), dtype=D))


def test_rademacher_is_exact_for_diagonal_hessians():
    separable = lambda x: (x**4).sum() / 24  # noqa: E731
    found = hodiff.laplacian(separable, randomised="rademacher", samples=2)(X)
    torch.testing.assert_close(found.value, (X**2 / 2).sum())
    assert found.standard_error < 1e-14
    assert hodiff.laplacian(separable, randomised="gaussian", samples=2)(X).standard_error > 0.01


def test_one_sample_has_nan_standard_error():
    found = hodiff.laplacian(wave, randomised="gaussian", samples=1)(X)
    assert found.value.isfinite()
    assert found.standard_error.isnan()
    only = hodiff.laplacian(lambda x: (x**3).sum(), randomised="coordinates", samples=1)(X[:1])
    assert_same(only, 6 * X[0], torch.zeros((), dtype=D))


def test_draws_depend_on_the_generator_only():
    def by(generator, **options):
        return hodiff.laplacian(wave, randomised="gaussian", generator=generator, **options)

    seeded = lambda: torch.Generator().manual_seed(7)  # noqa: E731
    first = by(seeded())(X)
    assert_same(by(seeded())(X), first.value, first.standard_error)
    assert_same(by(seeded(), chunk_size=3)(X), first.value, first.standard_error)
    one = by(seeded())
    assert one(X).value != one(X).value
    state = torch.get_rng_state()
    by(seeded())(X)
    assert torch.equal(torch.get_rng_state(), state)
    # Without a generator, torch's global one draws.
    torch.manual_seed(7)
    assert_same(by(None)(X), first.value, first.standard_error)


def test_points_have_their_own_directions():
    points = X.expand(3, N)
    for kind in ("rademacher", "gaussian", "coordinates"):
        values = hodiff.laplacian(wave, batched=True, randomised=kind, samples=2)(points.contiguous()).value
        assert len(set(values.tolist())) > 1
    found = torch.func.vmap(hodiff.laplacian(wave, randomised="gaussian"), randomness="different")(points)
    assert len(set(found.value.tolist())) == 3
    same = torch.func.vmap(hodiff.laplacian(wave, randomised="gaussian"), randomness="same")(points)
    assert len(set(same.value.tolist())) == 1


@pytest.mark.parametrize("operator", [hodiff.laplacian, hodiff.bilaplacian, divergence])
def test_pytrees_match(operator):
    x = {"a": randn(2), "b": randn(2, 2).float()}
    kind = "gaussian" if operator is hodiff.bilaplacian else "coordinates"
    f = lambda x: (x["a"] ** 4).sum() / 24 + x["b"].double().square().sum() ** 2  # noqa: E731
    if operator is divergence:
        f = lambda x: {"a": x["a"] ** 2, "b": x["b"].sin() * x["b"].sum()}  # noqa: E731
    right = operator(f)(x)
    found = operator(f, randomised=kind, samples=6 if kind == "coordinates" else 20000, generator=GENERATOR)(x)
    if kind == "coordinates":
        assert found.standard_error == 0
        torch.testing.assert_close(found.value, right)
    assert (found.value - right).abs() <= 5 * found.standard_error + 1e-5


def test_several_outputs_match():
    f = lambda x: (field(x), {"u": wave(x)})  # noqa: E731
    found = hodiff.laplacian(f, randomised="rademacher", samples=4000, generator=GENERATOR)(X)
    exact = hodiff.laplacian(f)(X)
    for value, error, right in zip(
        (found.value[0], found.value[1]["u"]),
        (found.standard_error[0], found.standard_error[1]["u"]),
        (exact[0], exact[1]["u"]),
        strict=True,
    ):
        assert value.shape == error.shape == right.shape
        assert ((value - right).abs() < 5 * error).all()


def test_parameter_gradient_uses_the_same_directions():
    """The parameter gradient equals the gradient of the same directions' derivatives, vᵀ∇²f v = -(k·v)² sin(k·x)."""
    k = K.clone().requires_grad_()
    seeded = lambda: torch.Generator().manual_seed(2)  # noqa: E731
    estimate = hodiff.laplacian(lambda x: torch.sin(x @ k), randomised="gaussian", samples=6, generator=seeded())(X)
    assert not estimate.standard_error.requires_grad
    v = torch.randn(6, N, generator=seeded(), dtype=D)
    closed = (-((v @ k) ** 2) * torch.sin(X @ k)).mean()
    torch.testing.assert_close(estimate.value, closed)
    torch.testing.assert_close(torch.autograd.grad(estimate.value, k), torch.autograd.grad(closed, k))

    def loss(k):
        return hodiff.laplacian(lambda x: torch.sin(x @ k), randomised="gaussian", samples=6, generator=seeded())(X)

    slope = torch.func.grad(lambda k: loss(k).value)(K)
    torch.testing.assert_close(slope, torch.autograd.grad((-((v @ k) ** 2) * torch.sin(X @ k)).mean(), k)[0])
    torch.testing.assert_close(torch.func.jvp(lambda k: loss(k).value, (K,), (K,))[1], slope @ K)


def test_standard_error_matches_the_terms():
    seeded = torch.Generator().manual_seed(2)
    found = hodiff.laplacian(wave, randomised="gaussian", samples=6, generator=seeded)(X)
    v = torch.randn(6, N, generator=torch.Generator().manual_seed(2), dtype=D)
    terms = torch.einsum("si,ij,sj->s", v, SECOND, v)
    assert_same(found, terms.mean(), terms.std() / 6**0.5)


@pytest.mark.slow
def test_compiled_estimate_matches():
    found = hodiff.laplacian(lambda x: torch.sin(torch.matmul(x, K)), batched=True, randomised="rademacher", samples=8)
    compiled = torch.compile(lambda x: found(x), fullgraph=True, backend="eager")
    points = X.expand(500, N).contiguous()
    torch.manual_seed(0)
    estimate = compiled(points)
    right = -K.square().sum() * torch.sin(X @ K)
    assert (estimate.value.mean() - right).abs() < 5 * estimate.value.std() / 500**0.5


def test_float32_is_kept():
    found = hodiff.laplacian(lambda x: (x**4).sum() / 24, randomised="rademacher", samples=2)(X.float())
    assert found.value.dtype == found.standard_error.dtype == torch.float32
    torch.testing.assert_close(found.value.double(), (X**2 / 2).sum(), rtol=1e-5, atol=1e-6)


def test_rejects_bad_options():
    for call, words in (
        (lambda: hodiff.laplacian(wave, randomised="signs"), "laplacian: randomised: expected one of 'rademacher', "),
        (lambda: hodiff.laplacian(wave, randomised="gaussian", samples=0), "laplacian: samples: expected an int of 1"),
        (lambda: divergence(field, randomised="gaussian", generator=1), "divergence: generator: expected a torch.Gen"),
        (
            lambda: hodiff.bilaplacian(wave, randomised="rademacher"),
            "bilaplacian: .* 'gaussian', got 'rademacher': the",
        ),
        (lambda: hodiff.bilaplacian(wave, randomised="coordinates"), "got 'coordinates': fourth derivatives along"),
    ):
        with pytest.raises(hodiff.InputError, match=words):
            call()


@pytest.mark.slow
def test_million_dimensions_take_linear_memory():
    """Memory does not grow with the square of the dimension; it is little more than the directions at two orders."""
    n, samples = 1_000_000, 16
    x = torch.rand(n, generator=GENERATOR, dtype=D).float()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    for operator, f, right, kind in (
        (hodiff.laplacian, lambda x: x.square().mean() + x.mean() ** 2, 2 + 2 / n, "rademacher"),
        (hodiff.laplacian, lambda x: x.square().mean(), 2.0, "coordinates"),
        (divergence, lambda x: x * 2 / n, 2.0, "gaussian"),
        (hodiff.bilaplacian, lambda x: x.square().mean() ** 2, 8 + 16 / n, "gaussian"),
    ):
        found = operator(f, randomised=kind, samples=samples, generator=GENERATOR)(x)
        assert (found.value - right).abs() < 5 * found.standard_error + 1e-5 * right
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    assert grown < 8 * samples * n * x.itemsize
