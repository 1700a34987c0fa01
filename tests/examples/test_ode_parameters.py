"""Rates of a differential equation: the table, the integrator, and errors against SciPy without derivatives."""

import re
import runpy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.optimize import curve_fit

import hodiff

EXAMPLE = runpy.run_path(str(Path(__file__).resolve().parents[2] / "examples" / "ode_parameters.py"))


@pytest.mark.slow
def test_printed_errors_match_the_spread(run: Callable[..., str]) -> None:
    text = run(EXAMPLE["main"], "--repeats", "15")
    assert "gradcheck passes, gradgradcheck passes" in text
    rows = re.findall(r"^(\w+) +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+) +(-?[\d.]+)$", text, re.MULTILINE)
    assert [name for name, *_ in rows] == list(EXAMPLE["TRUTH"])
    for _, *numbers in rows:
        truth, found, error, spread, off = map(float, numbers)
        assert off == pytest.approx((found - truth) / error, abs=0.2)
        assert abs(off) < 3
        assert 0.5 < spread / error < 1.6
    noises = re.findall(r"noise ([\d.]+)", text)
    assert float(noises[0]) == float(noises[1]) == pytest.approx(0.05, abs=0.01)


def test_integrator_error_is_below_the_noise() -> None:
    found = EXAMPLE["integrate"](EXAMPLE["tensors"](EXAMPLE["TRUTH"]))
    assert (found - EXAMPLE["exact"](EXAMPLE["TRUTH"])).abs().max() < 1e-3


@pytest.mark.slow
def test_covariance_matches_scipy() -> None:
    """`curve_fit` computes its own Jacobian of SciPy's solution, by differences."""
    generator = torch.Generator().manual_seed(1)
    numbers = EXAMPLE["exact"](EXAMPLE["TRUTH"])
    counted = numbers + 0.05 * torch.randn(numbers.shape, generator=generator, dtype=torch.float64)
    start = EXAMPLE["tensors"](EXAMPLE["TRUTH"])
    found = hodiff.optimize.least_squares(EXAMPLE["residuals"], start, counted)

    def model(_: np.ndarray, *rates: float) -> np.ndarray:
        return EXAMPLE["exact"](dict(zip(EXAMPLE["TRUTH"], rates, strict=True))).flatten().numpy()

    best, C = curve_fit(model, np.zeros(counted.numel()), counted.flatten().numpy(), p0=[*EXAMPLE["TRUTH"].values()])
    np.testing.assert_allclose([rate.item() for rate in found.x.values()], best, rtol=1e-3)
    np.testing.assert_allclose(EXAMPLE["covariance"](found.fun, found.jac), C, rtol=2e-2, atol=1e-3 * C.max())
