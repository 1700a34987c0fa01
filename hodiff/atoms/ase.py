"""ASE: a calculator with exact Hessians, for vibrations, thermochemistry, and searches of transition states."""

from __future__ import annotations

import reprlib
from typing import Any

import numpy as np
import torch

from hodiff.atoms.forces import energy_gradients
from hodiff.atoms.hessian import hessian
from hodiff.atoms.models import BoundModel, adapter_of, bind_model, require_atoms, state_of_model
from hodiff.common.options import require_chunk_size
from hodiff.derivatives.bound_function import leave_inference_mode
from hodiff.errors import InputError

try:
    from ase.calculators.calculator import Calculator, all_changes
    from ase.constraints import FixAtoms, FixCartesian
    from ase.stress import full_3x3_to_voigt_6_stress
    from ase.vibrations.data import VibrationsData
except ImportError as error:
    raise ImportError(
        "hodiff.atoms.ase: expected the package ase, got none; install it by pip install 'hodiff[atoms]'."
    ) from error

Array = np.ndarray[Any, Any]
_CALLER = "atoms.ase.calculator"


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
        InputError: If an argument is invalid or `model` is none of these; on use, if the model cannot be
            differentiated, or if positions, cell or results are not finite.

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


def energy_of(model: Any, atoms: Any) -> BoundModel:
    r"""Return a model's energy as a function of positions and cell, for the functions of `hodiff.atoms` and for losses.

    Species and neighbours are those of the atoms, and constants: bind again if atoms move far.

    Args:
        model: As in `calculator`, or a `HessianCalculator`.
        atoms: `ase.Atoms`.

    Returns:
        A named tuple `(energy, positions, cell)`: the function `energy(positions)` or `energy(positions, cell)` in eV,
        a tensor of shape (), and the atoms' positions (N, 3) and cell (3, 3) in Å, tensors in the model's dtype and on
        its device.

    Raises:
        InputError: If the model is none that hodiff knows, or positions or cell are not finite.

    Example:
        >>> import hodiff.atoms.ase, torch
        >>> from ase import Atoms
        >>> def spring(positions, cell, atoms):
        ...     return 143.9 * ((positions[1] - positions[0]).norm() - 1.098) ** 2 / 2
        >>> energy, positions, cell = hodiff.atoms.ase.energy_of(spring, Atoms("N2", [[0, 0, 0], [0, 0, 1.098]]))
        >>> v = torch.tensor([[0, 0, 0], [0, 0, 1.0]], dtype=torch.float64)
        >>> hodiff.atoms.hvp(energy, positions, v)[:, 2]
        tensor([-143.9000,  143.9000], dtype=torch.float64)

    Source: as `hodiff.atoms.hessian`.
    """
    with torch.inference_mode(False):
        return bind_model("atoms.ase.energy_of", model, atoms)


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
        require_chunk_size(_CALLER, "chunk_size", chunk_size)
        adapter_of(_CALLER, model)
        super().__init__()
        self.model = model
        self.chunk_size = chunk_size
        self._state: Any = None

    def check_state(self, atoms: Any, tol: float = 1e-15) -> list[str]:
        """Return what changed since the last calculation: also weights and settings of the model, and `atoms.info`."""
        changes: list[str] = super().check_state(atoms, tol)
        return changes if changes or self._state == self._state_of(atoms) else ["model"]

    def get_property(self, name: str, atoms: Any = None, allow_calculation: bool = True) -> Any:
        """Return a property; the Hessian of all atoms is not kept in `results`, whose names are those of ASE."""
        atoms = self.atoms if atoms is None else atoms
        if name != "hessian":
            return super().get_property(name, atoms, allow_calculation)
        return self._hessian(self._atoms_or_last("get_property", atoms), None) if allow_calculation else None

    @leave_inference_mode
    def calculate(self, atoms: Any = None, properties: Any = ("energy",), system_changes: Any = all_changes) -> None:
        """Compute energy and forces, and with a cell the stress, which costs little beside them."""
        super().calculate(atoms, properties, system_changes)
        bound = bind_model(_CALLER, self.model, self.atoms)
        cell = bound.cell if self.atoms.cell.rank == 3 else None
        periodic = bool(any(self.atoms.pbc))
        value, forces, stress = energy_gradients(_CALLER, bound.energy, bound.positions, cell, follows_cell=periodic)
        energy = _array("energy", value).item()
        self.results.update(energy=energy, free_energy=energy, forces=_array("forces", forces))
        if stress is not None:
            self.results["stress"] = full_3x3_to_voigt_6_stress(_array("stress", stress))
        self._state = self._state_of(self.atoms)

    def get_hessian(self, atoms: Any = None, free: Any = None) -> Array:
        """Compute the Hessian of the free atoms in eV / Å².

        Args:
            atoms: `ase.Atoms`; by default the atoms of the last calculation.
            free: Atoms that move: indices, of which negative ones count from the end, a mask, or a slice. By default
                those that the constraints `FixAtoms` leave free, and `FixCartesian` of all three directions.

        Returns:
            Array (F, 3, F, 3), float64; `get_property("hessian", atoms)` is that of all atoms.

        Raises:
            InputError: If there are no atoms, none that moves, or constraints that do not fix whole atoms; or if the
                Hessian is not finite.
        """
        atoms = self._atoms_or_last("get_hessian", atoms)
        return self._hessian(atoms, _free_atoms("get_hessian", atoms, free))

    def hessian_function(self, atoms: Any) -> Array:
        """Compute the Hessian of all atoms as a matrix (3 N, 3 N): the argument `hessian_function` of Sella."""
        return self._hessian(atoms, None).reshape(3 * len(atoms), 3 * len(atoms))

    def vibrations(self, atoms: Any = None, free: Any = None) -> Any:
        """Return `ase.vibrations.VibrationsData` of the free atoms: frequencies, modes, zero-point energy.

        Args:
            atoms: As in `get_hessian`.
            free: As in `get_hessian`.
        """
        atoms = self._atoms_or_last("vibrations", atoms)
        # In the order of the atoms, which VibrationsData takes for granted.
        chosen = np.sort(_free_atoms("vibrations", atoms, free))
        return VibrationsData(atoms, self._hessian(atoms, chosen), indices=chosen)

    def _atoms_or_last(self, method: str, atoms: Any) -> Any:
        atoms = self.atoms if atoms is None else atoms
        if atoms is None:
            raise InputError(
                f"{_CALLER}: {method}: atoms: expected atoms, or a calculation before, got None; pass {method}(atoms)."
            )
        require_atoms(f"{_CALLER}: {method}", atoms)
        return atoms

    @leave_inference_mode
    def _hessian(self, atoms: Any, free: Array | None) -> Array:
        bound = bind_model(_CALLER, self.model, atoms)
        chosen = None if free is None else torch.from_numpy(free)
        return _array("Hessian", hessian(bound.energy, bound.positions, free=chosen, chunk_size=self.chunk_size))

    def _state_of(self, atoms: Any) -> Any:
        # ASE compares positions, numbers, cell, charges and magnetic moments; momenta change the state in no model.
        info = {
            name: each.tobytes() if isinstance(each, np.ndarray) else repr(each) for name, each in atoms.info.items()
        }
        arrays = {name: each.tobytes() for name, each in atoms.arrays.items() if name != "momenta"}
        return info, arrays, state_of_model(self.model)


def _free_atoms(method: str, atoms: Any, free: Any) -> Array:
    """Return the indices of the atoms that move."""
    everything = np.arange(len(atoms))
    if free is not None:
        try:
            selection = free if isinstance(free, slice) else np.asarray(free if hasattr(free, "__array__") else [*free])
            chosen: Array = everything[selection]
        except (IndexError, TypeError, ValueError):
            chosen = everything[:0]
        if chosen.ndim != 1 or not len(chosen) or len(np.unique(chosen)) < len(chosen):
            raise InputError(
                f"{_CALLER}: {method}: free: expected indices from {-len(atoms)} to {len(atoms) - 1} without "
                f"repetition, a mask of {len(atoms)} bools, or a slice, with at least one atom, got "
                f"{reprlib.repr(free)}; omit it to select the atoms that no constraint fixes."
            )
        return chosen
    kinds = sorted({type(each).__name__ for each in atoms.constraints if not _fixes_whole_atoms(each)})
    if kinds:
        raise InputError(
            f"{_CALLER}: {method}: atoms: expected constraints that fix whole atoms, FixAtoms, got {', '.join(kinds)}; "
            f"pass free=, such as free=range({len(atoms)}) for the Hessian of all atoms without constraints."
        )
    chosen = np.array(VibrationsData.indices_from_constraints(atoms), dtype=int)
    if not len(chosen):
        raise InputError(
            f"{_CALLER}: {method}: atoms: expected an atom that moves, got constraints that fix all {len(atoms)}; "
            "remove a constraint, or pass free=."
        )
    return chosen


def _fixes_whole_atoms(constraint: Any) -> bool:
    return isinstance(constraint, FixAtoms) or (isinstance(constraint, FixCartesian) and bool(constraint.mask.all()))


def _array(name: str, x: torch.Tensor) -> Array:
    found: Array = x.detach().double().cpu().numpy()
    wrong = int((~np.isfinite(found)).sum())
    if wrong:
        raise InputError(
            f"{_CALLER}: atoms: expected atoms at which energy, forces and Hessian are finite, got NaN or Inf in "
            f"{wrong} of {found.size} entries of the {name}; move atoms at one place apart, or check the model."
        )
    return found
