"""Spectral densities and traces of matrix functions computed from them, against eigenvalues."""

import math
import warnings

import numpy as np
import pytest
import torch
from drawing import seeded
from estimators.matrices import Wrapped, decaying, linspace_spectrum, symmetric
from scipy.integrate import trapezoid

from hodiff import HodiffWarning, InputError
from hodiff.estimators import effective_dimension, frobenius_norm, logdet, schatten_norm, spectral_density
from hodiff.estimators.adapted_operators import view_of
from hodiff.estimators.probes import draw
from hodiff.estimators.spectra.quadrature import _padded

N = 300
EIGENVALUES = linspace_spectrum(N, -0.5, 1.5)
A = symmetric(EIGENVALUES)


@pytest.mark.parametrize("probes", ["rademacher", "gaussian", "sphere"])
def test_quadrature_moments_are_exact_up_to_twice_the_steps(probes):
    steps = 4
    density = spectral_density(A, samples=3, steps=steps, probes=probes, generator=seeded(5))
    vectors = draw(view_of(A, "test"), probes, 3, seeded(5))
    for k in range(2 * steps):
        exact = (vectors * (torch.linalg.matrix_power(A, k) @ vectors)).sum(0) / vectors.square().sum(0)
        torch.testing.assert_close((density.weights * density.ritz_values**k).sum(1), exact, rtol=1e-11, atol=1e-13)
        assert density.moment(k).value == pytest.approx(exact.mean().item(), rel=1e-10)
    k = 2 * steps
    exact = (vectors * (torch.linalg.matrix_power(A, k) @ vectors)).sum(0) / vectors.square().sum(0)
    assert (density.weights * density.ritz_values**k).sum(1)[0].item() != pytest.approx(exact[0].item(), rel=1e-6)


def test_short_rules_have_a_tenth_fewer_steps():
    density = spectral_density(A, samples=2, steps=20)
    assert density.ritz_values.shape == density.weights.shape == (2, 20)
    assert density.short_ritz_values.shape == (2, 18)
    torch.testing.assert_close(density.weights.sum(1), torch.ones(2, dtype=torch.float64))
    assert density.products == 40


def test_all_steps_find_all_eigenvalues():
    few = symmetric(linspace_spectrum(30, -1))
    density = spectral_density(few, samples=2, steps=100)
    torch.testing.assert_close(density.ritz_values, linspace_spectrum(30, -1).expand(2, 30), rtol=0, atol=1e-10)


def test_converged_eigenvalues_appear_once():
    # Without re-orthogonalization the largest eigenvalue would appear again and again.
    spikes = symmetric(torch.cat([torch.tensor([100.0, 50.0]), linspace_spectrum(N - 2, 0, 1)]))
    density = spectral_density(spikes, samples=2, steps=80)
    assert ((density.ritz_values > 99).sum(1) == 1).all()
    assert ((density.ritz_values - 50).abs() < 1).sum(1).tolist() == [1, 1]


def test_few_distinct_eigenvalues_give_few_nodes():
    levels = symmetric(torch.cat([torch.full((100,), -1.0), torch.zeros(150), torch.full((50,), 3.0)]).double())
    density = spectral_density(levels, samples=5, steps=40)
    heavy = density.weights > 1e-12
    assert heavy.sum(1).tolist() == [3] * 5
    torch.testing.assert_close(
        density.ritz_values[heavy].reshape(5, 3),
        torch.tensor([[-1.0, 0.0, 3.0]] * 5, dtype=torch.float64),
        rtol=0,
        atol=1e-10,
    )
    share = density.weights[heavy].reshape(5, 3).mean(0)
    torch.testing.assert_close(share, torch.tensor([1 / 3, 1 / 2, 1 / 6], dtype=torch.float64), rtol=0, atol=0.1)
    assert density.products == 15


def test_chains_of_different_lengths_are_padded_with_zero_weights():
    density = spectral_density(torch.zeros(20, 20), samples=2, steps=5)
    assert density.ritz_values.tolist() == [[0.0], [0.0]]
    assert (density.mean, density.products) == (0, 2)
    nodes, weights = _padded([(np.array([1.0, 2.0]), np.array([0.5, 0.5])), (np.array([3.0]), np.array([1.0]))])
    assert nodes.tolist() == [[1, 2], [3, 3]]
    assert weights.tolist() == [[0.5, 0.5], [1, 0]]


@pytest.mark.slow
def test_moment_error_is_as_large_as_stated():
    estimates = [spectral_density(A, samples=8, steps=10, generator=seeded(seed)).moment(2) for seed in range(60)]
    errors = torch.tensor([estimate.value for estimate in estimates]) - (EIGENVALUES**2).mean()
    standard = torch.tensor([estimate.standard_error for estimate in estimates])
    assert abs(errors.mean()) < 4 * errors.std() / 60**0.5
    assert (errors.abs() < 2 * standard).double().mean() > 0.85


@pytest.mark.one_in(2)
@pytest.mark.parametrize("log", [False, True])
def test_density_integrates_to_one_and_matches_the_eigenvalue_histogram(log):
    density = spectral_density(A, samples=20, steps=60)
    line = torch.linspace(-18, 3, 4001, dtype=torch.float64)
    assert trapezoid(density.density(line, sigma=0.1, log=log), line) == pytest.approx(1, abs=1e-6)
    grid = torch.linspace(-0.5, 1.5, 9, dtype=torch.float64) if not log else torch.linspace(-3, 0.3, 9).double()
    exact = spectral_density(A, method="exact").density(grid, sigma=0.1, log=log)
    points = EIGENVALUES.abs().log10() if log else EIGENVALUES
    by_hand = torch.exp(-(((grid[:, None] - points) / 0.1) ** 2) / 2).mean(1) / (0.1 * math.sqrt(2 * math.pi))
    torch.testing.assert_close(exact, by_hand, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(density.density(grid, sigma=0.1, log=log), by_hand, rtol=0.3, atol=0.1)


def test_log_density_of_a_singular_operator():
    density = spectral_density(symmetric(torch.cat([torch.zeros(50), torch.ones(50)]).double()), method="exact")
    assert density.density(torch.tensor([0.0]), sigma=0.1, log=True).item() == pytest.approx(
        0.5 / (0.1 * 2.5066), rel=1e-3
    )
    assert density.nodes(log=True).min() > -20


@pytest.mark.parametrize("sigma", [0.0, -1.0, math.inf, "wide"])
def test_density_rejects_bad_sigma(sigma):
    with pytest.raises(InputError, match="density: sigma: expected a positive finite number"):
        spectral_density(torch.eye(3), method="exact").density(torch.zeros(1), sigma=sigma)


def test_default_sigma_gives_finite_densities():
    for matrix in (torch.eye(30), torch.zeros(30, 30), A):
        assert torch.isfinite(spectral_density(matrix, samples=2, steps=9).density(torch.linspace(-1, 2, 5))).all()


def test_integrate_matches_eigenvalues():
    density = spectral_density(symmetric(EIGENVALUES), method="exact")
    estimate = density.integrate(torch.exp)
    assert estimate.value == pytest.approx(EIGENVALUES.exp().mean().item(), rel=1e-12)
    assert (estimate.standard_error, estimate.truncation, estimate.products) == (0, 0, N)
    with pytest.raises(InputError, match="integrate: function: expected a tensor of shape"):
        density.integrate(lambda values: values.sum())
    with pytest.raises(InputError, match="moment: order: expected an int of 0 or more"):
        density.moment(-1)


SPD = symmetric(torch.logspace(0, -2, N, dtype=torch.float64))


@pytest.mark.slow
@pytest.mark.one_in(4)
@pytest.mark.parametrize("function", ["logdet", "effective_dimension"])
@pytest.mark.parametrize("damping", [0.0, 0.1])
def test_logdet_and_effective_dimension_match_numpy(function, damping):
    if function == "logdet":
        run = lambda **options: logdet(SPD, damping=damping, **options)  # noqa: E731
        exact = np.linalg.slogdet((SPD + damping * torch.eye(N, dtype=torch.float64)).numpy())[1]
    else:
        run = lambda **options: effective_dimension(SPD, damping or 0.01, **options)  # noqa: E731
        shifted = (SPD + (damping or 0.01) * torch.eye(N, dtype=torch.float64)).numpy()
        exact = np.trace(np.linalg.solve(shifted, SPD.numpy()))
    dense = run(method="exact")
    assert dense.value == pytest.approx(exact, rel=1e-9)
    assert (dense.standard_error, dense.method, dense.products) == (0, "exact", N)
    assert run(samples=10, steps=30).method == "exact"
    estimates = [run(samples=6, steps=40, generator=seeded(seed)) for seed in range(40)]
    assert estimates[0].method == "slq"
    errors = torch.tensor([estimate.value for estimate in estimates]) - exact
    standard = torch.tensor([estimate.standard_error for estimate in estimates])
    assert abs(errors.mean()) < 4 * errors.std() / 40**0.5
    assert (errors.abs() < 2.5 * standard).double().mean() > 0.85
    assert estimates[0].truncation < 1e-2 * estimates[0].standard_error


def test_too_few_steps_warn():
    hard = symmetric(torch.logspace(0, -12, 400, dtype=torch.float64))
    with pytest.warns(HodiffWarning, match="logdet: 5 Lanczos steps are too few"):
        estimate = logdet(hard, samples=20, steps=5)
    assert estimate.truncation > estimate.standard_error
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        logdet(hard, damping=1e-2, samples=10, steps=30)


def test_logdet_rejects_indefinite_operator():
    message = (
        r"logdet: A: expected a positive definite operator, .* reach -0\.\d+ .*damping=0; raise damping above 0\.5"
    )
    with pytest.raises(InputError, match=message):
        logdet(A, method="exact")
    with pytest.raises(InputError, match="logdet: A: expected a positive definite operator"):
        logdet(A, samples=2, steps=30)
    assert math.isfinite(logdet(A, damping=0.6, samples=2, steps=30).value)
    with pytest.raises(InputError, match="effective_dimension: A: expected a positive semi-definite operator"):
        effective_dimension(A, 0.1, samples=2, steps=30)


def test_effective_dimension_of_semidefinite_operator_matches():
    rank = symmetric(torch.cat([torch.zeros(250), torch.ones(50)]).double())
    assert effective_dimension(rank, 1e-3, method="exact").value == pytest.approx(50 / 1.001, rel=1e-6)
    assert effective_dimension(rank, 1e-3, samples=20, steps=10).value == pytest.approx(50, rel=0.15)


@pytest.mark.parametrize("call", [spectral_density, logdet])
def test_rejects_asymmetric_operator(call):
    skewed = symmetric(decaying(N)) + 0.01 * torch.triu(torch.ones(N, N), 1)
    with pytest.raises(InputError, match=f"{call.__name__}: A: expected a symmetric operator"):
        call(skewed, samples=2, steps=20)
    with pytest.raises(InputError, match=f"{call.__name__}: A: expected a symmetric operator"):
        call(skewed, method="exact")


@pytest.mark.parametrize("p", [1.0, 1.5, 4.0, 200.0])
def test_schatten_norms_match_singular_values(p):
    expected = torch.linalg.vector_norm(torch.linalg.svdvals(A), p).item()
    assert schatten_norm(A, p, method="exact").value == pytest.approx(expected, rel=1e-12)
    estimates = [schatten_norm(A, p, samples=5, steps=40, generator=seeded(seed)) for seed in range(30)]
    errors = torch.tensor([estimate.value for estimate in estimates]) - expected
    standard = torch.tensor([estimate.standard_error for estimate in estimates])
    assert {estimate.products for estimate in estimates} == {200}
    # For p = 200, the norm is the largest eigenvalue up to a few percent.
    assert (errors.abs() < 3 * standard + 1e-9 * expected).double().mean() > 0.85
    assert errors.square().mean().sqrt() < 0.1 * expected


def test_schatten_norm_of_order_two_is_the_frobenius_norm():
    assert schatten_norm(A, 2, method="exact").value == pytest.approx(A.norm().item(), rel=1e-12)
    found, other = schatten_norm(A, 2, samples=10, steps=20), frobenius_norm(A, products=200)
    assert abs(found.value - other.value) < 3 * (found.standard_error + other.standard_error)


@pytest.mark.parametrize("size", [1e-120, 1e120])
def test_schatten_norm_whose_powers_overflow(size):
    exact, found = (schatten_norm(size * A, 3, samples=5, steps=20, method=method) for method in ("exact", "slq"))
    assert exact.value == pytest.approx(size * torch.linalg.svdvals(A).pow(3).sum().item() ** (1 / 3), rel=1e-9)
    assert abs(found.value - exact.value) < 4 * found.standard_error


def test_schatten_norm_of_zero_is_zero():
    estimate = schatten_norm(torch.zeros(300, 300), 3, samples=2, steps=5)
    assert (estimate.value, estimate.standard_error) == (0, 0)


def test_schatten_norm_warns_if_steps_are_too_few():
    with pytest.warns(HodiffWarning, match="schatten_norm: 2 Lanczos steps are too few"):
        schatten_norm(symmetric(linspace_spectrum(N, -1)), samples=20, steps=2)


def test_rejects_random_operator():
    class Noisy(Wrapped):
        def __matmul__(self, v):
            return super().__matmul__(v) * (1 + 0.1 * torch.rand(v.shape[0], 1, dtype=v.dtype))

    with pytest.raises(InputError, match="does it use dropout, or a new batch in each call"):
        spectral_density(Noisy(A), samples=2, steps=20)


def test_chunk_size_does_not_change_results():
    densities = [spectral_density(A, samples=5, steps=10, chunk_size=size) for size in (1, 2, None)]
    for density in densities[1:]:
        torch.testing.assert_close(density.ritz_values, densities[0].ritz_values, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("call", "options", "message"),
    [
        (spectral_density, {"samples": 1}, "spectral_density: samples: expected an int of 2 or more"),
        (spectral_density, {"steps": 0}, "spectral_density: steps: expected an int of 1 or more"),
        (spectral_density, {"probes": "signs"}, "spectral_density: probes: expected one of"),
        (spectral_density, {"method": "kpm"}, "spectral_density: method: expected one of 'slq', 'exact'"),
        (logdet, {"damping": -1.0}, "logdet: damping: expected a nonnegative finite number, got -1.0"),
        (logdet, {"method": "cholesky"}, "logdet: method: expected one of"),
        (logdet, {"samples": 0}, "logdet: samples: expected"),
        (logdet, {"steps": True}, "logdet: steps: expected"),
        (schatten_norm, {"p": 0.5}, "schatten_norm: p: expected 1 or more, got 0.5"),
        (effective_dimension, {"damping": 0.0}, "effective_dimension: damping: expected a positive finite number"),
    ],
)
def test_rejects_bad_arguments(call, options, message):
    with pytest.raises(InputError, match=message):
        call(torch.eye(30), **options)
