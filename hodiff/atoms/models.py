"""Energies in eV of the models of other packages, as functions of positions and cell."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hodiff.atoms.torch_sim import energies_of
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
    """Bind a model to atoms: a model or calculator of a package that hodiff knows, or a function of torch.

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


def _of_torch_sim(caller: str, model: Any, atoms: Any) -> BoundModel:
    from torch_sim.io import atoms_to_state

    state = atoms_to_state(atoms, model.device, model.dtype)
    energies = energies_of(caller, model, state)
    return BoundModel(lambda x, h: energies(x, h[None]), state.positions, state.cell[0].mT)


def _of_nequip(caller: str, calculator: Any, atoms: Any) -> BoundModel:
    parts = [each for each in calculator.model.modules() if hasattr(each, "do_derivatives")]
    if not hasattr(calculator, "atoms_to_data") or not parts:
        raise InputError(
            f"{caller}: model: expected a NequIPCalculator of an eager model, got {name_of(calculator)}, whose energy "
            "torch cannot differentiate; build the model with compile_mode 'eager'."
        )
    if calculator.length_units_to_A != 1:
        raise InputError(
            f"{caller}: model: expected a NequIPCalculator in Å, got length_units_to_A={calculator.length_units_to_A}; "
            "convert the model."
        )
    data = calculator.atoms_to_data(atoms)
    dtype, device = _kind_of(calculator.model)
    positions, cell = _tensors(atoms, dtype, device)

    def energy(positions: Tensor, cell: Tensor) -> Tensor:
        moved = {**data, "pos": positions, **({"cell": cell.reshape(1, 3, 3)} if "cell" in data else {})}
        # The model's own forces free the graph.
        before = [each.do_derivatives for each in parts]
        for each in parts:
            each.do_derivatives = False
        try:
            found: Tensor = calculator.energy_units_to_eV * calculator.model(moved)["total_energy"]
        finally:
            for each, value in zip(parts, before, strict=True):
                each.do_derivatives = value
        return found.reshape(())

    return BoundModel(energy, positions, cell)


def _of_schnetpack(caller: str, calculator: Any, atoms: Any) -> BoundModel:
    model: Any = getattr(calculator, "model", None)
    if not hasattr(calculator, "converter") or not hasattr(model, "representation"):
        raise InputError(
            f"{caller}: model: expected an SpkCalculator of a NeuralNetworkPotential, got {name_of(calculator)}; pass "
            "the calculator, which knows neighbour list and units."
        )
    inputs = calculator.converter(atoms)
    positions, cell = _tensors(atoms, *_kind_of(model))
    # Offsets of periodic images, as multiples of the lattice vectors.
    images = (inputs["_offsets"].to(positions) @ torch.linalg.pinv(cell)).round()
    unit = calculator.energy_conversion
    if calculator.position_conversion != 1:
        raise InputError(
            f"{caller}: model: expected an SpkCalculator in Angstrom, got a position unit of "
            f"{calculator.position_conversion} Angstrom; convert the model."
        )

    def energy(positions: Tensor, cell: Tensor) -> Tensor:
        moved = {**inputs, "_positions": positions, "_cell": cell[None], "_offsets": images @ cell}
        # Without the modules that compute forces and stress, which free the graph.
        parts = [each for each in model.output_modules if not getattr(each, "required_derivatives", None)]
        for part in (*model.input_modules, model.representation, *parts):
            moved = part(moved)
        found: Tensor = model.postprocess(moved)[calculator.energy_key]
        return unit * found.reshape(())

    return BoundModel(energy, positions, cell)


# Adapters by the package of the model's class. Models of torch-sim may be of other packages, too.
_PACKAGES: dict[str, Callable[[str, Any, Any], BoundModel]] = {
    "torch_sim": _of_torch_sim,
    "mace": _of_mace,
    "torchani": _of_torchani,
    "torchmdnet": _of_torchmdnet,
    "nequip": _of_nequip,
    "schnetpack": _of_schnetpack,
}
