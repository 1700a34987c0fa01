"""Randomized traces, diagonals and norms: unbiased estimates, with the stated standard errors."""

import pytest
import torch
from drawing import seeded
from estimators.matrices import Wrapped, decaying, linspace_spectrum, symmetric

from hodiff import InputError
from hodiff.estimators import diagonal, frobenius_norm, trace

N = 150


def errors_and_standard_errors(A, repetitions, **options):
    estimates = [trace(A, generator=seeded(seed), **options) for seed in range(repetitions)]
    errors = torch.tensor([estimate.value for estimate in estimates]) - A.trace()
    return errors, torch.tensor([estimate.standard_error for estimate in estimates])


def rms(errors):
    return errors.square().mean().sqrt().item()


UNSYMMETRIC = symmetric(decaying(N)) + 0.1 * torch.triu(symmetric(linspace_spectrum(N), seed=1))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("probes", ["rademacher", "gaussian", "sphere"])
@pytest.mark.parametrize("method", ["hutchinson", "hutch++", "xtrace"])
@pytest.mark.parametrize("A", [symmetric(linspace_spectrum(N, -1)), UNSYMMETRIC], ids=["indefinite", "unsymmetric"])
def test_trace_estimates_are_unbiased(method, probes, A):
    errors, _ = errors_and_standard_errors(A, 100, method=method, products=20, probes=probes)
    assert abs(errors.mean()) < 4 * errors.std() / 10


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("method", "eigenvalues", "least"),
    [
        ("hutchinson", linspace_spectrum(N, -1), 0.9),
        ("hutchinson", decaying(N), 0.9),
        ("hutch++", linspace_spectrum(N, -1), 0.9),
        ("hutch++", decaying(N), 0.85),
        # XTrace's terms share their vectors, so that their spread is less than the error.
        ("xtrace", linspace_spectrum(N, -1), 0.75),
        ("xtrace", decaying(N), 0.75),
    ],
)
def test_standard_errors_cover_the_error(method, eigenvalues, least):
    errors, standard_errors = errors_and_standard_errors(symmetric(eigenvalues), 100, method=method, products=40)
    assert (errors.abs() < 2 * standard_errors).double().mean() >= least
    assert 0.5 < standard_errors.square().mean().sqrt() / rms(errors) < 1.5


@pytest.mark.slow
def test_errors_fall_at_the_published_rates():
    # With eigenvalues 1, 1/2, 1/3, ... Hutch++ is no better than its guaranteed rate; all methods get the same matrix.
    A = symmetric(torch.linspace(1, 2, 600, dtype=torch.float64))

    def slope(A, method):
        few, many = (rms(errors_and_standard_errors(A, 40, method=method, products=m)[0]) for m in (16, 128))
        return torch.tensor(few / many).log().item() / torch.tensor(8.0).log().item()

    assert slope(A, "hutchinson") == pytest.approx(0.5, abs=0.2)
    B = symmetric(decaying(600, 1.0))
    assert slope(B, "hutchinson") == pytest.approx(0.5, abs=0.2)
    assert slope(B, "hutch++") > 0.8


def test_xtrace_has_the_least_error_on_decaying_spectra():
    A = symmetric(decaying(N))
    by = {
        method: rms(errors_and_standard_errors(A, 40, method=method, products=40)[0])
        for method in ("hutchinson", "hutch++", "xtrace")
    }
    assert by["xtrace"] < 0.7 * by["hutch++"]
    assert by["hutch++"] < 0.1 * by["hutchinson"]
    errors, standard_errors = errors_and_standard_errors(A, 100, method="xtrace", products=40)
    assert 0.6 < rms(standard_errors) / rms(errors) < 1  # terms that share vectors underestimate the error


@pytest.mark.parametrize("probes", ["gaussian", "sphere"])
def test_probe_lengths_are_normalized(probes):
    # For a multiple of the identity, only the length of a test vector matters.
    estimate = trace(2 * torch.eye(N, dtype=torch.float64), method="xtrace", products=40, probes=probes)
    assert estimate.value == pytest.approx(2 * N, rel=1e-12)


@pytest.mark.parametrize("method", ["hutch++", "xtrace"])
def test_low_rank_trace_is_exact(method):
    A = symmetric(torch.cat([torch.tensor([3.0, -2.0, 1.0, 0.5]), torch.zeros(N - 4)]).double())
    estimate = trace(A, method=method, products=30)
    assert estimate.value == pytest.approx(2.5, abs=1e-11)
    assert estimate.standard_error < 1e-10
    assert estimate.products < 30


@pytest.mark.parametrize("method", ["hutchinson", "hutch++", "xtrace", "exact"])
def test_n_products_give_the_exact_trace(method):
    A = Wrapped(UNSYMMETRIC)
    estimate = trace(A, method=method, products=N + 10)
    assert estimate.value == pytest.approx(UNSYMMETRIC.trace().item(), rel=1e-12)
    assert (estimate.standard_error, estimate.method) == (0, "exact")
    assert A.products == estimate.products == N


@pytest.mark.parametrize("n", [1, 2, 3])
def test_tiny_operators_are_computed_exactly(n):
    A = UNSYMMETRIC[:n, :n]
    for estimate in (trace(A, products=n), trace(A, method="hutchinson", products=n)):
        assert (estimate.value, estimate.method) == (pytest.approx(A.trace().item()), "exact")
    torch.testing.assert_close(diagonal(A, products=n).value, A.diagonal())
    assert frobenius_norm(A, products=n).value == pytest.approx(A.norm().item())
    with pytest.raises(InputError, match=f"products: expected an int of {n} or more"):
        trace(A, products=n - 1)


def test_dependent_probes_are_not_taken_for_a_complete_range():
    # Two random vectors of five signs are linearly dependent with probability 1/16.
    A = symmetric(torch.linspace(1, 2, 5, dtype=torch.float64))
    for seed in range(100):
        estimate = trace(A, method="xtrace", products=4, probes="rademacher", generator=seeded(seed))
        assert estimate.products == 4
        assert estimate.standard_error > 1e-6


@pytest.mark.parametrize("method", ["hutchinson", "hutch++", "xtrace"])
def test_number_of_products_is_as_requested(method):
    assert trace(symmetric(linspace_spectrum(N)), method=method, products=36).products == 36


def test_estimate_converts_to_float():
    assert float(trace(torch.eye(3))) == 3.0


def test_zero_operator_has_zero_estimates():
    for method in ("hutchinson", "hutch++", "xtrace"):
        estimate = trace(torch.zeros(50, 50), method=method, products=10)
        assert (estimate.value, estimate.standard_error) == (0, 0)
    assert frobenius_norm(torch.zeros(50, 50), products=10).value == 0


@pytest.mark.one_in(3)
@pytest.mark.parametrize("probes", ["rademacher", "gaussian", "sphere"])
@pytest.mark.parametrize("method", ["hutchinson", "xdiag"])
def test_diagonal_estimates_are_unbiased_with_covering_errors(method, probes):
    A = UNSYMMETRIC
    estimates = [diagonal(A, method=method, products=40, probes=probes, generator=seeded(s)) for s in range(60)]
    errors = torch.stack([estimate.value for estimate in estimates]) - A.diagonal()
    standard = torch.stack([estimate.standard_error for estimate in estimates])
    bias = errors.mean(0).square().mean().sqrt() / (errors.std(0).square().mean().sqrt() / 60**0.5)
    # Ratios of Gaussian sums are unbiased to first order only.
    assert bias < (1.3 if probes == "rademacher" or method == "xdiag" else 2)
    assert (errors.abs() < 2 * standard).double().mean() > 0.85
    assert 0.6 < (standard.square().mean().sqrt() / errors.square().mean().sqrt()).item() < 1.4


def test_xdiag_has_less_error_on_decaying_spectra():
    A = symmetric(decaying(N))
    by = {
        method: rms(
            torch.stack([diagonal(A, method=method, products=40, generator=seeded(s)).value for s in range(10)])
            - A.diagonal()
        )
        for method in ("hutchinson", "xdiag")
    }
    assert by["xdiag"] < 0.1 * by["hutchinson"]


def test_xdiag_uses_the_transpose():
    low_rank = UNSYMMETRIC[:, :3] @ torch.randn(3, N, dtype=torch.float64)
    torch.testing.assert_close(diagonal(low_rank, products=20).value, low_rank.diagonal(), rtol=0, atol=1e-12)


def test_xdiag_rejects_asymmetric_operator_without_transpose():
    assert diagonal(Wrapped(symmetric(decaying(N))), products=20).products == 20
    with pytest.raises(InputError, match="diagonal: A: expected a symmetric operator"):
        diagonal(Wrapped(UNSYMMETRIC), products=20)


@pytest.mark.parametrize("method", ["hutchinson", "xdiag", "exact"])
def test_n_products_give_the_exact_diagonal(method):
    estimate = diagonal(UNSYMMETRIC, method=method, products=N)
    torch.testing.assert_close(estimate.value, UNSYMMETRIC.diagonal(), rtol=0, atol=1e-14)
    assert not estimate.standard_error.any()
    assert estimate.method == "exact"


@pytest.mark.parametrize(
    "A", [symmetric(linspace_spectrum(N, -1)), UNSYMMETRIC[:100], UNSYMMETRIC[:, :100]], ids=["square", "wide", "tall"]
)
def test_frobenius_norm_estimates_are_unbiased(A):
    estimates = [frobenius_norm(A, products=40, generator=seeded(seed)) for seed in range(100)]
    errors = torch.tensor([estimate.value for estimate in estimates]) - A.norm()
    standard = torch.tensor([estimate.standard_error for estimate in estimates])
    assert abs(errors.mean()) < 0.2 * errors.std()
    assert (errors.abs() < 2 * standard).double().mean() > 0.84
    assert 0.7 < (standard.mean() / rms(errors)).item() < 1.3
    assert frobenius_norm(A, method="exact").value == pytest.approx(A.norm().item(), rel=1e-12)


@pytest.mark.parametrize(
    ("call", "options", "message"),
    [
        (trace, {"method": "trace"}, "trace: method: expected one of 'hutchinson', 'hutch\\+\\+', 'xtrace', 'exact'"),
        (trace, {"products": 3}, "trace: products: expected an int of 4 or more, got 3"),
        (trace, {"products": 1, "method": "hutchinson"}, "trace: products: expected an int of 2"),
        (trace, {"products": 10.0}, "trace: products: expected an int"),
        (trace, {"probes": "uniform"}, "trace: probes: expected one of 'rademacher', 'gaussian', 'sphere'"),
        (diagonal, {"method": "hutch++"}, "diagonal: method: expected one of"),
        (diagonal, {"products": 2}, "diagonal: products: expected an int of 4"),
        (diagonal, {"probes": None}, "diagonal: probes: expected one of"),
        (frobenius_norm, {"method": "xtrace"}, "frobenius_norm: method: expected one of"),
        (frobenius_norm, {"products": 1}, "frobenius_norm: products: expected an int of 2"),
        (frobenius_norm, {"probes": "sign"}, "frobenius_norm: probes: expected one of"),
    ],
)
def test_rejects_bad_arguments(call, options, message):
    with pytest.raises(InputError, match=message):
        call(torch.eye(30), **options)
