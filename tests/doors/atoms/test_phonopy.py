"""Force constants for phonopy against its own from displacements, and bands of a crystal."""

import doctest
from typing import Any

import numpy as np
import pytest
import torch
from ase import Atoms
from phonopy import Phonopy
from phonopy.structure.atoms import PhonopyAtoms
from torch import Tensor

import hodiff
import hodiff.atoms.ase
import hodiff.atoms.phonopy

SIDE = 5.0


def energy(positions: Tensor, cell: Tensor, atoms: Any) -> Tensor:
    """Argon, cut off smoothly at 5 Å."""
    shifts = torch.cartesian_prod(*[torch.arange(-1.0, 2.0)] * 3).double() @ cell
    squared = (positions[:, None, None] - positions[None, :, None] + shifts).square().sum(-1) / 3.4**2
    squared = squared[(squared > 0) & (squared < (5 / 3.4) ** 2)]
    return 0.0104 * 2 * ((squared**-6 - squared**-3) * (1 - squared / (5 / 3.4) ** 2) ** 4).sum()


def phonon() -> Phonopy:
    cell = SIDE / 2 * np.array([[0, 1, 1], [1, 0, 1], [1, 1, 0]])
    return Phonopy(PhonopyAtoms(["Ar"], cell=cell, positions=[[0, 0, 0]]), 3 * np.eye(3), primitive_matrix=np.eye(3))


def test_force_constants() -> None:
    exact, displaced = phonon(), phonon()
    constants = hodiff.atoms.phonopy.force_constants(exact, energy)
    assert constants.shape == (1, 27, 3, 3)
    displaced.generate_displacements(distance=1e-3)
    forces = []
    for each in displaced.supercells_with_displacements:
        atoms = Atoms(each.symbols, each.positions, cell=each.cell, pbc=True)
        atoms.calc = hodiff.atoms.ase.calculator(energy)
        forces.append(atoms.get_forces())
    displaced.forces = forces
    displaced.produce_force_constants(calculate_full_force_constants=False)
    scale = constants.abs().max().item()
    np.testing.assert_allclose(constants.numpy(), displaced.force_constants, atol=1e-4 * scale)
    points = [[0, 0, 0], [0.5, 0, 0.5], [0.3, 0.1, 0.2]]
    for point in points:
        one, other = (each.run_qpoints([point]).frequencies[0] for each in (exact, displaced))
        np.testing.assert_allclose(one, other, atol=1e-3)
    # Acoustic modes at the centre, and stable modes elsewhere.
    assert abs(exact.run_qpoints([points[0]]).frequencies).max() < 1e-3
    assert exact.run_qpoints([points[1]]).frequencies.min() > 0.1


def test_arguments() -> None:
    calculator = hodiff.atoms.ase.calculator(energy)
    expected = hodiff.atoms.phonopy.force_constants(phonon(), energy)
    torch.testing.assert_close(hodiff.atoms.phonopy.force_constants(phonon(), calculator), expected)
    with pytest.raises(hodiff.InputError, match=r"phonon: expected a phonopy.Phonopy, got Atoms"):
        hodiff.atoms.phonopy.force_constants(Atoms("Ar"), energy)


def test_example_of_the_docstring() -> None:
    assert doctest.testmod(hodiff.atoms.phonopy) == (0, 7)
