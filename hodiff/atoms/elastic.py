"""Elastic constants: second derivatives of the energy by strain, at fixed and at relaxed positions in the cell."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hodiff.atoms.columns import in_groups
from hodiff.atoms.forces import energy_gradients, require_cell
from hodiff.atoms.systems import require_one_energy, require_positions
from hodiff.common.options import require_bool, require_callable, require_chunk_size
from hodiff.derivatives.bound_function import leave_inference_mode
from hodiff.errors import HodiffWarning, InputError, levels_to_the_caller
from hodiff.operators import HessianOperator

# The components of a symmetric matrix in Voigt's order.
_VOIGT = ((0, 0), (1, 1), (2, 2), (1, 2), (0, 2), (0, 1))
# Step to the minimum, relative to the size of the cell, above which relaxed constants are doubtful.
_LARGEST_STEP = 1e-3


@dataclass(frozen=True)
class ElasticConstants:
    """Elastic constants of a crystal in Voigt's notation, in float64.

    Attributes:
        clamped: Constants (6, 6) at fixed positions within the cell.
        relaxed: Constants (6, 6) where the atoms follow the strain; None if they were not computed.
        stress: Stress (3, 3) at the given cell; away from zero stress, constants of different definitions differ.
        internal_strain: Second derivatives of the energy by positions and strain, (N, 3, 6); None if not computed.
        hessian: Hessian by positions, (N, 3, N, 3); None if not computed.
    """

    clamped: Tensor
    relaxed: Tensor | None
    stress: Tensor
    internal_strain: Tensor | None
    hessian: Tensor | None


@leave_inference_mode
def elastic_constants(
    energy: Callable[[Tensor, Tensor], Any],
    positions: Tensor,
    cell: Tensor,
    *,
    relaxed: bool = True,
    chunk_size: int | str | None = "auto",
) -> ElasticConstants:
    r"""Compute the elastic constants of a crystal.

    $$ C_{IJ} = \frac{1}{V} \left( \frac{\partial^2 E}{\partial \eta_I\, \partial \eta_J}
       - \Lambda_I^\top H^{+} \Lambda_J \right), \qquad
       \Lambda_I = \frac{\partial^2 E}{\partial r\, \partial \eta_I} $$

    η is the Lagrangian strain in Voigt's order xx, yy, zz, yz, xz, xy, where shears count twice. Atoms and cell are
    deformed by $F = I + \eta - \eta^2 / 2$, for which $F^\top F = I + 2\eta$ to second order. The constants are those
    of Brugger, which are symmetric also under stress. The second term, the relaxation of the atoms, is left out of the
    clamped constants. $H^+$ inverts the Hessian except for translations.

    Args:
        energy: Function `energy(positions, cell)` that returns the energy: a tensor of shape () or (1,). It must follow
            the cell: shifts of periodic images are integers times the cell. If it does not depend on it, a warning says
            so.
        positions: Positions of shape (N, 3), at a minimum for relaxed constants.
        cell: Lattice vectors as rows, (3, 3).
        relaxed: Whether to compute relaxed constants, for 3 N more columns.
        chunk_size: As in `hessian`.

    Returns:
        The `ElasticConstants`, in units of energy per volume: with eV and Å, times 160.21766 they are in GPa.

    Raises:
        InputError: If an argument is invalid, or if the Hessian has a negative or zero eigenvalue apart from
            translations, so that no relaxed constants exist.
        RouteError: If a second derivative does not exist.

    Example:
        >>> import torch, hodiff
        >>> def chain(x, cell):  # a chain of one atom along x, with springs of length 1 and no other stiffness
        ...     return (cell[0].norm() - 1) ** 2 / 2
        >>> cell = torch.eye(3, dtype=torch.float64)
        >>> C = hodiff.atoms.elastic_constants(chain, torch.zeros(1, 3, dtype=torch.float64), cell, relaxed=False)
        >>> C.clamped[0]
        tensor([1., 0., 0., 0., 0., 0.], dtype=torch.float64)

    Source: K. Brugger, "Thermodynamic definition of higher order elastic coefficients", Physical Review 133 (1964);
    X. Wu, D. Vanderbilt & D. R. Hamann, Physical Review B 72 (2005), for the relaxation.
    """
    caller = "atoms.elastic_constants"
    positions = require_positions(caller, positions)
    require_callable(caller, energy=energy)
    require_bool(caller, "relaxed", relaxed)
    require_chunk_size(caller, "chunk_size", chunk_size)
    cell, volume = require_cell(caller, cell, positions)
    identity = torch.eye(3, dtype=positions.dtype, device=positions.device)

    def strained(point: Tensor) -> Tensor:
        strain = strain_of(point[:6])
        stretch = identity + strain - strain @ strain / 2
        x = positions + point[6:].view(-1, 3) if relaxed else positions
        return require_one_energy(caller, energy(x @ stretch, cell @ stretch), 1)

    size = 6 + (positions.numel() if relaxed else 0)
    A = HessianOperator(strained, positions.new_zeros(size), chunk_size=None)
    full = in_groups(A, size, chunk_size, A.to_dense).double()
    volume = volume.double()
    _, forces, stress = energy_gradients(caller, energy, positions, cell, follows_cell=True)
    assert stress is not None
    clamped = full[:6, :6] / volume
    if not relaxed:
        return ElasticConstants(clamped, None, stress.double(), None, None)
    H, coupling = full[6:, 6:], full[6:, :6]
    answer = relaxation(caller, H, torch.cat([coupling, -forces.double().reshape(-1, 1)], 1))
    if (step := answer[:, 6].abs().max()) > _LARGEST_STEP * volume ** (1 / 3):
        warnings.warn(
            f"{caller}: positions: expected positions at a minimum for relaxed constants, got forces whose Newton step "
            f"moves an atom by {step:.1e}; relax the positions first, or pass relaxed=False.",
            HodiffWarning,
            stacklevel=levels_to_the_caller(),
        )
    change = coupling.t() @ answer[:, :6] / volume
    return ElasticConstants(
        clamped=clamped,
        relaxed=clamped - (change + change.t()) / 2,
        stress=stress.double(),
        internal_strain=coupling.view(-1, 3, 6),
        hessian=H.view(len(positions), 3, len(positions), 3),
    )


def strain_of(components: Tensor) -> Tensor:
    """Return the symmetric matrix (3, 3) of six components in Voigt's notation, where shears count twice."""
    place = torch.zeros(3, 3, dtype=torch.long, device=components.device)
    for index, (i, j) in enumerate(_VOIGT):
        place[i, j] = place[j, i] = index
    return components[place] * (1 + torch.eye(3, dtype=components.dtype, device=components.device)) / 2


def relaxation(caller: str, H: Tensor, right: Tensor) -> Tensor:
    """Solve with the Hessian in the space without translations."""
    n = len(H)
    # Translations receive the largest curvature, and drop out of the answer, as the right-hand sides have none.
    shift = torch.eye(3, dtype=H.dtype, device=H.device).repeat(n // 3, 1) / (n // 3) ** 0.5
    apart = torch.eye(n, dtype=H.dtype, device=H.device) - shift @ shift.t()
    values, vectors = torch.linalg.eigh(apart @ H @ apart)
    order = (vectors.t() @ shift).norm(dim=1).argsort()
    kept = order[: n - 3]
    if len(kept) and not values[kept].min() > 1e-9 * values.abs().max():
        raise InputError(
            f"{caller}: positions: expected a minimum for relaxed constants, got a Hessian with eigenvalue "
            f"{values[kept].min():.1e} apart from translations; relax the positions, or pass relaxed=False."
        )
    basis = vectors[:, kept]
    return basis @ ((basis.t() @ right) / values[kept][:, None])
