"""Traces of functions of a symmetric operator, against dense eigenvalues."""

import warnings

import pytest
import torch
from drawing import seeded
from estimators.matrices import linspace_spectrum, symmetric

from hodiff.errors import HodiffWarning, InputError
from hodiff.estimators import effective_dimension, logdet, trace_of

N = 400
# Eigenvalues of both signs
A = symmetric(linspace_spectrum(N, -1))
VALUES = torch.linalg.eigvalsh(A)

FUNCTIONS = {
    "exp": torch.exp,
    "square": torch.square,
    "positive part": lambda x: x.clamp(min=0),
    "Gaussian": lambda x: (-4 * x.square()).exp(),
    "float32": lambda x: x.float().sin(),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_estimates_match_dense_eigenvalues_within_their_errors(name):
    f = FUNCTIONS[name]
    expected = f(VALUES).sum().item()
    assert trace_of(A, f, method="exact").value == pytest.approx(expected, rel=1e-6, abs=1e-4)
    estimates = [trace_of(A, f, samples=6, steps=30, generator=seeded(seed)) for seed in range(25)]
    assert {each.products for each in estimates} == {180}
    errors = torch.tensor([each.value for each in estimates]) - expected
    allowed = torch.tensor([each.standard_error + each.truncation for each in estimates])
    assert (errors.abs() < 3 * allowed).double().mean() > 0.85
    # The standard errors are no larger than the errors that they estimate.
    spread = torch.tensor([each.standard_error for each in estimates]).square().mean().sqrt()
    assert spread < 3 * errors.square().mean().sqrt() + 1e-9


@pytest.mark.filterwarnings("ignore:trace_of. 2 Lanczos steps:hodiff.HodiffWarning")
def test_quadrature_is_exact_for_polynomials_of_low_degree():
    """Each rule integrates x^(2 s - 1) exactly, so a probe gives z^T A^3 z after two steps."""
    estimate = trace_of(A, lambda x: x**3, samples=3, steps=2, generator=seeded(1))
    more = trace_of(A, lambda x: x**3, samples=3, steps=20, generator=seeded(1))
    assert estimate.value == pytest.approx(more.value, rel=1e-10)
    assert estimate.products == 6


def test_identity_has_no_error_beyond_rounding():
    estimate = trace_of(torch.eye(N, dtype=torch.float64), torch.exp, samples=2, steps=5)
    assert estimate.value == pytest.approx(N * torch.e, rel=1e-12)
    assert estimate.standard_error < 1e-9


def test_agrees_with_the_special_cases():
    B = symmetric(linspace_spectrum(N, 0.5))
    options = {"samples": 4, "steps": 20}
    assert trace_of(B, torch.log, **options) == logdet(B, **options)
    assert trace_of(B, lambda x: x / (x + 0.3), **options) == effective_dimension(B, 0.3, **options)


def test_warns_if_steps_are_too_few():
    with pytest.warns(HodiffWarning, match="trace_of: 3 Lanczos steps are too few"):
        trace_of(A, lambda x: 1 / (x.square() + 1e-6), samples=20, steps=3)


@pytest.mark.parametrize(
    ("f", "message"),
    [
        (2.0, r"trace_of: f: expected a function of the eigenvalues, such as torch.exp, got float 2.0"),
        (lambda x: x.sum(), r"trace_of: f: expected a real tensor of shape \(2, 5\) of its argument, got .*\(\)"),
        (lambda x: x + 1j, "trace_of: f: expected a real tensor .* got torch.complex128"),
        (lambda x: 1.0, "trace_of: f: expected a real tensor .* got float"),
        (torch.log, "trace_of: f: expected finite values, got nan at .* shift A or f"),
    ],
)
def test_rejects_bad_functions(f, message):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(InputError, match=message):
            trace_of(A, f, samples=2, steps=5)
