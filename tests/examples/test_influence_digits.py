"""Influence of digits with fewer steps, and its formula against a dense Hessian."""

import re
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import hodiff

EXAMPLE = runpy.run_path(str(Path(__file__).resolve().parents[2] / "examples" / "influence_digits.py"))


@pytest.mark.slow
def test_quick_run_predicts_retraining_and_finds_wrong_labels(run: Callable[..., str]) -> None:
    text = run(EXAMPLE["main"], "--quick", "--no-progress")
    compared = re.findall(r"correlation ([\d.]+), actual change ([\d.]+) times", text)
    assert len(compared) == 2
    for correlation, slope in compared:
        assert float(correlation) > 0.99
        assert 0.9 < float(slope) < 1.3
    found = {name: shares(text, name) for name in ("by influence on their own loss", "by loss", "at random")}
    assert found["by influence on their own loss"][1] >= 80
    assert found["by influence on their own loss"][2] >= 95
    assert found["at random"][1] < 30
    helped = re.findall(r"image \d+, \+", next(line for line in text.splitlines() if "helped most" in line))
    harmed = re.findall(r"image \d+, -", next(line for line in text.splitlines() if "harmed most" in line))
    assert len(helped) == len(harmed) == 4


def shares(text: str, name: str) -> list[float]:
    row = next(line for line in text.splitlines() if line.startswith(f"  {name}"))
    return [float(share) for share in re.findall(r"([\d.]+)%", row)]


def test_influences_match_closed_form(capsys: pytest.CaptureFixture[str]) -> None:
    penalty = 0.05
    training, test = EXAMPLE["load_images"](60, 0)
    w = EXAMPLE["fit"](training, penalty)
    tests = test[torch.tensor([3, 8])]
    predicted = EXAMPLE["influences"](w, training, tests, penalty)
    # Hessian and gradients of softmax regression: the bias comes last, and classes vary fastest.
    n = len(training)
    p = EXAMPLE["logits"](w, training.images).softmax(dim=1)
    features = torch.cat([training.images, torch.ones(n, 1, dtype=torch.float64)], dim=1)
    H = penalty * torch.eye(650, dtype=torch.float64)
    for x, q in zip(features, p, strict=True):
        H += torch.kron(torch.outer(x, x), torch.diag(q) - torch.outer(q, q)) / n

    def gradients(data) -> torch.Tensor:
        inputs = torch.cat([data.images, torch.ones(len(data), 1, dtype=torch.float64)], dim=1)
        residual = EXAMPLE["logits"](w, data.images).softmax(dim=1) - torch.eye(10, dtype=torch.float64)[data.labels]
        return torch.einsum("ni,nc->icn", inputs, residual).flatten(0, 1)

    inverse = torch.linalg.inv(H)
    expected = gradients(training).T @ inverse @ gradients(tests) / n
    torch.testing.assert_close(predicted, expected, rtol=1e-4, atol=1e-7)
    own = EXAMPLE["self_influences"](w, training, penalty)
    columns = gradients(training)
    torch.testing.assert_close(own, (columns * (inverse @ columns)).sum(dim=0) / n, rtol=1e-6, atol=1e-9)
    assert "2 systems of 650 equations" in capsys.readouterr().out


def test_unrelated_predictions_raise(capsys: pytest.CaptureFixture[str]) -> None:
    actual = torch.linspace(-1, 1, 20, dtype=torch.float64)
    EXAMPLE["compare"](2 * actual, actual, "half")
    assert "correlation 1.0000, actual change 0.500 times" in capsys.readouterr().out
    with pytest.raises(hodiff.CheckError, match="correlate by"):
        EXAMPLE["compare"](actual.square(), actual, "unrelated")
