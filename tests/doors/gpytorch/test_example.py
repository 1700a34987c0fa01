"""The example of hyperparameters: Newton's method, and intervals against dense formulas."""

import re
import runpy
from pathlib import Path

import pytest
import torch

import hodiff

EXAMPLE = runpy.run_path(str(Path(__file__).resolve().parents[3] / "examples" / "gaussian_process.py"))


@pytest.mark.slow
def test_newton_finds_the_maximum(capsys):
    EXAMPLE["main"](["--count", "60", "--steps", "50"])
    text = capsys.readouterr().out
    assert "of_vector at float64[4], within corrected(): ok" in text
    adam, newton = (
        [float(each) for each in re.search(rf"^{name} (.*)$", text, re.MULTILINE)[1].split()]
        for name in ("Adam", "Newton")
    )
    assert newton[0] <= adam[0]
    assert newton[1] < 1e-4 < adam[1]
    assert newton[2] < adam[2]
    for name in ("noise", "outputscale", "lengthscale"):
        middle, low, _, high = re.search(rf"^{name} +\S+ +(.*)$", text, re.MULTILINE)[1].split()
        assert float(low) < float(middle) < float(high)


def test_intervals_are_those_of_the_dense_formula():
    inputs, targets = EXAMPLE["draw_data"](20, 0)
    evidence = EXAMPLE["Evidence"](inputs, targets)
    point = EXAMPLE["by_newton"](evidence).parameters

    def formula(p):
        values = {name.rpartition("raw_")[2]: each for name, each in p.items()}
        mean = next(each for name, each in p.items() if name.endswith("constant"))
        scale, length, noise = (
            torch.nn.functional.softplus(values[name]) for name in ("outputscale", "lengthscale", "noise")
        )
        r = 5**0.5 * (inputs - inputs.T).abs() / length
        K = scale * (1 + r + r**2 / 3) * (-r).exp() + (1e-4 + noise) * torch.eye(20, dtype=torch.float64)
        residual = targets - mean
        return (residual @ torch.linalg.solve(K, residual) + torch.logdet(K)) / 2

    H = hodiff.hessian_matrix(formula, point)
    found = EXAMPLE["posterior"](evidence, point)
    deviation = (
        torch.linalg.inv(H).diagonal().sqrt()[list(point).index("process.covar_module.base_kernel.raw_lengthscale")]
    )
    middle, low, high = found["lengthscale"]
    raw = point["process.covar_module.base_kernel.raw_lengthscale"]
    for end, sign in ((low, -1), (middle, 0), (high, 1)):
        assert end == pytest.approx(torch.nn.functional.softplus(raw + sign * deviation).item(), rel=1e-5)
