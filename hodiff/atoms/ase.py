"""ASE: a calculator with exact Hessians, for vibrations, thermochemistry, and searches of transition states."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from hodiff.atoms.forces import energy_gradients
from hodiff.atoms.hessian import hessian
from hodiff.atoms.models import bind_model
from hodiff.common.options import require_chunk_size
from hodiff.errors import InputError

try:
    from ase.calculators.calculator import Calculator, all_changes
    from ase.stress import full_3x3_to_voigt_6_stress
    from ase.vibrations.data import VibrationsData
except ImportError as error:
    raise ImportError(
        "hodiff.atoms.ase: expected the package ase, got none; install it by pip install 'hodiff[atoms]'."
    ) from error

Array = np.ndarray[Any, Any]


def calculator(model: Any, *, chunk_size: int | str | None = "auto") -> HessianCalculator:
    r"""Create an ASE calculator whose forces, stress and Hessian are derivatives of a model's energy.

    $$ F = -\frac{\partial E}{\partial r}, \qquad H = \frac{\partial^2 E}{\partial r^2} $$

    Args:
        model: One of:

            - a `MACECalculator` of MACE;
            - a model of TorchANI, such as `torchani.models.ANI2x()`, or its ASE calculator;
            - a model of TorchMD-Net with energies in eV;
            - a `NequIPCalculator` of an eager NequIP model, or an `SpkCalculator` of SchNetPack;
            - a model of torch-sim;
            - a function `(positions, cell, atoms)` that returns the energy in eV: positions (N, 3) and cell (3, 3) are
              tensors in Å that it must use for what is differentiated; it may read species, flags and neighbour lists
              from the `ase.Atoms`. Tensors have the dtype of its parameters if it is a module, else float64.
        chunk_size: As in `hodiff.atoms.hessian`.

    Returns:
        A `HessianCalculator`.

    Raises:
        InputError: If an argument is invalid; on use, if `model` is none of these.

    Example:
        >>> import hodiff.atoms.ase
        >>> from ase import Atoms
        >>> def spring(positions, cell, atoms):
        ...     return 143.9 * ((positions[1] - positions[0]).norm() - 1.098) ** 2 / 2
        >>> nitrogen = Atoms("N2", [[0, 0, 0], [0, 0, 1.098]], calculator=hodiff.atoms.ase.calculator(spring))
        >>> nitrogen.calc.get_hessian(nitrogen).shape
        (2, 3, 2, 3)
        >>> f"{nitrogen.calc.vibrations(nitrogen).get_frequencies()[-1].real:.0f}"  # in 1/cm
        '2364'

    Source: as `hodiff.atoms.hessian`.
    """
    return HessianCalculator(model, chunk_size=chunk_size)


class HessianCalculator(Calculator):
    """A calculator of ASE with exact Hessians; `calculator` creates it.

    Args:
        model: As in `calculator`.
        chunk_size: As in `calculator`.

    Raises:
        InputError: If the chunk size is invalid.
    """

    implemented_properties = ("energy", "free_energy", "forces", "stress", "hessian")

    def __init__(self, model: Any, *, chunk_size: int | str | None = "auto"):
        require_chunk_size("atoms.ase.calculator", "chunk_size", chunk_size)
        super().__init__()
        self.model = model
        self.chunk_size = chunk_size

    def calculate(self, atoms: Any = None, properties: Any = ("energy",), system_changes: Any = all_changes) -> None:
        """Compute energy and forces, with a cell the stress, and the Hessian of all atoms if it is asked for."""
        super().calculate(atoms, properties, system_changes)
        bound = bind_model("atoms.ase.calculator", self.model, self.atoms)
        periodic = self.atoms.cell.rank == 3
        energy, cell = (bound.energy, bound.cell) if periodic else (bound.of_positions, None)
        value, forces, stress = energy_gradients("atoms.ase.calculator", energy, bound.positions, cell)
        self.results.update(energy=value.item(), free_energy=value.item(), forces=_array(forces))
        if stress is not None:
            self.results["stress"] = full_3x3_to_voigt_6_stress(_array(stress))
        if "hessian" in properties:
            self.results["hessian"] = self._hessian(self.atoms, None)

    def get_hessian(self, atoms: Any = None, free: Any = None) -> Array:
        """Compute the Hessian of the free atoms in eV / Å².

        Args:
            atoms: `ase.Atoms`; by default the atoms of the last calculation.
            free: Indices of the atoms that move; by default those that the constraints `FixAtoms` and `FixCartesian`
                of the atoms leave free, as in `ase.vibrations.VibrationsData`.

        Returns:
            Array (F, 3, F, 3), float64; `get_property("hessian", atoms)` is that of all atoms.

        Raises:
            InputError: If there are no atoms.
        """
        atoms = self.atoms if atoms is None else atoms
        if atoms is None:
            raise InputError(
                "atoms.ase.calculator: get_hessian: atoms: expected atoms, or a calculation before, got None; pass "
                "get_hessian(atoms)."
            )
        return self._hessian(atoms, VibrationsData.indices_from_constraints(atoms) if free is None else free)

    def hessian_function(self, atoms: Any) -> Array:
        """Compute the Hessian of all atoms as a matrix (3 N, 3 N): the argument `hessian_function` of Sella."""
        return self._hessian(atoms, None).reshape(3 * len(atoms), 3 * len(atoms))

    def vibrations(self, atoms: Any) -> Any:
        """Return `ase.vibrations.VibrationsData` of the free atoms: frequencies, modes, zero-point energy."""
        return VibrationsData(atoms, self.get_hessian(atoms))

    def _hessian(self, atoms: Any, free: Any) -> Array:
        bound = bind_model("atoms.ase.calculator", self.model, atoms)
        chosen = None if free is None else torch.as_tensor(np.asarray(free))
        return _array(hessian(bound.of_positions, bound.positions, free=chosen, chunk_size=self.chunk_size))


def _array(x: torch.Tensor) -> Array:
    found: Array = x.detach().double().cpu().numpy()
    return found
