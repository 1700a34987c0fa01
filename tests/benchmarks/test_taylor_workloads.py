"""The benchmarks of Taylor mode: references, targets, and detection of wrong results."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import hodiff
from benchmarks.__main__ import main
from benchmarks.problems import Problem, measure
from benchmarks.race import Contestant
from benchmarks.report import peer_rows, target_table
from benchmarks.targets import Target, judged
from benchmarks.workloads import (
    taylor,
    taylor_dimensions,
    taylor_memory,
    taylor_orders,
    taylor_sparse,
    wavefunction,
)


def problem(first: float, *, targets: tuple[Target, ...] = ()) -> Problem:
    """Return a problem whose two contestants return numbers; the right one is 1."""
    contestants = [
        Contestant("first", "hodiff", lambda: first),
        Contestant("second", "torch", lambda: sum(range(10**4))),
    ]
    return Problem(
        "name", "title", contestants, lambda found: abs(found - 1) if found < 9 else 0.0, 0.1, targets=targets
    )


def test_targets_are_judged_by_their_bounds() -> None:
    most, least = Target("a", "b", 0.5), Target("a", "b", 2, at_least=True)
    assert [str(most), str(least)] == ["a / b ≤ 0.5", "a / b ≥ 2"]
    assert [judged(most, each).met for each in (0.4, 0.5, 0.6, None)] == [True, True, False, False]
    assert [judged(least, each).met for each in (1.9, 2.0, 2.1, None)] == [False, True, True, False]
    lines = target_table([judged(most, 0.4), judged(least, None)]).splitlines()
    assert [line.split() for line in lines[2:]] == [
        ["|", *["a", "/", "b", "≤", "0.5"], "|", "0.4", "|", "met", "|"],
        ["|", *["a", "/", "b", "≥", "2"], "|", "wrong", "|", "missed", "|"],
    ]


def test_targets_are_ratios_of_times() -> None:
    targets = (Target("first", "second", 0.5), Target("second", "first", 0.5))
    result = measure(problem(1.0, targets=targets), 3)
    one, other = result.verdicts
    assert one.ratio is not None
    assert other.ratio is not None
    assert one.met
    assert not other.met
    assert one.ratio < 0.5 < other.ratio
    assert result.to_json()["verdicts"][0]["target"] == "first / second ≤ 0.5"


def test_wrong_first_contestant_is_not_timed() -> None:
    result = measure(problem(2.0, targets=(Target("first", "second", 0.5),)), 3)
    assert result.wrong() == ["first"]
    assert [row.gradients for row in result.rows] == [None, None]
    assert result.rows[1].milliseconds is not None
    assert [(each.ratio, each.met) for each in result.verdicts] == [(None, False)]


@pytest.mark.parametrize("workload", [taylor, taylor_sparse])
def test_quick_contestants_agree_with_the_reference(workload: Any) -> None:
    for each in workload.problems(True):
        assert "hodiff" in {contestant.group for contestant in each.contestants}
        for contestant in each.contestants:
            found = contestant.run()
            assert each.error(found) <= each.tolerance, (each.name, contestant.name)
            assert each.error(found * (1 + 3 * each.tolerance)) > each.tolerance, (each.name, contestant.name)


def test_full_problem_targets_name_its_contestants() -> None:
    net = taylor.network((5, 8, 1), torch.float32)
    found = taylor.laplacian_problem(net, 2, torch.float32, full=True)
    names = {each.name for each in found.contestants}
    assert len(found.targets) == 3
    assert all({each.over, each.under} <= names for each in found.targets)


def test_wavefunction_is_symmetric_in_electrons_of_one_spin() -> None:
    weights = wavefunction.as_tensors(wavefunction.parameters(4), torch.float64)
    x = wavefunction.positions(3, 4).double()
    value = wavefunction.log_psi(weights, x)
    torch.testing.assert_close(wavefunction.log_psi(weights, x[:, [1, 0, 2, 3]]), value)
    assert (wavefunction.log_psi(weights, x + 0.1) - value).abs().min() > 1e-3


def test_exact_orders_match_closed_form_of_tanh() -> None:
    net = nn.Sequential(nn.Linear(1, 1), nn.Tanh(), nn.Linear(1, 1)).double()
    (a, b), (c, d) = ((layer.weight.item(), layer.bias.item()) for layer in (net[0], net[2]))
    y = math.tanh(0.3 * a + b)
    rate = 1 - y * y
    closed = [c * y + d, c * a * rate, -2 * c * a**2 * y * rate, 2 * c * a**3 * rate * (3 * y * y - 1)]
    found = taylor_orders.exact(net, torch.tensor([0.3], dtype=torch.float64), torch.ones(1, dtype=torch.float64), 3)
    assert [float(each) for each in found] == pytest.approx(closed, rel=1e-14)


@pytest.mark.slow
def test_quick_orders_are_right_and_a_figure_is_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quick", "--only", "taylor_orders", "--save", str(tmp_path)]) == 0
    page = (tmp_path / "taylor_orders.md").read_text(encoding="utf-8")
    assert page in capsys.readouterr().out
    (found,) = json.loads((tmp_path / "taylor_orders.json").read_text(encoding="utf-8"))["parts"].values()
    assert set(found["series"]) == {"1", "2", "3", "4"}
    assert max(found["errors"].values()) < 1e-12
    assert (tmp_path / "taylor-orders.png").read_bytes().startswith(b"\x89PNG")


def test_nested_forward_mode_matches_exact_orders() -> None:
    net = taylor.network((3, 4, 1), torch.float64)
    x, v = torch.randn(2, 3, dtype=torch.float64)
    truth = taylor_orders.exact(net, x, v, 4)
    for order in (1, 4):
        assert taylor_orders.nested(net, x, v, order).item() == pytest.approx(float(truth[order]), rel=1e-11)


@pytest.mark.slow
def test_keeping_the_parameter_graph_takes_more_memory() -> None:
    kept, forgotten = (taylor_memory.peaks((5, 64, 64, 1), each) for each in taylor_memory.KINDS.values())
    assert all(kept[way] > forgotten[way] > 0 for way in kept)


def test_chunk_steps_grow_until_the_memory_budget() -> None:
    def steps(*mebibytes: float) -> list[dict[str, Any]]:
        return [{"seconds": 1e-3, "mebibytes": each} for each in mebibytes]

    most = taylor_dimensions.MEBIBYTES
    assert taylor_dimensions.fits([])
    assert taylor_dimensions.fits(steps(most))
    assert taylor_dimensions.fits(steps(most / 5, most / 2.5))
    assert not taylor_dimensions.fits(steps(most / 20, most / 2))
    assert not taylor_dimensions.fits([*steps(1.0), {"seconds": 1.0, "mebibytes": 1.0}])


def test_full_dense_and_estimated_laplacians_agree_in_many_dimensions() -> None:
    found = {name: taylor_dimensions.measured(200, way) for name, way in taylor_dimensions.WAYS.items()}
    full, dense, estimate = found.values()
    net = taylor.network((200, 128, 128, 1), torch.float32)
    x = torch.randn(taylor_dimensions.POINTS, 200, generator=torch.Generator().manual_seed(1)) / 200**0.5
    expected = taylor.by_hand(net.double(), x.double())[0].item()
    assert full["value"] == pytest.approx(expected, rel=1e-4)
    assert dense["value"] == pytest.approx(expected, rel=1e-4)
    assert 0 < abs(estimate["value"] - expected) < 5 * estimate["standard error"]
    # The product of two independent draws estimates the square without bias, so the draws must differ.
    first, second, _ = taylor_dimensions.by_the_estimate(net.float(), x, torch.Generator().manual_seed(0))
    assert not torch.equal(first, second)


def test_folx_rows_of_peers_are_added_to_both_workloads(tmp_path: Path) -> None:
    row = {"name": "folx", "group": "peer", "milliseconds": 2.0, "gradients": 0.5, "of_fastest_torch": 3.0}
    names = ["laplacian-1-float32", "sparse-nodes"]
    content = {"taylor": {name: {"rows": [row, {**row, "group": "hodiff"}]} for name in names}}
    (tmp_path / "peers.json").write_text(json.dumps(content), encoding="utf-8")
    for workload, name in zip(("taylor", "taylor_sparse"), names, strict=True):
        (found,) = peer_rows(tmp_path, workload, name)
        assert (found.name, found.gradients, found.of_fastest_torch) == ("folx †", 0.5, None)


def test_laplacian_node_by_node_matches_the_whole_hessian() -> None:
    f, x = taylor_sparse.on_nodes(3, 2)
    f, x = f.double(), x.double()
    whole = torch.stack([torch.func.hessian(f)(each).reshape(12, 12).trace() for each in x])
    torch.testing.assert_close(taylor_sparse.node_by_node(f, x), whole)
    torch.testing.assert_close(hodiff.laplacian(f, batched=True)(x), whole)
