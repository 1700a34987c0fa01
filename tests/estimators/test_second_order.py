"""Estimators of a Hessian, against SciPy's differences of values; estimators have no derivatives themselves.

Inside transforms they raise (`test_transforms.py`).
"""

import pytest
import torch
from drawing import draw
from second_order import assert_listed, public

from hodiff import HessianOperator, estimators
from hodiff.checks import scipy_hessian

X, B = draw(3) / 4, draw(3, seed=1)


def f(x):
    return 2 * x.square().sum() + (x.sin() * x.roll(1)).sum() + (x**4).sum() / 4


H = HessianOperator(f, X)
TRUTH = scipy_hessian(f, X, initial_step=0.1).matrix
VALUES = torch.linalg.eigvalsh(TRUTH)
EYE = torch.eye(3, dtype=torch.float64)

# An estimate from the operator, and the same quantity from SciPy's matrix.
FOUND = {
    "trace": lambda: (estimators.trace(H).value, VALUES.sum()),
    "diagonal": lambda: (estimators.diagonal(H).value, TRUTH.diag()),
    "frobenius_norm": lambda: (estimators.frobenius_norm(H).value, TRUTH.norm()),
    "eigsh": lambda: (estimators.eigsh(H, 2, which="LA").eigenvalues, VALUES[1:]),
    "sharpness": lambda: (estimators.sharpness(H, tol=1e-9).value, VALUES[-1]),
    "spectral_density": lambda: (estimators.spectral_density(H, samples=2).ritz_values, VALUES.expand(2, 3)),
    "logdet": lambda: (estimators.logdet(H).value, VALUES.log().sum()),
    "effective_dimension": lambda: (
        estimators.effective_dimension(H, 0.5).value,
        (VALUES / (VALUES + 0.5)).sum(),
    ),
    "schatten_norm": lambda: (estimators.schatten_norm(H, 3).value, VALUES.pow(3).sum() ** (1 / 3)),
    "trace_of": lambda: (estimators.trace_of(H, torch.cos).value, VALUES.cos().sum()),
    "solve": lambda: (estimators.solve(H, B, tol=1e-12).value, torch.linalg.solve(TRUTH, B)),
    "condition_number": lambda: (estimators.condition_number(H, tol=1e-9).value, VALUES[-1] / VALUES[0]),
    "jacobi_preconditioner": lambda: (estimators.jacobi_preconditioner(H), 1 / TRUTH.diag()),
    "nystrom_preconditioner": lambda: (
        estimators.nystrom_preconditioner(H, 3, 0.5)(B),
        (VALUES[0] + 0.5) * torch.linalg.solve(TRUTH + 0.5 * EYE, B),
    ),
}
RESULTS = "a result"
WITHOUT = dict.fromkeys(
    [
        *("ConditionNumber", "DiagonalEstimate", "Eigenpairs", "Estimate"),
        *("NystromPreconditioner", "Sharpness", "Solution", "SpectralDensity"),
    ],
    RESULTS,
) | {"Checkpoint": "an option"}


def test_every_public_name_has_a_row():
    assert_listed(public(estimators) - set(FOUND), [], WITHOUT)
    assert set(FOUND) <= public(estimators)


@pytest.mark.parametrize("name", FOUND)
def test_estimates_match_scipy(name):
    found, expected = FOUND[name]()
    torch.testing.assert_close(torch.as_tensor(found, dtype=torch.float64), expected, rtol=1e-6, atol=1e-6)
