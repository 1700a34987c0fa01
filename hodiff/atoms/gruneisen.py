"""Grüneisen parameters and thermal expansion: derivatives of vibrational frequencies by strain, of third order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from scipy import constants
from torch import Tensor
from tqdm.auto import tqdm

from hodiff.atoms.elastic import elastic_constants, relaxation, strain_of
from hodiff.atoms.forces import require_cell
from hodiff.atoms.systems import require_one_energy, require_positions
from hodiff.atoms.vibrations import normal_modes, require_masses
from hodiff.common.options import require_bool, require_callable, require_chunk_size, require_number
from hodiff.derivatives import hvp
from hodiff.derivatives.bound_function import leave_inference_mode
from hodiff.errors import InputError

# Boltzmann's constant in eV/K.
_BOLTZMANN = constants.k / constants.e


@dataclass(frozen=True)
class Gruneisen:
    """Modes of a crystal and their Grüneisen parameters, in float64, by increasing eigenvalue.

    Attributes:
        parameters: Parameters by strain in Voigt's notation, (3 N, 6); NaN for translations. Of degenerate modes, only
            the mean is unique.
        eigenvalues: Eigenvalues of the mass-weighted Hessian in eV / (Å² u), (3 N,).
        energies: Energies of the quanta in eV, (3 N,).
        modes: Displacements in each mode, (3 N, N, 3), as those of `Vibrations`.
        elastic: Relaxed elastic constants (6, 6) in eV / Å³.
        volume: Volume of the cell in Å³.
    """

    parameters: Tensor
    eigenvalues: Tensor
    energies: Tensor
    modes: Tensor
    elastic: Tensor
    volume: float

    @property
    def by_volume(self) -> Tensor:
        r"""Parameters by volume, $-d \ln\omega / d\ln V$, (3 N,), for equal strains in all directions."""
        return self.parameters[:, :3].mean(1)

    def heat_capacities(self, temperature: float) -> Tensor:
        """Heat capacity of each mode in eV/K, (3 N,); 0 for translations."""
        require_number("Gruneisen", "temperature", temperature, positive=True, finite=True)
        moving = ~self.parameters[:, 0].isnan()
        x = self.energies[moving] / (_BOLTZMANN * temperature)
        found = torch.zeros_like(self.energies)
        found[moving] = _BOLTZMANN * (x / 2 / (x / 2).sinh()).square()
        return found

    def thermal_expansion(self, temperature: float) -> Tensor:
        """Linear thermal expansion in 1/K, the strains (6,) in Voigt's notation; the trace is that of the volume."""
        forces = (self.heat_capacities(temperature)[:, None] * self.parameters.nan_to_num()).sum(0) / self.volume
        return torch.linalg.solve(self.elastic, forces)


@leave_inference_mode
def gruneisen(
    energy: Callable[[Tensor, Tensor], Any],
    positions: Tensor,
    cell: Tensor,
    masses: Tensor,
    *,
    chunk_size: int | str | None = "auto",
    progress: bool = False,
) -> Gruneisen:
    r"""Compute the Grüneisen parameters of a crystal's modes, and what thermal expansion needs.

    $$ \gamma_{kI} = -\frac{1}{2\lambda_k} \frac{d\lambda_k}{d\varepsilon_I}, \qquad
       \frac{d\lambda_k}{d\varepsilon_I} = \frac{\partial (u_k^\top H u_k)}{\partial \varepsilon_I}
       - \frac{\partial (u_k^\top H u_k)}{\partial r} \cdot H^{+} \Lambda_I, \qquad
       \alpha_I = \frac1V \sum_J S_{IJ} \sum_k c_k(T)\, \gamma_{kJ} $$

    ω² = λ are the eigenvalues of the mass-weighted Hessian, u their modes, ε the strain in Voigt's order xx, yy, zz,
    yz, xz, xy, where shears count twice. The second term lets the atoms follow the strain. S inverts the relaxed
    elastic constants, and c are heat capacities of quanta: the quasi-harmonic approximation. The modes are those of the
    given cell; give a supercell to sample more of them. Each mode takes one gradient of a Hessian-vector product.

    Args:
        energy: Function `energy(positions, cell)` that returns the energy in eV, as in `elastic_constants`.
        positions: Positions (N, 3) in Å, at a minimum.
        cell: Lattice vectors as rows, (3, 3), in Å.
        masses: Masses of the atoms in u, (N,).
        chunk_size: As in `hessian`.
        progress: Whether to show a progress bar.

    Returns:
        The `Gruneisen`, with `by_volume`, `heat_capacities(T)` and `thermal_expansion(T)`.

    Raises:
        InputError: If an argument is invalid, or the positions are no minimum.
        RouteError: If a second derivative does not exist.

    Example:
        >>> import torch, hodiff
        >>> def crystal(x, cell):  # atoms of a diatomic chain, and three stiff directions
        ...     first, second = (x[1] - x[0])[0], (x[0] - x[1] + cell[0])[0]
        ...     springs = sum(((d - 2) ** 2 / 2 - (d - 2) ** 3 / 6) for d in (first, second))
        ...     sides = (x[1] - x[0])[1:].square().sum() / 4 + ((cell @ cell.T - 16 * torch.eye(3)) ** 2).sum()
        ...     return springs + sides
        >>> x, cell = torch.tensor([[0.0, 0, 0], [2, 0, 0]]).double(), 4 * torch.eye(3).double()
        >>> found = hodiff.atoms.gruneisen(crystal, x, cell, torch.tensor([12.0, 12.0]))
        >>> f"{found.parameters[-1, 0]:.2f}"
        '1.00'

    Source: G. Grimvall, *Thermophysical Properties of Materials* (1999), chapters 7 and 10.
    """
    caller = "atoms.gruneisen"
    positions = require_positions(caller, positions)
    require_callable(caller, energy=energy)
    require_bool(caller, "progress", progress)
    require_chunk_size(caller, "chunk_size", chunk_size)
    cell, volume = require_cell(caller, cell, positions)
    weights = require_masses(caller, masses, positions, None)
    crystal = elastic_constants(energy, positions, cell, chunk_size=chunk_size)
    assert crystal.hessian is not None
    assert crystal.internal_strain is not None
    assert crystal.relaxed is not None
    n = positions.numel()
    H = crystal.hessian.reshape(n, n)
    eigenvalues, energies, modes = normal_modes(H, weights)
    follow = -relaxation(caller, H, crystal.internal_strain.reshape(n, 6))
    still = _translations(modes, weights)
    if not eigenvalues[~still].gt(0).all():
        raise InputError(
            f"{caller}: positions: expected a minimum, got a mode with eigenvalue {eigenvalues[~still].min():.1e}; "
            "relax the positions."
        )
    identity = torch.eye(3, dtype=positions.dtype, device=positions.device)
    point = positions.new_zeros(6 + n).requires_grad_()

    def displaced(y: Tensor) -> Tensor:
        stretch = identity + strain_of(point[:6])
        x = positions @ stretch + point[6:].view_as(positions) + y
        return require_one_energy(caller, energy(x, cell @ stretch), 1)

    parameters = torch.full((n, 6), torch.nan, dtype=torch.float64, device=positions.device)
    for k in tqdm((~still).nonzero().flatten().tolist(), unit=" modes", disable=not progress):
        u = modes[k].to(positions.dtype).view_as(positions)
        with torch.enable_grad():
            curvature = (u * hvp(displaced, torch.zeros_like(positions), u)).sum()
        slope = torch.autograd.grad(curvature, point)[0].double()
        parameters[k] = -(slope[:6] + follow.t() @ slope[6:]) / (2 * eigenvalues[k])
    return Gruneisen(
        parameters=parameters,
        eigenvalues=eigenvalues,
        energies=energies,
        modes=modes.view(n, -1, 3),
        elastic=crystal.relaxed,
        volume=volume.item(),
    )


def _translations(modes: Tensor, weights: Tensor) -> Tensor:
    """Find the three modes that are most similar to translations, as a mask."""
    shift = torch.eye(3, dtype=modes.dtype, device=modes.device).repeat(len(weights), 1)
    shares = ((modes * weights.repeat_interleave(3)) @ shift).square().sum(1)
    mask = torch.zeros(len(modes), dtype=torch.bool, device=modes.device)
    mask[shares.argsort()[-3:]] = True
    return mask
