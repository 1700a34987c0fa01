"""Energies as scalar functions of the atoms that move: free atoms, and several systems in one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hodiff.common.options import require_callable
from hodiff.common.trees import describe, recordable
from hodiff.errors import InputError

Energy = Callable[[Tensor], Any]
Atoms = Tensor | Sequence[int] | None


def require_positions(caller: str, positions: Any, *, batches: bool = False) -> Tensor:
    """Return positions without a graph, or raise unless they have shape (N, 3), or (B, N, 3) if `batches`."""
    wanted = "(N, 3) or (B, N, 3)" if batches else "(N, 3)"
    if (
        not isinstance(positions, Tensor)
        or positions.ndim not in ((2, 3) if batches else (2,))
        or positions.shape[-1] != 3
        or not positions.is_floating_point()
        or not positions.numel()
    ):
        raise InputError(
            f"{caller}: positions: expected a floating-point tensor of shape {wanted}, got {describe(positions)}; "
            "convert NumPy arrays by torch.from_numpy."
        )
    return recordable(positions.detach())


def atom_indices(caller: str, argument: str, atoms: Any, count: int) -> Tensor | None:
    """Return indices of selected atoms, from indices or a mask; None if all are selected."""
    if atoms is None:
        return None
    try:
        found = torch.as_tensor(atoms)
    except (TypeError, ValueError, RuntimeError):
        found = torch.empty(0, 0)
    if found.dtype == torch.bool and found.shape == (count,):
        found = found.nonzero().flatten()
    integer = not found.is_floating_point() and not found.is_complex() and found.dtype != torch.bool
    valid = integer and found.ndim == 1 and found.numel() and bool((found >= 0).all() and (found < count).all())
    if not valid or len(found.unique()) < len(found):
        raise InputError(
            f"{caller}: {argument}: expected indices from 0 to {count - 1} without repetition, or a mask of {count} "
            f"bools, with at least one atom, got {describe(atoms)}; omit it to select all atoms."
        )
    return found.long()


def require_one_energy(caller: str, value: Any, count: int) -> Tensor:
    """Return the sum of the energies of `count` systems, or raise if `energy` returned something else."""
    shapes = ((), (count,), (count, 1))
    if not isinstance(value, Tensor) or tuple(value.shape) not in shapes or not value.is_floating_point():
        wanted = "one energy, a tensor of shape () or (1,)" if count == 1 else f"{count} energies, shape ({count},)"
        raise InputError(
            f"{caller}: energy: expected a function that returns {wanted}, got {describe(value)}; return the total "
            "energy, without forces or a dictionary."
        )
    return value.sum()


@dataclass(frozen=True)
class MovingAtoms:
    """The coordinates that are differentiated, and the energy as their scalar function.

    Attributes:
        point: Positions of the free atoms, (F, 3) or (B, F, 3).
        energy: The total energy as a function of the point.
        system: Number of the system of each free atom, flattened.
        count: Number of systems.
    """

    point: Tensor
    energy: Energy
    system: Tensor
    count: int

    @staticmethod
    def of(caller: str, energy: Any, positions: Tensor, free: Tensor | None, systems: Any = None) -> MovingAtoms:
        """Validate the systems and bind the fixed atoms."""
        require_callable(caller, energy=energy)
        atoms = positions.shape[-2]
        if positions.ndim == 3:
            if systems is not None:
                raise InputError(
                    f"{caller}: systems: expected None for positions of shape (B, N, 3), which are B systems, got "
                    f"{describe(systems)}; omit it."
                )
            count = len(positions)
            system = torch.arange(count).repeat_interleave(atoms if free is None else len(free))
        else:
            system = torch.zeros(atoms, dtype=torch.long) if systems is None else _numbers(caller, systems, atoms)
            count = int(system.max()) + 1
            system = system if free is None else system[free.cpu()]
        place = None if free is None else free.to(positions.device)

        def total(point: Tensor) -> Tensor:
            # A copy, as energies may write into their argument.
            whole = point.clone() if place is None else positions.index_copy(-2, place, point)
            return require_one_energy(caller, energy(whole), count)

        point = positions if place is None else positions.index_select(-2, place)
        return MovingAtoms(point, total, system, count)

    def members(self) -> list[Tensor]:
        """Return the flat coordinates of each system's free atoms."""
        coordinates = torch.arange(self.point.numel()).view(-1, 3)
        return [coordinates[self.system == each].flatten() for each in range(self.count)]


def _numbers(caller: str, systems: Any, atoms: int) -> Tensor:
    if isinstance(systems, Tensor) and systems.shape == (atoms,) and systems.dtype in (torch.int32, torch.int64):
        numbers = systems.detach().cpu().long()
        if int(numbers.min()) == 0 and len(numbers.unique()) == int(numbers.max()) + 1:
            return numbers
    raise InputError(
        f"{caller}: systems: expected an integer tensor of shape ({atoms},), the number of each atom's system, counted "
        f"from 0, got {describe(systems)}; pass the index that your model calls batch."
    )
