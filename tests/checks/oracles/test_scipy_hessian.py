"""SciPy's Hessian, against the closed form."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from scipy.optimize import rosen, rosen_hess

from hodiff import InputError
from hodiff.checks import scipy_hessian

POINT = torch.tensor([-0.4, 0.7, 1.1], dtype=torch.float64)


def test_matches_closed_form_within_its_error_estimate():
    estimate = scipy_hessian(lambda x: rosen(x.numpy()), POINT)
    expected = torch.from_numpy(rosen_hess(POINT.numpy()))
    difference = (estimate.matrix - expected).abs()
    assert difference.max() < 1e-7
    assert (difference <= 10 * estimate.error + 1e-9).all()


def test_points_are_evaluated_once(capsys):
    seen = []

    def f(x):
        seen.append(tuple(x.tolist()))
        return (x.sin().sum() * x.exp().sum()).tanh() + x.pow(3).prod()

    estimate = scipy_hessian(f, torch.linspace(0.1, 0.9, 5, dtype=torch.float64), progress=True)
    assert len(seen) == len(set(seen)) == estimate.evaluations
    # SciPy's own routine evaluates 729 points for each of 25 elements.
    assert estimate.evaluations < 300 * 15
    assert estimate.error.max() < 1e-7
    assert "/1500" in capsys.readouterr().err


def test_uses_no_automatic_differentiation():
    seen = []

    def f(x):
        seen.append((torch.is_grad_enabled(), x.requires_grad))
        return float(np.exp(x.detach().numpy()).sum())

    estimate = scipy_hessian(f, POINT.clone().requires_grad_())
    torch.testing.assert_close(estimate.matrix, POINT.exp().diag(), rtol=1e-6, atol=1e-7)
    assert set(seen) == {(False, False)}


def test_pytree_leaves_keep_their_order():
    x = {"b": torch.tensor([[1.0, 2.0]]), "a": torch.tensor(3.0)}
    estimate = scipy_hessian(lambda p: (p["a"] * p["b"] ** 2).sum(), x)
    # Leaves are in insertion order: b, then a.
    expected = torch.tensor([[6.0, 0.0, 2.0], [0.0, 6.0, 4.0], [2.0, 4.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(estimate.matrix, expected, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize(
    ("f", "x", "message"),
    [
        (lambda x: x.float().sum(), POINT, "f\\(x\\): expected a float64 scalar, got float32"),
        (lambda x: x, POINT, "got float64 of shape \\(3,\\)"),
        (lambda x: x.real.sum(), POINT.to(torch.complex128), "expected a real tensor, got torch.complex128"),
        (lambda x: x.sum(), torch.zeros(0), "expected at least one element"),
        (lambda x: x[0], [1.0, POINT], "x\\[0\\]: expected a real tensor, got float"),
    ],
)
def test_rejects_bad_arguments(f, x, message):
    with pytest.raises(InputError, match=message):
        scipy_hessian(f, x)


@pytest.mark.slow
def test_import_does_not_load_scipy():
    code = "import sys, hodiff.checks; sys.exit('scipy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
