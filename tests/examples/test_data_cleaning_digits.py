"""The example finds wrong labels, and its hypergradient matches a reference."""

import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from sklearn.linear_model import LogisticRegression

import hodiff


@pytest.mark.slow
def test_quick_run_finds_wrong_labels(example: ModuleType, run: Callable[..., str]) -> None:
    text = run(example.main, "--quick", "--no-progress", output="--out")
    (distance,) = re.findall(r"is (\S+) \(relative\) away from finite differences", text)
    assert float(distance) < 1e-5
    (f1,) = re.findall(r"recall [\d.]+, F1 ([\d.]+)", text)
    assert float(f1) > 0.82  # 0.667 if every label were called wrong
    accuracy = {
        name: [float(each) for each in re.findall(r"([\d.]+) %", rest)]
        for name, rest in re.findall(r"^  (\w+)(?: labels)? \(.*?\)(.*)$", text, re.MULTILINE)
    }
    assert list(accuracy) == ["all", "kept", "right", "none"]
    assert accuracy["kept"][0] > accuracy["all"][0] + 8
    assert accuracy["kept"][1] > accuracy["all"][1] + 3
    assert accuracy["right"][0] > accuracy["kept"][0]


@pytest.mark.slow
def test_wrong_hypergradient_raises(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*arguments: Any) -> Any:
        result = hodiff.meta.hypergradient(*arguments)
        result.value *= 1.001
        return result

    monkeypatch.setattr(example, "hypergradient", wrong)
    problem, _, _ = example.load(example.parse_options(["--quick"]))
    with pytest.raises(hodiff.CheckError, match="away from differences"):
        example.check(problem, seed=0)


def test_training_minimum_matches_scikit_learn(example: ModuleType) -> None:
    problem, wrong, test = example.load(example.parse_options(["--images", "100", "--validation", "50"]))
    images, labels = problem.training.images, problem.training.labels
    scores = torch.linspace(-2, 2, len(labels), dtype=torch.float64)
    found = problem.fit(scores)
    model = LogisticRegression(C=1 / (2 * len(labels) * example.PENALTY), fit_intercept=False, tol=1e-10, max_iter=5000)
    model.fit(images.numpy(), labels.numpy(), sample_weight=scores.sigmoid().numpy())
    torch.testing.assert_close(found, torch.from_numpy(model.coef_.T.copy()), rtol=0, atol=1e-4)
    assert len(test) == 1797 - 150
    assert int(wrong.sum()) == 50
