"""Forces and stress against closed forms, and the check of a model's own forces."""

import numpy as np
import pytest
import torch
from atoms.crystals import SHIFTS, cluster, crystal_energy, face_centred, lennard_jones, slopes

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


@pytest.mark.parametrize(
    ("dtype", "stretch", "shift"),
    [
        (torch.float32, 0.1, 0),
        (torch.float32, 0.01, 0),
        (torch.float32, 0.1, 10),
        (torch.float64, 1e-8, 0),
        (torch.float64, 1e-3, 100),
        (torch.float64, 1e-6, 10),
    ],
)
def test_right_forces_pass_the_check_near_minima_and_far_from_the_origin(
    dtype: torch.dtype, stretch: float, shift: float
) -> None:
    x = torch.tensor([[0.0, 0, 0], [2 ** (1 / 6) + stretch, 0, 0]], dtype=torch.float64).to(dtype) + shift
    r = (x[1, 0] - x[0, 0]).item()
    found = hodiff.atoms.forces(lennard_jones, x)
    assert found[0, 0].item() == pytest.approx(slopes(np.array(r))[0], rel=20 * torch.finfo(dtype).eps, abs=1e-5)
    hodiff.atoms.check_forces(lennard_jones, found, x)
    hodiff.atoms.check_forces(lambda x: lennard_jones(x) - 1000, found, x)


@pytest.mark.filterwarnings("ignore:.*is not the derivative of the function")
@pytest.mark.parametrize(("dtype", "factor"), [(torch.float64, 1 + 1e-6), (torch.float32, 1.01)])
def test_check_finds_gradients_with_a_wrong_factor(dtype: torch.dtype, factor: float) -> None:
    x = cluster(5, dtype)

    def scaled(x: torch.Tensor) -> torch.Tensor:
        energy = lennard_jones(x)
        return factor * energy + (1 - factor) * energy.detach()

    with pytest.raises(hodiff.CheckError, match="along the forces"):
        hodiff.atoms.check_forces(scaled, hodiff.atoms.forces(scaled, x), x)


def _minimum(dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([[0.0, 0, 0], [2 ** (1 / 6), 0, 0]], dtype=dtype)


@pytest.mark.filterwarnings("ignore:.*is not the derivative of the function")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_check_finds_missing_parts_where_forces_are_zero(dtype: torch.dtype) -> None:
    x = _minimum(dtype)

    def half(x: torch.Tensor) -> torch.Tensor:
        return lennard_jones(x) + 0.1 * x.detach().square().sum()

    with pytest.raises(hodiff.CheckError, match="along a random direction"):
        hodiff.atoms.check_forces(half, hodiff.atoms.forces(half, x), x)


def test_check_finds_jumps_of_the_energy() -> None:
    x = _minimum(torch.float64)

    def jump(x: torch.Tensor) -> torch.Tensor:
        return lennard_jones(x) + 1e-3 * (x[0, 0] >= 0)

    with pytest.raises(hodiff.CheckError, match="not smoothly"):
        hodiff.atoms.check_forces(jump, hodiff.atoms.forces(jump, x), x)


def test_check_leaves_buffers_as_they_are() -> None:
    norm = torch.nn.BatchNorm1d(3).double()

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = norm

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(x).cos().sum()

    model, x = Model(), cluster(5)
    hodiff.atoms.check_forces(model, lambda x: hodiff.atoms.forces(model, x), x)
    assert norm.num_batches_tracked is not None
    assert norm.num_batches_tracked.item() == 0
    assert norm.running_mean is not None
    assert not norm.running_mean.any()


def test_energies_without_their_cell() -> None:
    x, cell = face_centred(1.5)
    shifts = SHIFTS @ cell

    def fixed(x: torch.Tensor, cell: torch.Tensor) -> torch.Tensor:
        return crystal_energy(x, torch.linalg.solve(SHIFTS.T @ SHIFTS, SHIFTS.T @ shifts))

    calls = (
        lambda energy: hodiff.atoms.forces(energy, torch.cat([x, x + 0.4]), cell),
        lambda energy: hodiff.atoms.elastic_constants(energy, torch.cat([x, x + 0.4]), cell, relaxed=False),
    )
    for call in calls:
        with pytest.warns(hodiff.HodiffWarning, match="depends on its argument cell"):
            call(fixed)
        call(crystal_energy)


@pytest.mark.parametrize("keep", [True, False])
def test_energies_that_compute_forces_of_their_own(keep: bool) -> None:
    x = cluster(4)

    def energy(x: torch.Tensor) -> torch.Tensor:
        x = x if x.requires_grad else x.requires_grad_()
        found = lennard_jones(x)
        torch.autograd.grad(found, x, retain_graph=keep)
        return found

    calls = (
        lambda energy: hodiff.atoms.forces(energy, x),
        lambda energy: hodiff.atoms.hessian(energy, x),
        lambda energy: hodiff.atoms.hvp(energy, x, x),
        lambda energy: hodiff.hvp(energy, x, x),
    )
    for call in calls:
        if keep:
            torch.testing.assert_close(call(energy), call(lennard_jones))
        else:
            with pytest.raises(hodiff.InputError, match=r"models that compute forces themselves.*retain_graph=True"):
                call(energy)
    if keep:
        hodiff.atoms.check_forces(energy, hodiff.atoms.forces(lennard_jones, x), x)


@pytest.mark.filterwarnings("ignore:.*positions without forces")
def test_inference_mode() -> None:
    x, (_, cell) = cluster(3), face_centred(1.5)
    v, masses = torch.randn_like(x), torch.ones(3)
    atoms = hodiff.atoms

    def trap(x: torch.Tensor, cell: torch.Tensor) -> torch.Tensor:
        near = (x - torch.tensor([[0.0], [1.0], [2.0]])).square().sum()
        return near + (x[1] - x[0] - cell[0]).square().sum() ** 2 + (cell @ cell.T).square().sum()

    def calls(x: torch.Tensor, cell: torch.Tensor) -> list[torch.Tensor]:
        atoms.check_forces(lennard_jones, atoms.forces(lennard_jones, x), x)
        elastic = atoms.elastic_constants(trap, x, cell, relaxed=False)
        return [
            *atoms.forces(trap, x, cell),
            atoms.hessian(lennard_jones, x, free=[0, 2]),
            atoms.hvp(lennard_jones, x, v),
            atoms.sparse_hessian(lennard_jones, x, 9.0, free=[0, 2]).to_dense(),
            atoms.vibrations(lennard_jones, x, masses).eigenvalues,
            elastic.clamped,
        ]

    expected = calls(x, cell)
    with torch.inference_mode():
        within, own = calls(x, cell), calls(x.clone(), cell.clone())
    for one, other, third in zip(expected, within, own, strict=True):
        torch.testing.assert_close(one, other)
        torch.testing.assert_close(one, third)


def test_energies_that_write_into_the_positions() -> None:
    x = cluster(4)

    def centred(x: torch.Tensor) -> torch.Tensor:
        x -= x.mean(0)
        return lennard_jones(x)

    before = x.clone()
    torch.testing.assert_close(hodiff.atoms.forces(centred, x), hodiff.atoms.forces(lennard_jones, x))
    torch.testing.assert_close(hodiff.atoms.hessian(centred, x), hodiff.atoms.hessian(lennard_jones, x))
    torch.testing.assert_close(hodiff.atoms.hvp(centred, x, x), hodiff.atoms.hvp(lennard_jones, x, x))
    hodiff.atoms.check_forces(centred, hodiff.atoms.forces(lennard_jones, x), x)
    torch.testing.assert_close(x, before)


def test_wrong_cells() -> None:
    x, cell = face_centred(1.5)
    for wrong in (cell[:2], cell.float(), torch.zeros_like(cell), cell.numpy()):
        with pytest.raises(hodiff.InputError, match="cell: expected three independent lattice vectors"):
            hodiff.atoms.forces(crystal_energy, x, wrong)
