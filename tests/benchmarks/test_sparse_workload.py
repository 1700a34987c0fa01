"""The benchmarks of sparse Hessians: potentials in closed form, targets, and detection of wrong results."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import hodiff
from benchmarks.__main__ import main
from benchmarks.workloads import sparse
from benchmarks.workloads.potentials import Atoms, angular_energy, diamond, lennard_jones, stillinger_weber
from hodiff.checks.torch_warnings import silence_torch_warnings


def test_silicon_energy_is_minus_one_per_bond() -> None:
    """The energy is -1 a bond at the bond length of least energy and tetrahedral angles (cosine -1/3)."""
    found = stillinger_weber(60)
    chosen = found.energy.keywords
    x = diamond(60)
    assert found.energy(x).item() == pytest.approx(-chosen["pairs"].shape[1], rel=1e-9)
    bent = torch.tensor([0, 0, 0, 1.2, 0, 0, 0, 1.3, 0], dtype=torch.float64)
    pairs, triples = torch.zeros(2, 0, dtype=torch.long), torch.tensor([[0], [1], [2]])
    fades = torch.tensor(1.2 / (1.2 - 1.8) + 1.2 / (1.3 - 1.8), dtype=torch.float64).exp()
    assert angular_energy(bent, pairs, triples).item() == pytest.approx((21 / 9 * fades).item(), rel=1e-12)


@pytest.mark.parametrize("make", [lennard_jones, stillinger_weber])
def test_potentials_are_invariant_under_shifts_and_rotations(make: Callable[[int], Atoms]) -> None:
    found = make(30)
    turn = torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)).Q
    moved = (found.x.view(-1, 3) @ turn + 0.7).view(-1)
    torch.testing.assert_close(found.energy(moved), found.energy(found.x))
    assert (hodiff.hessian_matrix(found.energy, found.x) != 0).double().mean() < 0.9


def test_wrong_hessians_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse, "WAYS", {"": {}})
    x = torch.rand(8, dtype=torch.float64)
    assert max(sparse.stages(sparse.rosenbrock, x, dense=True, rounds=1).errors.values()) < 1e-7
    monkeypatch.setattr(hodiff, "hessian_matrix", lambda f, x: 2 * torch.func.hessian(f)(x))
    with pytest.raises(hodiff.CheckError, match=r"dense, hodiff\.hessian_matrix"):
        sparse.stages(sparse.rosenbrock, x, dense=True, rounds=1)


def test_targets_compare_with_their_bounds() -> None:
    assert [sparse.most("a", each, 2).met for each in (1.9, 2.1)] == [True, False]
    assert [sparse.least("a", each, 2).met for each in (1.9, 2.1)] == [False, True]


@pytest.mark.slow
def test_quick_run_prints_and_saves_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with silence_torch_warnings():
        assert main(["--quick", "--only", "sparse", "--save", str(tmp_path)]) == 0
    assert (tmp_path / "sparse.md").read_text(encoding="utf-8") in capsys.readouterr().out
    parts = json.loads((tmp_path / "sparse.json").read_text(encoding="utf-8"))["parts"]
    assert parts["Chained Rosenbrock function"]["colors"] == {"star": 3, "acyclic": 2}
    assert parts["Minimal surface"]["residuals"][-1] < 1e-8
    assert (tmp_path / "sparse.png").read_bytes().startswith(b"\x89PNG")
