"""Vibrations of chains of two and three atoms, in closed form."""

import math

import pytest
import torch
from torch import Tensor

import hodiff

CARBON, OXYGEN = 12.0, 15.995
STIFFNESS = 99.0  # eV / Å²
# One eV / (Å² u) in 1/s², and the speed of light in cm/s, of CODATA 2018.
RATE = 1.602176634e-19 / (1e-20 * 1.66053906660e-27)
LIGHT = 2.99792458e10
CHARGES = torch.tensor([-0.4, 0.8, -0.4], dtype=torch.float64)


def carbon_dioxide(x: Tensor) -> Tensor:
    return STIFFNESS * ((x[1:] - x[:-1]).norm(dim=1) - 1.16).square().sum() / 2


@pytest.fixture
def line() -> Tensor:
    direction = torch.tensor([2.0, 1.0, 2.0], dtype=torch.float64) / 3
    return torch.arange(3, dtype=torch.float64)[:, None] * 1.16 * direction


MASSES = torch.tensor([OXYGEN, CARBON, OXYGEN], dtype=torch.float64)


def wavenumber(eigenvalue: float) -> float:
    return math.sqrt(eigenvalue * RATE) / (2 * math.pi * LIGHT)


def test_linear_molecule(line: Tensor) -> None:
    found = hodiff.atoms.vibrations(carbon_dioxide, line, MASSES, dipole=lambda x: CHARGES @ x)
    symmetric = STIFFNESS / OXYGEN
    antisymmetric = STIFFNESS / OXYGEN * (1 + 2 * OXYGEN / CARBON)
    expected = [wavenumber(symmetric), wavenumber(antisymmetric)]
    assert found.wavenumbers[-2:].tolist() == pytest.approx(expected, rel=1e-7)
    assert found.wavenumbers[:-2].abs().max() < 1e-2
    # One quantum of 8065.544 1/cm is one eV.
    assert found.zero_point_energy == pytest.approx(sum(expected) / 2 / 8065.54394, rel=1e-5)
    # Charges in the antisymmetric mode, whose displacements of oxygen are 1 and of carbon -2 m_O / m_C.
    ratio = -2 * OXYGEN / CARBON
    slope = (2 * CHARGES[0] + ratio * CHARGES[1]).item() ** 2 / (2 * OXYGEN + ratio**2 * CARBON)
    # 42.2561 km/mol for 1 (D/Å)²/u, and 4.80320 D in 1 e Å.
    assert found.intensities is not None
    assert found.intensities[-1].item() == pytest.approx(42.2561 * 4.80320**2 * slope, rel=1e-5)
    assert found.intensities[-2].item() == pytest.approx(0, abs=1e-6)
    weighted = (found.modes * MASSES.sqrt()[:, None]).reshape(9, 9)
    torch.testing.assert_close(weighted @ weighted.t(), torch.eye(9, dtype=torch.float64))


def test_fixed_atoms(line: Tensor) -> None:
    found = hodiff.atoms.vibrations(carbon_dioxide, line, MASSES, free=[1])
    assert found.hessian.shape == (1, 3, 1, 3)
    assert found.wavenumbers[-1].item() == pytest.approx(wavenumber(2 * STIFFNESS / CARBON), rel=1e-7)
    assert found.modes[-1].norm().item() == pytest.approx(CARBON**-0.5)


def test_units_and_single_precision(line: Tensor) -> None:
    hartree, bohr = 27.211386, 0.529177

    def in_atomic_units(x: Tensor) -> Tensor:
        return carbon_dioxide(x * bohr) / hartree

    expected = hodiff.atoms.vibrations(carbon_dioxide, line, MASSES).wavenumbers
    x = (line / bohr).float()
    found = hodiff.atoms.vibrations(in_atomic_units, x, MASSES, energy_unit=hartree, length_unit=bohr)
    assert found.wavenumbers.dtype == torch.float64
    torch.testing.assert_close(found.wavenumbers[-2:], expected[-2:], rtol=1e-5, atol=0)


def test_imaginary_frequencies_are_negative(line: Tensor) -> None:
    found = hodiff.atoms.vibrations(lambda x: -carbon_dioxide(x), line, MASSES)
    assert found.wavenumbers[0].item() == pytest.approx(
        -wavenumber(STIFFNESS / OXYGEN * (1 + 2 * OXYGEN / CARBON)), rel=1e-7
    )
    assert found.zero_point_energy < 1e-5


def test_derivatives_that_are_not_finite_are_refused() -> None:
    def angle(x: Tensor) -> Tensor:
        one, other = x[0] - x[1], x[2] - x[1]
        return torch.acos(torch.dot(one, other) / (one.norm() * other.norm()))

    with (
        pytest.warns(hodiff.HodiffWarning, match="not finite|not symmetric"),
        pytest.raises(hodiff.InputError, match=r"atoms\.vibrations: energy: expected finite second derivatives"),
    ):
        hodiff.atoms.vibrations(angle, torch.tensor([[-1.0, 0, 0], [0, 0, 0], [1, 0, 0]]).double(), MASSES)


@pytest.mark.parametrize("masses", [MASSES[:2], -MASSES, [12.0, 12.0, 12.0]])
def test_wrong_masses(line: Tensor, masses: object) -> None:
    with pytest.raises(hodiff.InputError, match="masses: expected positive numbers"):
        hodiff.atoms.vibrations(carbon_dioxide, line, masses)


def test_wrong_dipole(line: Tensor) -> None:
    with pytest.raises(hodiff.InputError, match="dipole: expected a function that returns a tensor of shape"):
        hodiff.atoms.vibrations(carbon_dioxide, line, MASSES, dipole=lambda x: CHARGES @ x.norm(dim=1))


@pytest.mark.parametrize("free", [None, [0, 2]])
@pytest.mark.parametrize("sign", [1, -1])
def test_positions_with_forces_warn(line: Tensor, free: list[int] | None, sign: int) -> None:
    def signed(x: Tensor) -> Tensor:
        return sign * carbon_dioxide(x)

    with pytest.warns(hodiff.HodiffWarning, match="positions without forces.*relax the positions") as found:
        hodiff.atoms.vibrations(signed, 1.02 * line, MASSES, free=free)
    # The potential is harmonic, so the step leads to the minimum.
    assert f"moves an atom by {0.02 * 1.16:.1e}" in str(found[0].message)
    hodiff.atoms.vibrations(signed, 1.001 * line, MASSES, free=free)
