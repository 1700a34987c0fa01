"""Grüneisen parameters and thermal expansion against relaxed crystals that are strained by hand."""

import math

import numpy as np
import pytest
import torch
from atoms.crystals import face_centred
from atoms.test_elastic import zincblende
from scipy import constants
from scipy.optimize import minimize
from torch import Tensor

import hodiff
from hodiff.atoms.vibrations import normal_modes

MASSES = torch.tensor([10.0, 25.0], dtype=torch.float64)
VOIGT = [(0, 0), (1, 1), (2, 2), (1, 2), (0, 2), (0, 1)]


def anharmonic(x: Tensor, cell: Tensor) -> Tensor:
    """A crystal whose bonds soften as they stretch, and that prefers one direction."""
    bond = x[1] - x[0]
    return zincblende(x, cell) + 0.05 * bond[0] ** 3 + 0.02 * (bond[1] * bond[2]) ** 2 + 0.1 * torch.linalg.det(cell)


def relaxed(x: Tensor, cell: Tensor) -> Tensor:
    """Move the atoms to the minimum, by the gradient of torch alone."""

    def f(flat: np.ndarray) -> tuple[float, np.ndarray]:
        place = torch.from_numpy(flat).view(-1, 3).requires_grad_()
        value = anharmonic(place, cell)
        return value.item(), torch.autograd.grad(value, place)[0].numpy().reshape(-1)

    found = minimize(f, x.reshape(-1).numpy(), jac=True, method="BFGS", options={"gtol": 1e-12})
    return torch.from_numpy(found.x).view(-1, 3)


def crystal() -> tuple[Tensor, Tensor]:
    x, cell = face_centred(2.0)
    x = torch.cat([x, x + 0.5])
    return relaxed(x, cell), cell


def eigenvalues_at(x: Tensor, cell: Tensor) -> Tensor:
    H = torch.func.hessian(lambda x: anharmonic(x, cell))(relaxed(x, cell))
    return normal_modes(H, MASSES)[0]


def test_parameters_are_slopes_of_relaxed_eigenvalues() -> None:
    x, cell = crystal()
    found = hodiff.atoms.gruneisen(anharmonic, x, cell, MASSES)
    assert found.parameters[:3].isnan().all()
    assert len(found.eigenvalues[3:].diff().clamp_max(1e-3).unique()) == 1  # no degenerate modes
    step = 1e-4
    for index, (i, j) in enumerate(VOIGT):
        ends = []
        for sign in (1, -1):
            strain = torch.zeros(3, 3, dtype=x.dtype)
            strain[i, j] += sign * step / 2
            strain[j, i] += sign * step / 2
            stretch = torch.eye(3) + strain
            ends.append(eigenvalues_at(x @ stretch, cell @ stretch))
        slope = (ends[0] - ends[1]) / (2 * step)
        expected = -slope[3:] / (2 * found.eigenvalues[3:])
        torch.testing.assert_close(found.parameters[3:, index], expected, rtol=1e-5, atol=1e-5)
    swelling = eigenvalues_at(x * (1 + step), cell * (1 + step)) / eigenvalues_at(x * (1 - step), cell * (1 - step))
    by_volume = -swelling[3:].log() / 2 / (3 * math.log((1 + step) / (1 - step)))
    torch.testing.assert_close(found.by_volume[3:], by_volume, rtol=1e-5, atol=1e-5)


def test_thermal_expansion_follows_from_the_free_energy() -> None:
    """The strain at which the free energy's slope by strain is zero grows by α for each kelvin."""
    x, cell = crystal()
    found = hodiff.atoms.gruneisen(anharmonic, x, cell, MASSES)
    k = constants.k / constants.e
    temperature, step = 80.0, 1e-3
    capacities = found.heat_capacities(temperature)
    assert capacities[:3].tolist() == [0, 0, 0]

    def entropy(kelvin: float) -> Tensor:
        y = found.energies[3:] / (k * kelvin)
        return k * (y / y.expm1() - (-(-y).expm1()).log())

    slope = (entropy(temperature + step) - entropy(temperature - step)) / (2 * step)
    torch.testing.assert_close(capacities[3:], temperature * slope, rtol=1e-6, atol=0)

    # Stress of the modes at fixed strain, by the energies' slopes: dF/dε_I = Σ (n + 1/2) dE_k/dε_I.
    def stress(kelvin: float) -> Tensor:
        y = found.energies[3:] / (k * kelvin)
        occupied = 0.5 + 1 / y.expm1()
        return -(occupied[:, None] * found.energies[3:, None] * -found.parameters[3:]).sum(0) / found.volume

    change = (stress(temperature + step) - stress(temperature - step)) / (2 * step)
    torch.testing.assert_close(
        found.elastic @ found.thermal_expansion(temperature), change, rtol=1e-5, atol=1e-6 * change.abs().max().item()
    )
    with pytest.raises(hodiff.InputError, match="temperature"):
        found.thermal_expansion(0.0)


def test_wrong_arguments() -> None:
    x, cell = crystal()
    with pytest.raises(hodiff.InputError, match=r"atoms\.gruneisen: masses: expected positive numbers"):
        hodiff.atoms.gruneisen(anharmonic, x, cell, MASSES[:1])
    with pytest.raises(hodiff.InputError, match=r"atoms\.gruneisen: cell: expected three"):
        hodiff.atoms.gruneisen(anharmonic, x, cell[:2], MASSES)
