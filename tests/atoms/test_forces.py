"""Forces and stress against closed forms, and the check of a model's own forces."""

import numpy as np
import pytest
import torch
from atoms.crystals import cluster, crystal_energy, face_centred, lennard_jones, slopes

import hodiff


def test_forces_of_central_forces() -> None:
    x = cluster(6)
    d = x.numpy()[:, None] - x.numpy()[None]
    r = np.linalg.norm(d, axis=-1) + np.eye(6)
    first = (1 - np.eye(6)) * slopes(r)[0] / r
    found = hodiff.atoms.forces(lennard_jones, x)
    np.testing.assert_allclose(found.numpy(), -(first[..., None] * d).sum(1), rtol=1e-12)


def test_stress_is_the_slope_of_the_energy_by_strain() -> None:
    x, cell = face_centred(1.5)
    x = torch.cat([x, x + 0.4])
    forces, stress = hodiff.atoms.forces(crystal_energy, x, cell)
    volume = torch.linalg.det(cell).abs()
    step = 1e-5
    for i in range(3):
        for j in range(3):
            strain = torch.zeros(3, 3, dtype=x.dtype)
            strain[i, j] += step / 2
            strain[j, i] += step / 2
            up, down = torch.eye(3) + strain, torch.eye(3) - strain
            slope = (crystal_energy(x @ up, cell @ up) - crystal_energy(x @ down, cell @ down)) / (2 * step * volume)
            assert stress[i, j].item() == pytest.approx(slope.item(), rel=1e-7, abs=1e-6)
    apart = hodiff.atoms.forces(lambda x: crystal_energy(x, cell), x)
    torch.testing.assert_close(forces, apart)
    assert not forces.requires_grad


def test_check_of_forces() -> None:
    x = cluster(5)
    hodiff.atoms.check_forces(lennard_jones, lambda x: hodiff.atoms.forces(lennard_jones, x), x)
    hodiff.atoms.check_forces(lennard_jones, hodiff.atoms.forces(lennard_jones, x), x)
    wrong = hodiff.atoms.forces(lennard_jones, x)
    wrong[3] *= 1.001
    with pytest.raises(hodiff.CheckError, match="atom 3"):
        hodiff.atoms.check_forces(lennard_jones, wrong, x)
    with pytest.raises(hodiff.InputError, match="forces: expected a tensor of shape"):
        hodiff.atoms.check_forces(lennard_jones, x[:2], x)


def test_check_finds_energies_that_autograd_does_not_see() -> None:
    x = cluster(5)

    def cut(x: torch.Tensor) -> torch.Tensor:
        return lennard_jones(x) + 0.1 * x.detach().square().sum()

    with pytest.raises(hodiff.CheckError, match="autograd does not see"):
        hodiff.atoms.check_forces(cut, hodiff.atoms.forces(cut, x), x)


def test_single_precision_passes_the_check() -> None:
    x = cluster(5).float()

    def shifted(x: torch.Tensor) -> torch.Tensor:
        return lennard_jones(x) - 1000

    hodiff.atoms.check_forces(shifted, hodiff.atoms.forces(shifted, x), x)


def test_wrong_cells() -> None:
    x, cell = face_centred(1.5)
    for wrong in (cell[:2], cell.float(), torch.zeros_like(cell), cell.numpy()):
        with pytest.raises(hodiff.InputError, match="cell: expected three independent lattice vectors"):
            hodiff.atoms.forces(crystal_energy, x, wrong)
