"""Forces and stress: first derivatives of an energy, from one recording, and a check of a model's own forces."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from scipy.spatial import cKDTree
from torch import Tensor

from hodiff.atoms.systems import Energy, MovingAtoms, require_one_energy, require_positions
from hodiff.common.module_state import untouched
from hodiff.common.options import require_callable
from hodiff.common.trees import describe, recordable
from hodiff.derivatives.bound_function import bind, leave_inference_mode
from hodiff.derivatives.recorded_gradient import recorded_value
from hodiff.errors import CheckError, HodiffWarning, InputError, levels_to_the_caller
from hodiff.functions.numpy.numpy_differences import extrapolated_difference
from hodiff.recompute.reachable import named_modules

# Longest step of an atom in differences of energies, relative to the shortest distance of two atoms.
_STEP = 1 / 16


def forces(energy: Callable[..., Any], positions: Tensor, cell: Tensor | None = None) -> Any:
    r"""Compute the forces on atoms, and with a cell the stress, from one recording of the energy.

    $$ F_i = -\frac{\partial E}{\partial r_i}, \qquad
       \sigma = \frac{1}{V} \left.\frac{\partial E(r(I+\varepsilon),\, h(I+\varepsilon))}{\partial \varepsilon}
       \right|_{\varepsilon=0} $$

    Args:
        energy: Function `energy(positions)`, or `energy(positions, cell)` with a cell, that returns the energy: a
            tensor of shape () or (1,).
        positions: Positions of shape (N, 3).
        cell: Lattice vectors h as rows, (3, 3), of which the energy must compute the shifts of periodic images; a
            warning says so if it does not depend on the cell.

    Returns:
        Forces (N, 3); with a cell the pair of forces and stress (3, 3), symmetric, positive under tension. They carry
        no graph.

    Raises:
        InputError: If an argument is invalid, or if `energy` returns something else or does not depend on the
            positions.

    Example:
        >>> import torch, hodiff
        >>> x = torch.tensor([[0.0, 0.0, 0.0], [1.5, 0.0, 0.0]])
        >>> hodiff.atoms.forces(lambda x: ((x[1] - x[0]).norm() - 1) ** 2 / 2, x)[:, 0]
        tensor([ 0.5000, -0.5000])

    Source: M. Born & K. Huang, *Dynamical Theory of Crystal Lattices* (1954), section 11.
    """
    _, found, stress = energy_gradients("atoms.forces", energy, positions, cell, follows_cell=True)
    return found if cell is None else (found, stress)


@leave_inference_mode
def energy_gradients(
    caller: str,
    energy: Callable[..., Any],
    positions: Tensor,
    cell: Tensor | None,
    *,
    follows_cell: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute energy, forces and (with a cell) stress; warn if the energy must depend on the cell and does not."""
    positions = require_positions(caller, positions)
    require_callable(caller, energy=energy)
    if cell is None:
        place = MovingAtoms.of(caller, energy, positions, None)
        value, (gradient,) = _gradients(caller, place.energy, positions)
        assert gradient is not None
        return value, -gradient, None
    cell, volume = require_cell(caller, cell, positions)
    identity = torch.eye(3, dtype=positions.dtype, device=positions.device)

    def strained(both: Tensor, change: Tensor) -> Tensor:
        x, strain = both[:-3], both[-3:]
        stretch = identity + (strain + strain.t()) / 2
        return require_one_energy(caller, energy(x @ stretch, cell @ stretch + change), 1)

    none = torch.zeros_like(identity)
    value, (gradient, by_cell) = _gradients(caller, strained, torch.cat([positions, none]), none)
    assert gradient is not None
    if follows_cell and by_cell is None:
        warnings.warn(
            f"{caller}: energy: expected an energy that depends on its argument cell, got one that does not, so that "
            "derivatives by strain miss the periodic images: compute their shifts inside of the energy, as "
            "`shifts @ cell`. Without periodic images, omit the cell.",
            HodiffWarning,
            stacklevel=levels_to_the_caller(),
        )
    return value, -gradient[:-3], gradient[-3:] / volume


def _gradients(caller: str, energy: Callable[..., Any], *leaves: Tensor) -> tuple[Tensor, list[Tensor | None]]:
    """Compute the energy and its gradients; None by a leaf that the energy does not depend on, save the first."""
    function = bind(caller, energy, leaves, argnums=tuple(range(len(leaves))), name="positions")
    # Recorded by plain autograd: models may run NumPy code on species and indices, which transforms refuse.
    with torch.no_grad(), untouched(list(named_modules(function.f))):
        recording = recorded_value(function)
        value = recording.result[0]
        found = recording.gradients([value]) if value.requires_grad else (None,)
    if found[0] is None:
        raise function.independent()
    return value.detach(), [None if each is None else each.detach() for each in found]


def require_cell(caller: str, cell: Any, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return a cell without a graph, and its volume; raise if it is not three independent vectors."""
    valid = isinstance(cell, Tensor) and cell.shape == (3, 3) and cell.dtype == positions.dtype
    volume = torch.linalg.det(cell.detach()).abs() if valid else torch.zeros(())
    if not volume > 0:
        raise InputError(
            f"{caller}: cell: expected three independent lattice vectors, a tensor of shape (3, 3) and dtype "
            f"{positions.dtype}, got {describe(cell)}; omit it for a molecule, which has no stress."
        )
    return recordable(cell.detach()).to(positions.device), volume


@leave_inference_mode
def check_forces(energy: Energy, forces: Any, positions: Tensor) -> None:
    r"""Raise unless a model's forces are the negative gradient of its energy.

    Models that predict forces directly, cut the graph, or omit a part of the energy fail. Forces may differ from the
    gradient by 2e-10 of the largest force in float64 and 6e-4 in float32. The gradient itself is compared with
    extrapolated differences of energies, along the forces and along a random direction, from 46 energies. It may differ
    by 5e-8 of the forces in float64 and 1e-3 in float32. Both tolerances grow by the rounding errors of the energy and
    the positions, and by the estimated error of the differences. `hodiff.check` searches for the cause.

    Args:
        energy: Function of the positions that returns the energy.
        forces: The model's forces (N, 3), or the function of the positions that returns them.
        positions: Positions of shape (N, 3).

    Raises:
        InputError: If an argument is invalid.
        CheckError: If the forces are not the gradient; the message names the atom with the largest difference.

    Example:
        >>> import torch, hodiff
        >>> x = torch.tensor([[0.0, 0.0, 0.0], [1.5, 0.0, 0.0]])
        >>> spring = lambda x: ((x[1] - x[0]).norm() - 1) ** 2 / 2
        >>> hodiff.atoms.check_forces(spring, hodiff.atoms.forces(spring, x), x)
        >>> try:
        ...     hodiff.atoms.check_forces(spring, torch.zeros(2, 3), x)
        ... except hodiff.CheckError as error:
        ...     print(error)
        check_forces: forces: expected minus the gradient of the energy, got another force on atom 0: they differ by
        5.0e-01, and the largest force is 5.0e-01. ...

    Source: as `forces`.
    """
    value, expected, _ = energy_gradients("check_forces", energy, positions, None)
    x = require_positions("check_forces", positions)
    with untouched(list(named_modules(forces))):
        given = forces(x.clone()) if callable(forces) else forces
    if not isinstance(given, Tensor) or given.shape != expected.shape:
        raise InputError(
            f"check_forces: forces: expected a tensor of shape {tuple(expected.shape)}, or a function that returns "
            f"one, got {describe(given)}; pass the model's forces."
        )
    given = given.detach()
    draw = torch.Generator().manual_seed(0)
    eps = max(torch.finfo(each.dtype).eps for each in (x, value, given) if each.is_floating_point())
    # The same, where the last digits of the positions differ: the change of the forces is as large as their rounding.
    near = x + 4 * torch.finfo(x.dtype).eps * x.abs().max() * torch.randn(x.shape, generator=draw).to(x)
    near_value, near_forces, _ = energy_gradients("check_forces", energy, near, None)
    size, noise = expected.norm(dim=1).max(), (near_forces - expected).double().norm().item()
    gaps = (given.to(expected) - expected).norm(dim=1)
    if not gaps.max() <= 100 * eps**0.75 * max(size.item(), given.abs().max().item()) + 4 * noise:
        raise CheckError(
            "check_forces: forces: expected minus the gradient of the energy, got another force on atom "
            f"{int(gaps.argmax())}: they differ by {gaps.max():.1e}, and the largest force is {size:.1e}. Use "
            "hodiff.atoms.forces, whose derivatives are the Hessian; a Hessian of other forces is not symmetric."
        )
    work = (expected.double() * (near - x).double()).sum()
    rounding = max(4 * eps * value.abs().item(), (near_value.double() - value.double() + work).abs().item())
    directions = {"a random direction": torch.randn(x.shape, generator=draw).to(x)}
    if size > 4 * noise:
        directions = {"the forces": expected, **directions}
    for name, direction in directions.items():
        _check_slope(energy, x, expected, direction, name, eps, rounding, 4 * noise)


def _check_slope(
    energy: Energy,
    x: Tensor,
    forces: Tensor,
    direction: Tensor,
    name: str,
    eps: float,
    rounding: float,
    noise: float,
) -> None:
    """Raise unless differences of energies along a direction agree with the forces."""
    function = MovingAtoms.of("check_forces", energy, x, None).energy
    v, step = direction / direction.norm(dim=1).max(), _STEP * shortest_distance(x)

    def rest(fraction: float) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Return the energy beyond the work of the forces, and its error."""
        end = x + fraction * step * v
        with torch.enable_grad(), untouched(modules):  # models may compute forces, too
            found = function(end.requires_grad_()).detach()
        work = (forces.double() * (end.detach() - x).double()).sum()
        return np.array((found.double() + work).item()), np.array(max(rounding, 4 * eps * found.abs().item()))

    modules = list(named_modules(energy))
    slope, error = map(float, extrapolated_difference(rest, step))
    (right, _), (middle, _), (left, _) = map(rest, (1.0, 0.0, -1.0))
    size = (forces.double().norm() * v.double().norm()).item()
    largest = size + abs(float(right - 2 * middle + left)) / step
    # A jump of the energy at the positions has no such small error. Rounding of energies and positions may have more.
    digits = 50 * eps / step
    is_smooth = error <= (0.01 + digits * x.abs().max().item()) * largest + digits * abs(float(middle))
    if not is_smooth or not abs(slope) <= 3 * eps**0.5 * size + 3 * error + noise * v.double().norm().item():
        expected = -(forces.double() * v.double()).sum().item()
        raise CheckError(
            f"check_forces: energy: expected a slope of {expected:.6g} along {name}, got {expected + slope:.6g} ± "
            f"{error:.1g} from differences of energies: the energy changes in a way that autograd does not see, or not "
            "smoothly. Run hodiff.check(energy, positions)."
        )


def shortest_distance(x: Tensor) -> float:
    """Return the shortest distance of two atoms; of a single atom, the size of its coordinates."""
    distances = cKDTree(x.double().cpu().numpy()).query(x.double().cpu().numpy(), k=2)[0][:, 1]
    found = distances[(distances > 0) & np.isfinite(distances)]
    return float(found.min()) if len(found) else float(x.abs().max()) or 1.0
