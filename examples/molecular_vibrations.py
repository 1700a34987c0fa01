"""Vibrations of water and heavy water: frequencies, zero-point energy, infrared intensities.

    python examples/molecular_vibrations.py
    python examples/molecular_vibrations.py --quick

The energy is a quadratic force field in bond lengths and angle, from spectroscopy. `hodiff.atoms.vibrations` needs the
energy as a function of Cartesian positions and the masses. The same Hessian serves all isotopes. A dipole, here of
fixed charges, gives intensities. The script prints the harmonic frequencies beside those of the literature, the shift
of the zero-point energy by deuterium, and the modes of hydrogen alone, with the oxygen fixed.

Source: A. R. Hoy, I. M. Mills & G. Strey, Molecular Physics 24 (1972), for force field and frequencies.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from torch import Tensor

import hodiff

BOND, ANGLE = 0.9572, 104.52  # Å, degrees
MILLIDYNE = 6.2415091  # eV / Å
STRETCH, STRETCHES, BEND, STRETCH_BEND = 8.454, -0.101, 0.697, 0.219  # mdyn/Å, mdyn/Å, mdyn Å, mdyn
CHARGES = torch.tensor([-0.66, 0.33, 0.33], dtype=torch.float64)
MASSES = {"H2O": (15.9949, 1.00783, 1.00783), "D2O": (15.9949, 2.01410, 2.01410)}
PUBLISHED = {"H2O": (1648.9, 3832.0, 3942.5), "D2O": (1206.4, 2763.8, 2888.8)}  # 1/cm


def water() -> Tensor:
    """Return positions of oxygen and two hydrogens at the minimum, in a general orientation."""
    half = torch.tensor(ANGLE / 2, dtype=torch.float64).deg2rad()
    flat = BOND * torch.stack([
        half.new_zeros(2),
        torch.stack([half.cos(), half.sin()]),
        torch.stack([half.cos(), -half.sin()]),
    ])
    turn = torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64))[0]
    return torch.cat([flat, flat.new_zeros(3, 1)], 1) @ turn


def energy(x: Tensor) -> Tensor:
    """Compute the energy in eV."""
    one, other = x[1] - x[0], x[2] - x[0]
    r, s = one.norm() - BOND, other.norm() - BOND
    bend = (
        torch.atan2(torch.linalg.cross(one, other).norm(), one @ other) - torch.tensor(ANGLE, dtype=x.dtype).deg2rad()
    )
    field = STRETCH * (r**2 + s**2) / 2 + STRETCHES * r * s + BEND * bend**2 / 2 + STRETCH_BEND * (r + s) * bend
    return MILLIDYNE * field


def dipole(x: Tensor) -> Tensor:
    """Compute the dipole of fixed charges, in e Å."""
    return CHARGES @ x


def check() -> str:
    """Run hodiff's check on the energy: all routes, gradgradcheck, SciPy's Hessian."""
    x = water()
    return hodiff.assert_differentiable(energy, x + 0.01 * x.sin(), vmap=False).summary


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the vibrations of both isotopes, and of hydrogen alone."""
    parser = argparse.ArgumentParser(description="Vibrations of water.")
    parser.add_argument("--quick", action="store_true", help="leave out the check of the energy")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    x, zero_point = water(), {}
    print(f"{'':6}{'1/cm':>10}{'published':>12}{'km/mol':>10}")
    for name, masses in MASSES.items():
        found = hodiff.atoms.vibrations(energy, x, torch.tensor(masses), dipole=dipole)
        assert found.intensities is not None
        zero_point[name] = found.zero_point_energy
        for wavenumber, published, intensity in zip(
            found.wavenumbers[-3:], PUBLISHED[name], found.intensities[-3:], strict=True
        ):
            print(f"{name:6}{wavenumber:10.1f}{published:12.1f}{intensity:10.1f}")
        print(f"{name:6}{found.wavenumbers[:6].abs().max():10.1e}  at most, of translations and rotations")
    light, heavy = zero_point.values()
    print(f"\nzero-point energy {light:.4f} eV, {light - heavy:.4f} less with deuterium")
    fixed = hodiff.atoms.vibrations(energy, x, torch.tensor(MASSES["H2O"]), free=[1, 2])
    print(f"with the oxygen fixed {' '.join(f'{each:.1f}' for each in fixed.wavenumbers[-3:])} 1/cm")
    if not options.quick:
        print(check())


if __name__ == "__main__":
    main()
