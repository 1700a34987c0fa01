"""The command line of the benchmarks, and that it times only what is right."""

import importlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def benchmarks(*arguments: str | Path) -> str:
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_list_names_the_workloads(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    assert importlib.import_module("benchmarks.__main__").main(["--list"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert listed == [
        "hvp",
        "operators",
        "pointwise",
        "dense",
        "jacobian",
        "overhead",
        "corrections",
        "authoring",
        "functions",
        "meta",
        "minimize",
        "batched",
        "checks",
        "footprints",
        "standard_problems",
        "training",
    ]


@pytest.mark.slow
def test_quick_standard_problems_say_where_each_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    arguments = ["--quick", "--only", "standard_problems", "--save", str(tmp_path)]
    assert importlib.import_module("benchmarks.__main__").main(arguments) == 0
    assert (tmp_path / "standard_problems.md").read_text(encoding="utf-8") in capsys.readouterr().out
    parts = json.loads((tmp_path / "standard_problems.json").read_text(encoding="utf-8"))["parts"]
    ends = [run.partition(" → ")[2] for run in parts["Moré, Garbow & Hillstrom"]["rosenbrock"].values()]
    assert len(ends) == 18  # fourteen of SciPy, four of our own
    assert all(float(end) < 1e-8 for end in ends)
    regressions = parts["NIST's certified regressions"]
    assert list(regressions) == ["BoxBOD", "Chwirut1"]
    assert all(float(end.partition(": ")[2]) >= 6 for ends in regressions.values() for end in ends["trf"])


@pytest.mark.slow
def test_quick_footprints_are_those_of_their_ways(tmp_path: Path) -> None:
    benchmarks("--quick", "--only", "footprints", "--save", tmp_path)
    parts = json.loads((tmp_path / "footprints.json").read_text(encoding="utf-8"))["parts"]
    (products,) = parts["Products"].values()
    assert products["Hessian, later"] < products["Hessian, first"]
    recorded, checkpointed, mixed, first_order = parts["Inner loops"].values()
    assert first_order < mixed < recorded / 2
    assert checkpointed < recorded
    assert min(parts["Routes"].values()) > 1


@pytest.mark.slow
def test_quick_overhead_saves_finite_ratios(tmp_path: Path) -> None:
    printed = benchmarks("--quick", "--only", "overhead", "--save", tmp_path)
    saved = json.loads((tmp_path / "overhead.json").read_text(encoding="utf-8"))
    assert saved["machine"]["torch"]
    (problem,) = saved["problems"]
    assert [row["group"] for row in problem["rows"]].count("unit") == 1
    for row in problem["rows"]:
        assert row["name"] in printed
        assert math.isfinite(row["gradients"])
        assert row["gradients"] > 0
        assert row["milliseconds"] > 0
        assert row["group"] == "unit" or row["relative_error"] <= problem["tolerance"]
    assert printed.startswith((tmp_path / "overhead.md").read_text(encoding="utf-8")[:200])
