"""Forces and stress: first derivatives of an energy, from one recording, and a check of a model's own forces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hodiff.atoms.systems import Energy, MovingAtoms, require_one_energy, require_positions
from hodiff.common.module_state import untouched
from hodiff.common.options import require_callable
from hodiff.common.trees import describe
from hodiff.derivatives.bound_function import bind
from hodiff.derivatives.recorded_gradient import recorded_value
from hodiff.errors import CheckError, InputError
from hodiff.recompute.reachable import named_modules


def forces(energy: Callable[..., Any], positions: Tensor, cell: Tensor | None = None) -> Any:
    r"""Compute the forces on atoms, and with a cell the stress, from one recording of the energy.

    $$ F_i = -\frac{\partial E}{\partial r_i}, \qquad
       \sigma = \frac{1}{V} \left.\frac{\partial E(r(I+\varepsilon),\, h(I+\varepsilon))}{\partial \varepsilon}
       \right|_{\varepsilon=0} $$

    Args:
        energy: Function `energy(positions)`, or `energy(positions, cell)` with a cell, that returns the energy: a
            tensor of shape () or (1,).
        positions: Positions of shape (N, 3).
        cell: Lattice vectors h as rows, (3, 3).

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
    _, found, stress = energy_gradients("atoms.forces", energy, positions, cell)
    return found if cell is None else (found, stress)


def energy_gradients(
    caller: str, energy: Callable[..., Any], positions: Tensor, cell: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute energy, forces and (with a cell) stress."""
    positions = require_positions(caller, positions)
    require_callable(caller, energy=energy)
    if cell is None:
        place = MovingAtoms.of(caller, energy, positions, None)
        gradient, value = _gradient(caller, place.energy, positions)
        return value, -gradient, None
    cell, volume = require_cell(caller, cell, positions)
    identity = torch.eye(3, dtype=positions.dtype, device=positions.device)

    def strained(both: Tensor) -> Tensor:
        x, strain = both[:-3], both[-3:]
        stretch = identity + (strain + strain.t()) / 2
        return require_one_energy(caller, energy(x @ stretch, cell @ stretch), 1)

    gradient, value = _gradient(caller, strained, torch.cat([positions, torch.zeros_like(identity)]))
    return value, -gradient[:-3], gradient[-3:] / volume


def _gradient(caller: str, energy: Energy, x: Tensor) -> tuple[Tensor, Tensor]:
    function = bind(caller, energy, (x,), name="positions")
    # Recorded by plain autograd: models may run NumPy code on species and indices, which transforms refuse.
    with torch.no_grad(), untouched(list(named_modules(function.f))):
        recording = recorded_value(function)
        value = recording.result[0]
        found = recording.gradients([value])[0] if value.requires_grad else None
    if found is None:
        raise function.independent()
    return found.detach(), value.detach()


def require_cell(caller: str, cell: Any, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return a cell without a graph, and its volume; raise if it is not three independent vectors."""
    valid = isinstance(cell, Tensor) and cell.shape == (3, 3) and cell.dtype == positions.dtype
    volume = torch.linalg.det(cell.detach()).abs() if valid else torch.zeros(())
    if not volume > 0:
        raise InputError(
            f"{caller}: cell: expected three independent lattice vectors, a tensor of shape (3, 3) and dtype "
            f"{positions.dtype}, got {describe(cell)}; omit it for a molecule, which has no stress."
        )
    return cell.detach().to(positions.device), volume


def check_forces(energy: Energy, forces: Any, positions: Tensor) -> None:
    r"""Raise unless a model's forces are the negative gradient of its energy.

    Models that predict forces directly, cut the graph, or omit a part of the energy fail. The gradient itself is
    compared with a difference of energies along the forces. `hodiff.check` searches for the cause.

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
    x = positions.detach()
    given = forces(x.clone()) if callable(forces) else forces
    if not isinstance(given, Tensor) or given.shape != expected.shape:
        raise InputError(
            f"check_forces: forces: expected a tensor of shape {tuple(expected.shape)}, or a function that returns "
            f"one, got {describe(given)}; pass the model's forces."
        )
    size, eps = expected.norm(dim=1).max(), torch.finfo(x.dtype).eps
    gaps = (given.detach().to(expected) - expected).norm(dim=1)
    if not gaps.max() <= 100 * eps**0.75 * max(size.item(), given.detach().abs().max().item()):
        raise CheckError(
            "check_forces: forces: expected minus the gradient of the energy, got another force on atom "
            f"{int(gaps.argmax())}: they differ by {gaps.max():.1e}, and the largest force is {size:.1e}. Use "
            "hodiff.atoms.forces, whose derivatives are the Hessian; a Hessian of other forces is not symmetric."
        )
    # Along the forces, where the slope is their length.
    length, step = expected.norm(), eps ** (1 / 3) * x.abs().max().clamp_min(1)
    if length == 0:
        return
    ends = [require_one_energy("check_forces", energy(x + h * expected / length), 1).detach() for h in (step, -step)]
    slope = (ends[1] - ends[0]) / (2 * step)
    if not (slope - length).abs() <= 1e-3 * length + 20 * eps * value.abs() / step:
        raise CheckError(
            f"check_forces: energy: expected a slope of {length:.6g} along the forces, got {slope:.6g} from "
            "differences of energies: the energy changes in a way that autograd does not see, or not smoothly. Run "
            "hodiff.check(energy, positions)."
        )
