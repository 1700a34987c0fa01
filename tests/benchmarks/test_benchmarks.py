"""The command line of the benchmarks; contestants with wrong results are not timed."""

import importlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import scipy.optimize as so
import torch

ROOT = Path(__file__).resolve().parents[2]


def benchmarks(*arguments: str | Path) -> str:
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_list_option_prints_all_workloads(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
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
        "attention",
        "linear_losses",
        "meta",
        "minimize",
        "batched",
        "taylor",
        "taylor_sparse",
        "checks",
        "taylor_orders",
        "taylor_memory",
        "attention_precision",
        "attention_kernels",
        "loss_kernels",
        "sparse",
        "footprints",
        "sharded",
        "bfloat16",
        "standard_problems",
        "optimizers",
        "training",
    ]


@pytest.mark.slow
def test_quick_standard_problems_report_where_each_method_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    arguments = ["--quick", "--only", "standard_problems", "--save", str(tmp_path)]
    assert importlib.import_module("benchmarks.__main__").main(arguments) == 0
    assert (tmp_path / "standard_problems.md").read_text(encoding="utf-8") in capsys.readouterr().out
    parts = json.loads((tmp_path / "standard_problems.json").read_text(encoding="utf-8"))["parts"]
    ends = [run.partition(" → ")[2] for run in parts["Moré, Garbow & Hillstrom"]["rosenbrock"].values()]
    assert len(ends) == 18  # fourteen methods of SciPy, four of hodiff
    assert all(float(end) < 1e-8 for end in ends)
    regressions = parts["NIST's certified regressions"]
    assert list(regressions) == ["BoxBOD", "Chwirut1"]
    assert all(float(end.partition(": ")[2]) >= 6 for ends in regressions.values() for end in ends["trf"])


@pytest.mark.slow
def test_quick_footprints_rank_memory_as_expected(tmp_path: Path) -> None:
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


@pytest.fixture
def from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))


@pytest.mark.usefixtures("from_the_root")
def test_every_workload_has_saved_results_and_an_index_entry() -> None:
    registry = importlib.import_module("benchmarks.registry")
    index = (ROOT / "docs" / "benchmarks" / "index.md").read_text(encoding="utf-8")
    for name in [*registry.WORKLOADS, *registry.TALLIES]:
        page = (ROOT / "benchmarks" / "results" / f"{name}.md").read_text(encoding="utf-8")
        assert page.startswith(f"# {name}: ")
        saved = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))
        assert f"torch {saved['machine']['torch']}" in page
        assert f"| `python -m benchmarks --only {name}` | " in index
        assert f"(../../benchmarks/results/{name}.md) |" in index


@pytest.mark.usefixtures("from_the_root")
def test_one_core_uses_one_thread_and_restores_the_setting() -> None:
    machine = importlib.import_module("benchmarks.machine")
    threads = torch.get_num_threads()
    with machine.one_core():
        assert machine.machine()["threads"] == 1
    assert torch.get_num_threads() == threads


@pytest.mark.usefixtures("from_the_root")
def test_seconds_a_call_uses_the_given_clock() -> None:
    ticks = iter([3.0, 4.5])
    runs: list[None] = []
    assert (
        importlib.import_module("benchmarks.race").seconds_a_call(lambda: runs.append(None), 5, ticks.__next__) == 0.3
    )
    assert len(runs) == 5


@pytest.mark.usefixtures("from_the_root")
def test_minimize_autograd_contestant_has_right_derivatives() -> None:
    workload = importlib.import_module("benchmarks.workloads.minimize")
    way = workload._Autograd(lambda x: (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum())
    draw = np.random.default_rng(0)
    for x, v in draw.standard_normal((3, 2, 6)):
        value, gradient = way.value_and_gradient(x)
        np.testing.assert_allclose(value, so.rosen(x))
        np.testing.assert_allclose(gradient, so.rosen_der(x))
        np.testing.assert_allclose(way.product(x, v), so.rosen_hess_prod(x, v))
    for problem in workload.problems(True):
        assert [each.group for each in problem.contestants] == ["unit", "torch", "hodiff"]
        assert all(problem.error(each.run()) <= problem.tolerance for each in problem.contestants)


@pytest.mark.usefixtures("from_the_root")
def test_average_step_weights_add_up_to_100() -> None:
    optimizers = importlib.import_module("benchmarks.optimizers")
    for kinds in optimizers.AVERAGES.values():
        assert sum(kinds.values()) == 100
        assert set(kinds) <= set(optimizers.WAYS)
    found = dict.fromkeys(optimizers.WAYS, 1.0)
    found |= {"`KFAC`, due for curvature": 11.0, "`KFAC`, due for curvature and inverses": 101.0}
    assert optimizers.averages(found)["`KFAC`"] == pytest.approx(1 + 0.9 + 1)
    assert optimizers.averages(found)["`SOAP`"] == pytest.approx(1)
    (row,) = [line for line in optimizers.as_table({"net": found}, "a step of").splitlines() if "inverses" in line]
    assert row.split() == ["|", "`KFAC`,", "due", "for", "curvature", "and", "inverses", "|", "101.00", "|"]


@pytest.mark.slow
@pytest.mark.usefixtures("from_the_root")
def test_quick_optimizer_ratios_exceed_a_plain_gradient() -> None:
    sections = importlib.import_module("benchmarks.optimizers").sections(True)
    (one, _, found), (average, text, means), (steps, _, ratios_to_adamw), (_, _, natural), (_, _, states) = sections
    assert (one, average) == ("one step", "a step on average")
    assert steps == "a step on average, in steps of `torch.optim.AdamW`"
    (ratios,), (mean,), (in_steps,) = found.values(), means.values(), ratios_to_adamw.values()
    assert ratios["`NewtonCG`, 10 iterations"] > 5 > ratios["`torch.optim.SGD`"] > 0.5
    assert f"{mean['`KFAC`']:.2f}" in text
    assert in_steps["`KFAC`"] == mean["`KFAC`"] / ratios["`torch.optim.AdamW`"]
    assert natural["width 64"]["`PINNKFAC`"] > 1
    (bytes_each,) = states.values()
    # Two states of four bytes, and a step for each tensor.
    assert 8 < bytes_each["`torch.optim.AdamW`"] < 8.1
    assert 4 < bytes_each["`Muon`"] < 8 < bytes_each["`Shampoo`"]
