"""Energies in eV of the models of other packages, as functions of positions and cell."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hodiff.common.options import name_of
from hodiff.errors import InputError


@dataclass(frozen=True)
class BoundModel:
    """A model bound to atoms of ASE; species and neighbours are constants.

    Attributes:
        energy: The energy in eV, a function of positions and cell in Å.
        positions: The atoms' positions (N, 3).
        cell: The atoms' cell (3, 3); zeros if the atoms have none.
    """

    energy: Callable[[Tensor, Tensor], Any]
    positions: Tensor
    cell: Tensor

    def of_positions(self, positions: Tensor) -> Any:
        """Compute the energy in the atoms' own cell."""
        return self.energy(positions, self.cell)


def bind_model(caller: str, model: Any, atoms: Any) -> BoundModel:
    """Bind a model to atoms: a calculator of MACE, a model of TorchANI or TorchMD-Net, or a function of torch.

    Args:
        caller: The public function, for error messages.
        model: The model, or a function `(positions, cell, atoms) -> energy`.
        atoms: `ase.Atoms`.

    Returns:
        The bound model.

    Raises:
        InputError: If the model is none of these.
    """
    for package, bind in _PACKAGES.items():
        if any(each.__module__.partition(".")[0] == package for each in type(model).__mro__):
            return bind(caller, model, atoms)
    if hasattr(model, "get_potential_energy") or not callable(model):
        known = ", ".join(_PACKAGES)
        raise InputError(
            f"{caller}: model: expected a model of {known}, or a function (positions, cell, atoms) that returns the "
            f"energy in eV, got {name_of(model)}; write such a function, which calls your model with the tensor "
            "`positions`."
        )
    positions, cell = _tensors(atoms, *_kind_of(model))
    return BoundModel(lambda x, h: model(x, h, atoms), positions, cell)


def _kind_of(model: Any) -> tuple[torch.dtype, Any]:
    """Return dtype and device of a model's parameters; float64 on the CPU if it has none."""
    for parameter in model.parameters() if hasattr(model, "parameters") else ():
        if parameter.is_floating_point():
            return parameter.dtype, parameter.device
    return torch.float64, "cpu"


def _tensors(atoms: Any, dtype: torch.dtype, device: Any) -> tuple[Tensor, Tensor]:
    positions, cell = (torch.as_tensor(each, device=device) for each in (atoms.positions, atoms.cell.array))
    return positions.to(dtype), cell.to(dtype)


def _of_mace(caller: str, calculator: Any, atoms: Any) -> BoundModel:
    if not hasattr(calculator, "_atoms_to_batch"):
        raise InputError(
            f"{caller}: model: expected a MACECalculator, got {name_of(calculator)}; pass "
            "MACECalculator(models=model, device=...), which knows the cutoff and the elements."
        )
    if calculator.use_compile:
        raise InputError(
            f"{caller}: model: expected a MACECalculator without compile_mode, got one with it, which pads the graph; "
            "omit compile_mode."
        )
    dtype, device = _kind_of(calculator.models[0])
    # The same as `calculate` of the calculator passes to its models; MACE has no public function for it.
    batch = {
        name: each.to(device, dtype if each.is_floating_point() else None) if isinstance(each, Tensor) else each
        for name, each in calculator._atoms_to_batch(atoms).to_dict().items()  # noqa: SLF001
    }
    unit = calculator.energy_units_to_eV / len(calculator.models)
    images, length = batch["unit_shifts"], calculator.length_units_to_A
    if length != 1:
        raise InputError(
            f"{caller}: model: expected a MACECalculator in Å, got length_units_to_A={length}; convert the model."
        )

    def energy(positions: Tensor, cell: Tensor) -> Tensor:
        moved = {**batch, "positions": positions, "cell": cell, "shifts": images @ cell}
        return unit * torch.stack([each(dict(moved), compute_force=False)["energy"] for each in calculator.models]).sum(
            0
        )

    # MACE gives atoms without a cell one of its own.
    return BoundModel(energy, batch["positions"].detach(), batch["cell"].detach().view(3, 3))


def _of_torchani(caller: str, model: Any, atoms: Any) -> BoundModel:
    from ase.units import Hartree

    model = getattr(model, "model", model)
    positions, cell = _tensors(atoms, *_kind_of(model))
    species = torch.as_tensor(atoms.numbers, device=positions.device).long()[None]
    pbc = torch.as_tensor(atoms.pbc, device=positions.device)

    def energy(positions: Tensor, cell: Tensor) -> Tensor:
        found = model((species, positions[None]), cell, pbc) if any(atoms.pbc) else model((species, positions[None]))
        return Hartree * found.energies

    return BoundModel(energy, positions, cell)


def _of_torchmdnet(caller: str, model: Any, atoms: Any) -> BoundModel:
    positions, cell = _tensors(atoms, *_kind_of(model))
    numbers = torch.as_tensor(atoms.numbers, device=positions.device).long()

    def energy(positions: Tensor, cell: Tensor) -> Tensor:
        # The gradient that the model computes itself would be recorded without use.
        derivative, model.derivative = model.derivative, False
        try:
            found: Tensor = model(numbers, positions, box=cell if any(atoms.pbc) else None)[0]
        finally:
            model.derivative = derivative
        return found.reshape(())

    return BoundModel(energy, positions, cell)


# Adapters by the package of the model's class.
_PACKAGES: dict[str, Callable[[str, Any, Any], BoundModel]] = {
    "mace": _of_mace,
    "torchani": _of_torchani,
    "torchmdnet": _of_torchmdnet,
}
