"""Sella with exact Hessians: the same saddle point, from fewer gradients."""

from typing import Any

import numpy as np
import pytest
import torch
from ase import Atoms
from sella import Sella
from torch import Tensor

import hodiff.atoms.ase
from hodiff.atoms.ase import HessianCalculator

pytestmark = pytest.mark.filterwarnings("ignore")


START = 1.12 * np.array([[0, 0, 0], [1, 0.05, 0.1], [0.5, 0.87, -0.1], [1.5, 0.84, 0.25]])


def lennard_jones(positions: Tensor, cell: Tensor, atoms: Atoms) -> Tensor:
    """Four atoms, whose planar rhombus is the saddle between two tetrahedra."""
    one, other = torch.triu_indices(4, 4, 1)
    d = (positions[one] - positions[other]).square().sum(-1)
    return 4 * (d**-6 - d**-3).sum()


class Counting(HessianCalculator):
    calls = 0

    def calculate(self, *args: Any, **kwargs: Any) -> None:
        self.calls += 1
        super().calculate(*args, **kwargs)


def saddle(exact: bool) -> tuple[Atoms, int]:
    """The saddle, and the number of calls for forces."""
    atoms = Atoms("Ar4", START, calculator=Counting(lennard_jones))
    # With 0, the Hessian is computed again at each step.
    options = {"hessian_function": atoms.calc.hessian_function, "diag_every_n": 0} if exact else {}
    search = Sella(atoms, order=1, internal=False, logfile=None, **options)
    assert search.run(fmax=1e-6, steps=200)
    return atoms, atoms.calc.calls


def test_saddle_point_of_four_atoms() -> None:
    found = {exact: saddle(exact) for exact in (False, True)}
    for atoms, _ in found.values():
        assert abs(np.linalg.det(atoms.positions[1:] - atoms.positions[0])) < 1e-4
        values = np.linalg.eigvalsh(atoms.calc.hessian_function(atoms))
        assert (values < -0.1).sum() == 1
        assert (abs(values) < 1e-3).sum() == 6
    # 11 and 26 when this test was written.
    assert 1.5 * found[True][1] < found[False][1]


def test_hessian_reaches_sella() -> None:
    atoms = Atoms("Ar4", START, calculator=hodiff.atoms.ase.calculator(lennard_jones))
    search = Sella(atoms, order=1, internal=False, logfile=None, hessian_function=atoms.calc.hessian_function)
    search.pes.calculate_hessian()
    x = torch.from_numpy(atoms.positions).flatten()
    exact = torch.func.hessian(lambda x: lennard_jones(x.view(4, 3), None, None))(x)
    np.testing.assert_allclose(search.pes.H.asarray(), exact.numpy(), atol=1e-10)
