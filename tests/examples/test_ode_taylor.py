"""Differential equations by Taylor series: convergence orders, the two right-hand sides, and a shorter example."""

import math
import re
import runpy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp

EXAMPLE = runpy.run_path(str(Path(__file__).resolve().parents[2] / "examples" / "ode_taylor.py"))


def test_kepler_ellipse_matches_scipy() -> None:
    start = EXAMPLE["at_perihelion"](0.5)
    torch.testing.assert_close(EXAMPLE["on_the_ellipse"](0.5, 0.0), start)
    found = solve_ivp(EXAMPLE["kepler_of_numpy"], (0, 2), start, method="DOP853", rtol=1e-12, atol=1e-12).y[:, -1]
    np.testing.assert_allclose(EXAMPLE["on_the_ellipse"](0.5, 2.0), found, atol=1e-10)


def test_torch_and_numpy_right_hand_sides_agree() -> None:
    for torchs, numpys, size in (("kepler", "kepler_of_numpy", 4), ("van_der_pol", "van_der_pol_of_numpy", 2)):
        y = torch.linspace(0.3, 1.2, size, dtype=torch.float64)
        np.testing.assert_allclose(EXAMPLE[torchs](0, y), EXAMPLE[numpys](0, y.tolist()), rtol=1e-14)


@pytest.mark.slow
def test_convergence_slopes_match_the_orders() -> None:
    problem = EXAMPLE["problems"](0.25)[0]
    for order, counts in ((2, (32, 64)), (4, (16, 32)), (8, (4, 8))):
        errors = EXAMPLE["errors_by_step"](problem, order, counts)
        assert EXAMPLE["slope"](counts, errors) == pytest.approx(order, rel=0.15)
    assert EXAMPLE["slope"]((2, 4, 8), [1e-3, 1e-3 / 8, 1e-14]) == pytest.approx(3)


@pytest.mark.slow
def test_quick_run_errors_follow_the_tolerance(run: Callable[..., str]) -> None:
    text = run(EXAMPLE["main"], "--quick")
    number = r"([\d.e+-]+)"
    rows = re.findall(rf"^(Kepler|Van der Pol) +{number} +{number} +{number} +([\d,]+) +([\d,]+)", text, re.MULTILINE)
    assert len(rows) == 6
    for _, tolerance, ours, theirs, evaluations, _ in rows:
        assert float(ours) < 100 * float(tolerance)
        assert float(theirs) < 100 * float(tolerance)
        assert 0 < int(evaluations.replace(",", "")) < 1000
    assert "50 ellipses" in text
    assert math.isfinite(float(re.findall(r"error (\S+)\)", text)[0]))
