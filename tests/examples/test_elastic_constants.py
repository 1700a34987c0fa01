"""Silicon's elastic constants: the whole example, the published numbers, and differences of energies."""

import re
import runpy
from pathlib import Path

import pytest
import torch

EXAMPLE = runpy.run_path(str(Path(__file__).resolve().parents[2] / "examples" / "elastic_constants.py"))


def test_energy_of_silicon_at_rest() -> None:
    """The potential was fitted to a cohesive energy of 4.3363 eV with the depth of 2.1682 eV, 2 for each atom."""
    side = EXAMPLE["side_at_rest"]()
    assert side == pytest.approx(5.431, abs=1e-3)
    x, cell = EXAMPLE["silicon"](side)
    energy = EXAMPLE["StillingerWeber"](x, cell)
    assert energy(x, cell).item() / 2 == pytest.approx(-2 * EXAMPLE["DEPTH"], rel=1e-5)
    # 4 neighbours of each of the 2 atoms, and 6 angles.
    assert (len(energy.center), len(energy.first)) == (8, 12)


@pytest.mark.slow
def test_whole_example(capsys: pytest.CaptureFixture[str]) -> None:
    EXAMPLE["main"]([])
    printed = capsys.readouterr().out
    rows = dict(re.findall(r"^(C\d\d(?: clamped)?) +([\d.]+)", printed, re.MULTILINE))
    for name, value in EXAMPLE["PUBLISHED"].items():
        assert float(rows[name]) == pytest.approx(value, abs=0.15)
    relaxed, clamped = map(float, re.findall(r"([\d.]+) GPa", printed))
    assert float(rows["C44"]) == pytest.approx(relaxed, rel=1e-3)
    assert float(rows["C44 clamped"]) == pytest.approx(clamped, rel=1e-3)
    assert clamped > 1.9 * relaxed


def test_neighbours_move_with_the_cell() -> None:
    """A rotated crystal has the same energy."""
    x, cell = EXAMPLE["silicon"](5.4)
    energy = EXAMPLE["StillingerWeber"](x, cell)
    turn = torch.linalg.qr(torch.randn(3, 3, dtype=x.dtype, generator=torch.Generator().manual_seed(0)))[0]
    torch.testing.assert_close(energy(x @ turn, cell @ turn), energy(x, cell))
