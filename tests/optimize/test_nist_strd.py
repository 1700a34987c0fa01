"""Tests of `least_squares` against NIST's certified regressions, computed in 128 bits from analytic derivatives."""

import pytest
import torch
from optimize.problems.nist_strd import REGRESSIONS
from optimize.problems.settings import LEAST_SQUARES

from hodiff import jacobian
from hodiff.optimize import least_squares

QUICK = ("lower", 2, "trf")
# From the far start, these may not converge with any exact Jacobian; the benchmark includes them.
ASTRAY = {("MGH10", 1, "lm"), ("MGH09", 1, "dogbox"), ("MGH17", 1, "dogbox"), ("Rat43", 1, "dogbox")}
CASES = [
    pytest.param(name, number, method, marks=[] if (set_.level, number, method) == QUICK else pytest.mark.slow)
    for name, set_ in REGRESSIONS.items()
    for number in (2, 1)
    for method in LEAST_SQUARES
    if (name, number, method) not in ASTRAY
]


def test_all_regressions_are_present():
    levels = [each.level for each in REGRESSIONS.values()]
    assert [levels.count(each) for each in ("lower", "average", "higher")] == [8, 11, 8]


@pytest.mark.parametrize("name", REGRESSIONS)
def test_certified_residuals_and_deviations_match(name):
    """The data and models are NIST's; the deviations also test the Jacobian."""
    set_ = REGRESSIONS[name]
    residuals = set_.residuals(set_.certified)
    assert set_.is_solved_by(residuals.square().sum().item())
    slopes = jacobian(set_.residuals)(set_.certified) * set_.certified
    m, n = slopes.shape
    # Use a QR decomposition of scaled columns: the normal equations of MGH17 and Bennett5 lose all digits.
    inverse = torch.linalg.inv(torch.linalg.qr(slopes / slopes.norm(dim=0)).R)
    relative = inverse.norm(dim=1) / slopes.norm(dim=0) * (set_.squares / (m - n)) ** 0.5
    torch.testing.assert_close(relative * set_.certified.abs(), set_.deviations, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("name", "number", "method"), CASES)
def test_certified_parameters_are_found(name, number, method):
    set_ = REGRESSIONS[name]
    start = set_.starts[number - 1]
    found = least_squares(set_.residuals, start, method=method, **LEAST_SQUARES[method])
    assert set_.is_solved_by(2 * found.cost)
    assert set_.digits(found.x) >= 6
