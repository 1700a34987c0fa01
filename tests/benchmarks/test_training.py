"""The benchmark of optimizers on small networks: losses fall on each task, rates are tuned, the table is correct."""

import importlib
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


def module(name: str) -> Any:
    return importlib.import_module(f"benchmarks.{name}")


@pytest.fixture(autouse=True)
def _from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))


@pytest.mark.slow
def test_quick_run_trains_with_every_optimizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    assert module("__main__").main(["--quick", "--only", "training", "--save", str(tmp_path)]) == 0
    assert torch.get_num_threads() == threads
    page = (tmp_path / "training.md").read_text(encoding="utf-8")
    assert page in capsys.readouterr().out
    assert (tmp_path / "training.png").read_bytes().startswith(b"\x89PNG")
    parts = json.loads((tmp_path / "training.json").read_text(encoding="utf-8"))["parts"]
    for task in module("training.tasks").TASKS.values():
        found, data = parts[task.title], task.load()
        torch.manual_seed(0)
        with torch.no_grad():
            untrained = task.loss(task.make()(data.inputs[:1200]), data.targets[:1200])
        names = [name for name in module("training.optimizers").OPTIMIZERS if name.strip("`") not in task.without]
        assert list(found) == names
        for name, run in found.items():
            (course,) = run["courses"]
            assert course["steps"] == sorted(set(course["steps"]))
            # No single learning rate suits every optimizer, and some optimizers take a single step.
            assert min(course["losses"]) < untrained, (task.title, name)
        begin = page.index(f"## {task.title}")
        rows = re.findall(r"^\| (`.+?`.*?) \| (0.03) \|", page[begin:].split("\n## ")[0], re.MULTILINE)
        assert [name for name, _ in rows] == names


def test_tuning_chooses_the_rate_with_the_least_loss() -> None:
    task, row = module("training.tasks").TASKS["perceptron"], module("training.optimizers").Row
    tune = module("training.courses").tune
    sgd = row(lambda model, lr: torch.optim.SGD(model.parameters(), lr))
    assert tune(task, task.load(), sgd, (1e-6, 1e-5, 0.3, 1e30), 0.05) == 0.3


def test_diverging_training_stops_early() -> None:
    task, row = module("training.tasks").TASKS["perceptron"], module("training.optimizers").Row
    sgd = row(lambda model, lr: torch.optim.SGD(model.parameters(), lr))
    course = module("training.courses").train(task, task.load(), sgd, 1e38, 0, 60.0)
    assert course.losses[-1] == math.inf
    assert course.seconds[-1] < 10
    assert json.dumps(module("training.page").as_json(course), allow_nan=False)


def test_table_shows_medians_at_the_next_evaluation() -> None:
    course, task = module("training.courses").Course, module("training.tasks").TASKS["perceptron"]
    courses = [
        course([1, 8, 20], [0.1, 0.8, 2.1], [3.0, 2.0, level], right)
        for level, right in ((0.5, 90.0), (1.0, 80.0), (math.inf, 10.0))
    ]
    *_, line = module("training.page").table(task, {"one": 0.1}, {"one": courses}, 2.0).splitlines()
    assert line == "| one | 0.1 | 1 |  | 2 | 1 | 20 | 80 |"
