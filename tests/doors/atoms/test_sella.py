"""Sella with exact Hessians: the same saddle point, from fewer gradients."""

import re
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
from ase import Atoms
from sella import Sella

import hodiff.atoms.ase

pytestmark = pytest.mark.filterwarnings("ignore")


EXAMPLE = runpy.run_path(str(Path(__file__).resolve().parents[3] / "examples" / "transition_state.py"))


def test_example(capsys: pytest.CaptureFixture[str]) -> None:
    """Both ways find the same saddle points, from fewer forces with exact Hessians."""
    EXAMPLE["main"]()
    rows = re.findall(r"^(\d) .*? (\d+) +(\d+) +(\d+) +(-[\d.]+) +(\d)$", capsys.readouterr().out, re.MULTILINE)
    assert len(rows) == 6
    for start in range(0, 6, 3):
        _, steps, forces, hessians, energy, negative = zip(*rows[start : start + 3], strict=True)
        assert len(set(energy)) == 1
        assert set(negative) == {"1"}
        assert int(forces[2]) < 0.5 * int(forces[0])
        assert int(steps[2]) < int(steps[1]) < int(steps[0])
        assert int(hessians[0]) == 0 < int(hessians[1]) < int(hessians[2])


def test_saddle_is_a_planar_rhombus() -> None:
    atoms, _ = EXAMPLE["search"](EXAMPLE["RHOMBUS"], {"diag_every_n": 0})
    assert abs(np.linalg.det(atoms.positions[1:] - atoms.positions[0])) < 1e-4
    values = np.linalg.eigvalsh(atoms.calc.hessian_function(atoms))
    assert (values < -0.1).sum() == 1
    assert (abs(values) < 1e-3).sum() == 6


def test_hessian_reaches_sella() -> None:
    atoms = Atoms("Ar4", EXAMPLE["RHOMBUS"], calculator=hodiff.atoms.ase.calculator(EXAMPLE["lennard_jones"]))
    search = Sella(atoms, order=1, internal=False, logfile=None, hessian_function=atoms.calc.hessian_function)
    search.pes.calculate_hessian()
    x = torch.from_numpy(atoms.positions).flatten()
    exact = torch.func.hessian(lambda x: EXAMPLE["lennard_jones"](x.view(4, 3), None, None))(x)
    np.testing.assert_allclose(search.pes.H.asarray(), exact.numpy(), atol=1e-10)
