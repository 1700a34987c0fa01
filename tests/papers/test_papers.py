"""Tests of every reproduction on a small problem: the saved files, and the paper's main claims in the numbers."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAPERS = sorted(path.parent.name for path in (ROOT / "papers").glob("*/reproduce.py"))

Quick = Callable[[str], Any]


@pytest.mark.papers
@pytest.mark.parametrize("paper", PAPERS)
def test_quick_run_saves_claims_and_a_small_figure(quick: Quick, paper: str) -> None:
    found = quick(paper)
    assert found["paper"] == paper
    assert found["quick"]
    assert found["machine"]["cpu"]
    assert found["figure"].startswith(b"\x89PNG")
    assert len(found["figure"]) < 100_000
    for claim in found["claims"]:
        assert claim["verdict"] in ("reproduced", "partly", "not", "ours")
        assert claim["measured"] in found["stdout"]


@pytest.mark.papers
def test_pearlmutter_exact_products_beat_every_difference_step(quick: Quick) -> None:
    found = quick("pearlmutter-1994")["data"]
    for dtype, rounding in (("float64", 1e-14), ("float32", 1e-5)):
        errors = found["errors"][dtype]
        assert 0 < max(errors["exact"].values()) < rounding
        one_sided, central = errors["one-sided differences"], errors["central differences"]
        assert min(one_sided) > 30 * max(errors["exact"].values())
        assert min(central) < min(one_sided)
        for curve in (one_sided, central):
            # For A V, truncation error dominates at large steps and rounding error at small steps.
            assert curve[0] > 100 * min(curve) < curve[-1]
    (costs,) = found["costs"].values()
    # Multiplications per image, counted by hand for layers of 64 x 32 and 32 x 10. A gradient multiplies forward, for
    # the weights, and back through all layers but the first. R{} has two such products for each, but one where the
    # input takes part.
    gradient, applied = 2 * 64 * 32 + 3 * 32 * 10, 2 * 64 * 32 + 6 * 32 * 10
    assert costs["at a linearized point"]["operations"] == pytest.approx(applied / gradient, rel=1e-5)
    assert costs["reverse-over-reverse"]["operations"] == pytest.approx(1 + applied / gradient, rel=1e-5)


@pytest.mark.papers
def test_dagreou_costs_are_a_few_gradients(quick: Quick) -> None:
    found = quick("dagreou-2024")["data"]["costs"]
    for families in found.values():
        for costs in (each for family in families.values() for each in family.values()):
            assert costs["time"] > 0  # the time depends on the load of the machine
            assert 1 < costs["memory"] < 8
            assert 2 < costs["operations"] <= 3.01
        assert all(each["relative error"] < 1e-4 for each in families["hodiff"].values())
    torch_func = found["transformer"]["torch.func"]
    assert (
        torch_func["reverse-over-forward"]["relative error"]
        > 1e-3
        > torch_func["forward-over-reverse"]["relative error"]
    )


@pytest.mark.papers
def test_ghorbani_outliers_appear_without_batch_norm(quick: Quick) -> None:
    found = quick("ghorbani-2019")["data"]
    plain, normed = found["training"]["without batch norm"], found["training"]["with batch norm"]
    assert plain[-1]["loss"] < plain[0]["loss"] / 4
    assert normed[-1]["loss"] < normed[0]["loss"] / 4
    assert plain[-1]["ratio"] > 3 * plain[0]["ratio"]
    assert plain[-1]["ratio"] > 2 * normed[-1]["ratio"]
    assert found["exact"]["L1 distance"] < 0.1
    assert found["exact"]["largest, estimated"] == pytest.approx(found["exact"]["largest, exact"], rel=1e-5)


@pytest.mark.papers
def test_epperly_methods_rank_as_published(quick: Quick) -> None:
    found = quick("epperly-2024")["data"]
    last = {name: {method: curve[-1] for method, curve in curves.items()} for name, curves in found["errors"].items()}
    assert last["exp"]["xtrace"] < last["exp"]["hutchinson"] / 1e4
    assert last["exp"]["xtrace"] < last["exp"]["hutch++"] / 10
    assert last["step"]["xtrace"] < last["step"]["hutch++"] / 10
    assert last["poly"]["xtrace"] < last["poly"]["hutchinson"] / 10
    assert 0.3 < last["flat"]["xtrace"] / last["flat"]["hutchinson"] < 3
    assert last["Hessian"]["xtrace"] < last["Hessian"]["hutchinson"]


@pytest.mark.papers
def test_cohen_sharpness_settles_at_the_edge(quick: Quick) -> None:
    found = quick("cohen-2021")["data"]
    ((rate, run),) = found.items()
    scaled = [value * float(rate) / 2 for value in run["sharpness"]]
    assert scaled[0] < 0.9
    assert all(0.95 < value < 1.25 for value in scaled[-10:])
    assert run["loss"][-1] < run["loss"][0] / 4
    assert any(later > earlier for earlier, later in zip(run["loss"], run["loss"][1:], strict=False))


@pytest.mark.papers
def test_griewank_tensors_take_as_many_series_as_published(quick: Quick) -> None:
    results = quick("griewank-2000-mixed")
    found = results["data"]
    assert all(0 < error < 1e-12 for error in found["errors"].values())
    # By hand: along 3 lines there are 5 multiplications and the value's, against 15 pairs of monomials in two
    # variables.
    assert found["products"]["2"]["2"] == pytest.approx(16 / 15, rel=1e-5)  # results are saved with six digits
    assert found["lines of parts"] == {"5": [4, 4], "20": [4, 4]}
    for by_order in found["times"].values():
        for by_size in by_order.values():
            assert all(each["apart"] < 1e-9 and each["forward"] > 0 for each in by_size.values())
    verdicts = [claim["verdict"] for claim in results["claims"]]
    assert verdicts[:3] == ["reproduced"] * 3
    assert verdicts[4] == "reproduced"


def test_full_runs_reject_parallel_jobs() -> None:
    command = [sys.executable, "-m", "papers", "--jobs", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--quick" in done.stderr
