"""Harmonic vibrations of atoms: frequencies, modes, zero-point energy, infrared intensities."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from scipy import constants
from torch import Tensor

from hodiff.atoms.forces import energy_gradients, shortest_distance
from hodiff.atoms.hessian import hessian
from hodiff.atoms.systems import Atoms, Energy, atom_indices, require_positions
from hodiff.common.options import require_bool, require_callable, require_chunk_size, require_number
from hodiff.common.trees import describe
from hodiff.derivatives import jacobian
from hodiff.derivatives.bound_function import leave_inference_mode
from hodiff.errors import HodiffWarning, InputError, levels_to_the_caller

# Energy in eV of a quantum of a mode whose eigenvalue is 1 eV / (Å² u), wavenumber in 1/cm of 1 eV, and intensity in
# km/mol of 1 e²/u.
_QUANTUM = constants.hbar * 1e10 / math.sqrt(constants.e * constants.atomic_mass)
_WAVENUMBER = constants.e / (constants.h * constants.c * 100)
_INTENSITY = constants.N_A * constants.e**2 / (12e3 * constants.epsilon_0 * constants.c**2 * constants.atomic_mass)
# Eigenvalues of the stiffer modes, relative to the largest, and the step to the minimum along them, relative to the
# shortest distance of two atoms, above which frequencies are doubtful.
_STIFF = 0.01
_LARGEST_STEP = 0.01


@dataclass(frozen=True)
class Vibrations:
    """Normal modes, by increasing eigenvalue; all tensors but the Hessian are float64.

    Attributes:
        hessian: Hessian of the free atoms, (F, 3, F, 3), in the units of the energy and the positions.
        eigenvalues: Eigenvalues of the mass-weighted Hessian in eV / (Å² u), (3 F,).
        energies: Energies of the quanta in eV, (3 F,); negative numbers stand for imaginary frequencies.
        wavenumbers: Wavenumbers in 1/cm, (3 F,); negative numbers stand for imaginary frequencies.
        modes: Displacements of the free atoms in each mode, (3 F, F, 3), orthonormal after multiplication by the square
            roots of the masses.
        zero_point_energy: Half the sum of the real energies, in eV.
        intensities: Infrared intensities in km/mol, (3 F,); None without a dipole.
    """

    hessian: Tensor
    eigenvalues: Tensor
    energies: Tensor
    wavenumbers: Tensor
    modes: Tensor
    zero_point_energy: float
    intensities: Tensor | None


@leave_inference_mode
def vibrations(
    energy: Energy,
    positions: Tensor,
    masses: Tensor,
    *,
    free: Atoms = None,
    dipole: Callable[[Tensor], Tensor] | None = None,
    energy_unit: float = 1.0,
    length_unit: float = 1.0,
    chunk_size: int | str | None = "auto",
    progress: bool = False,
) -> Vibrations:
    r"""Compute the normal modes of atoms at a stationary point of the energy.

    $$ M^{-1/2} H M^{-1/2} q_k = \omega_k^2\, q_k, \qquad u_k = M^{-1/2} q_k, \qquad
       E_0 = \tfrac12 \sum_k \hbar\omega_k, \qquad
       A_k = \frac{N_A}{12\, \varepsilon_0 c^2} \left| \frac{\partial \mu}{\partial r} \cdot u_k \right|^2 $$

    The masses divide the Hessian in float64, also if the model computes in float32. A molecule without fixed atoms has
    six modes near zero (five if linear), and a crystal three.

    Args:
        energy: Function of the positions that returns the energy, as in `hessian`.
        positions: Positions of shape (N, 3), at a minimum or a saddle. A warning says so if forces would move an atom
            by a hundredth of the shortest distance, along modes above a tenth of the highest frequency.
        masses: Masses of all atoms in unified atomic mass units u, (N,).
        free: Atoms that move, as in `hessian`.
        dipole: Function of the positions that returns the dipole (3,), in elementary charges times the unit of length,
            for infrared intensities.
        energy_unit: Unit of the energy in eV: 27.211386 for Hartree, 0.0433641 for kcal/mol.
        length_unit: Unit of the positions in Å: 0.529177 for Bohr.
        chunk_size: As in `hessian`.
        progress: As in `hessian`.

    Returns:
        The `Vibrations`.

    Raises:
        InputError: If an argument is invalid, as in `hessian`.
        RouteError: If a second derivative does not exist.

    Example:
        >>> import torch, hodiff
        >>> def spring(x):  # nitrogen with a force constant of 143.9 eV / Å² (2305 N/m)
        ...     return 143.9 * ((x[1] - x[0]).norm() - 1.098) ** 2 / 2
        >>> x = torch.tensor([[0, 0, 0], [0, 0, 1.098]], dtype=torch.float64)
        >>> found = hodiff.atoms.vibrations(spring, x, torch.tensor([14.003, 14.003]))
        >>> f"{found.wavenumbers[-1]:.0f}"
        '2364'

    Source: E. B. Wilson, J. C. Decius & P. C. Cross, *Molecular Vibrations* (1955), chapters 2 and 7.
    """
    positions = require_positions("atoms.vibrations", positions)
    moving = atom_indices("atoms.vibrations", "free", free, len(positions))
    require_number("atoms.vibrations", "energy_unit", energy_unit, positive=True, finite=True)
    require_number("atoms.vibrations", "length_unit", length_unit, positive=True, finite=True)
    require_chunk_size("atoms.vibrations", "chunk_size", chunk_size)
    require_bool("atoms.vibrations", "progress", progress)
    weights = require_masses("atoms.vibrations", masses, positions, moving)
    if dipole is not None:
        require_callable("atoms.vibrations", dipole=dipole)
    H = hessian(energy, positions, free=moving, chunk_size=chunk_size, progress=progress)
    if not bool(H.isfinite().all()):
        raise InputError(
            "atoms.vibrations: energy: expected finite second derivatives at the positions, got NaN or infinity; write "
            "angles by torch.atan2 of smooth functions, and distances that may be 0 without a root."
        )
    unit = energy_unit / length_unit**2
    eigenvalues, energies, modes = normal_modes(H, weights, unit)
    _warn_of_forces(energy, positions, moving, eigenvalues / unit, modes)
    intensities = None
    if dipole is not None:
        slopes = _dipole_slopes(dipole, positions, moving)
        intensities = _INTENSITY * (modes @ slopes.t()).square().sum(1)
    return Vibrations(
        hessian=H,
        eigenvalues=eigenvalues,
        energies=energies,
        wavenumbers=_WAVENUMBER * energies,
        modes=modes.view(len(modes), -1, 3),
        zero_point_energy=energies.clamp_min(0).sum().item() / 2,
        intensities=intensities,
    )


def normal_modes(H: Tensor, weights: Tensor, unit: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Return eigenvalues, energies of quanta and modes (3 F, 3 F) as rows, from a Hessian and masses in float64."""
    n = 3 * len(weights)
    scale = weights.rsqrt().repeat_interleave(3)
    eigenvalues, vectors = torch.linalg.eigh(H.double().reshape(n, n) * unit * scale[:, None] * scale)
    return eigenvalues, _QUANTUM * eigenvalues.abs().sqrt() * eigenvalues.sign(), vectors.t() * scale


def _warn_of_forces(energy: Energy, positions: Tensor, free: Tensor | None, eigenvalues: Tensor, modes: Tensor) -> None:
    """Warn of positions that are not stationary: forces that would move an atom along the stiffer modes."""
    _, forces, _ = energy_gradients("atoms.vibrations", energy, positions, None)
    forces = forces if free is None else forces[free.to(forces.device)]
    stiff = eigenvalues.abs() > _STIFF * eigenvalues.abs().max()
    along = modes[stiff]
    step = along.t() @ ((along @ forces.double().flatten()) / eigenvalues[stiff])
    if (longest := step.view(-1, 3).norm(dim=1).max()) > _LARGEST_STEP * shortest_distance(positions):
        warnings.warn(
            "atoms.vibrations: positions: expected positions without forces, got forces whose Newton step moves an "
            f"atom by {longest:.1e}, so that frequencies of rotations and soft modes are wrong; relax the positions "
            "first.",
            HodiffWarning,
            stacklevel=levels_to_the_caller(),
        )


def require_masses(caller: str, masses: Any, positions: Tensor, free: Tensor | None) -> Tensor:
    """Return the masses of the free atoms in float64."""
    if not isinstance(masses, Tensor) or masses.shape != positions.shape[:1] or not (masses > 0).all():
        raise InputError(
            f"{caller}: masses: expected positive numbers of shape ({len(positions)},), one for each atom, got "
            f"{describe(masses)}; pass torch.from_numpy(atoms.get_masses())."
        )
    found = masses.detach().to(positions.device, torch.float64)
    return found if free is None else found[free.to(found.device)]


def _dipole_slopes(dipole: Callable[[Tensor], Tensor], positions: Tensor, free: Tensor | None) -> Tensor:
    """Return the derivatives (3, 3 F) of the dipole by the free atoms."""
    with torch.no_grad():
        slopes = jacobian(dipole)(positions)
    if not isinstance(slopes, Tensor) or slopes.shape[:-2] != (3,):
        raise InputError(
            f"atoms.vibrations: dipole: expected a function that returns a tensor of shape (3,), got derivatives "
            f"{describe(slopes)}; return the dipole vector alone."
        )
    slopes = slopes if free is None else slopes[:, free.to(slopes.device)]
    return slopes.double().reshape(3, -1)
