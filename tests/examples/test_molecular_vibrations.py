"""Water: frequencies by the closed form of Wilson's GF method, published frequencies, and the whole example."""

import re
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch

import hodiff

EXAMPLE = runpy.run_path(str(Path(__file__).resolve().parents[2] / "examples" / "molecular_vibrations.py"))
# (1 mdyn/Å / u)^(1/2) / (2 π c) in 1/cm.
UNIT = 1302.79


@pytest.mark.parametrize("name", ["H2O", "D2O"])
def test_frequencies_by_internal_coordinates(name: str) -> None:
    oxygen, hydrogen, _ = EXAMPLE["MASSES"][name]
    m, M, r = 1 / hydrogen, 1 / oxygen, EXAMPLE["BOND"]
    cos, sin = (f(np.deg2rad(EXAMPLE["ANGLE"])) for f in (np.cos, np.sin))
    G = np.array([
        [m + M, M * cos, -M * sin / r],
        [M * cos, m + M, -M * sin / r],
        [-M * sin / r, -M * sin / r, 2 * (m + M - M * cos) / r**2],
    ])
    both, bend, mixed = EXAMPLE["STRETCHES"], EXAMPLE["BEND"], EXAMPLE["STRETCH_BEND"]
    F = np.array([[EXAMPLE["STRETCH"], both, mixed], [both, EXAMPLE["STRETCH"], mixed], [mixed, mixed, bend]])
    expected = UNIT * np.sqrt(np.sort(np.linalg.eigvals(G @ F).real))
    masses = torch.tensor(EXAMPLE["MASSES"][name])
    found = hodiff.atoms.vibrations(EXAMPLE["energy"], EXAMPLE["water"](), masses)
    np.testing.assert_allclose(found.wavenumbers[-3:].numpy(), expected, rtol=1e-5)
    np.testing.assert_allclose(expected, EXAMPLE["PUBLISHED"][name], atol=0.5)


@pytest.mark.slow
def test_whole_example(capsys: pytest.CaptureFixture[str]) -> None:
    EXAMPLE["main"]([])
    printed = capsys.readouterr().out
    rows = re.findall(r"^([HD]2O) +([\d.]+) +([\d.]+) +[\d.]+$", printed, re.MULTILINE)
    assert len(rows) == 6
    for _, found, published in rows:
        assert float(found) == pytest.approx(float(published), abs=0.5)
    assert "gradgradcheck passes" in printed
