"""Energies in eV of the models of other packages, as functions of positions and cell."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hodiff.atoms.torch_sim import energies_of
from hodiff.common.options import name_of
from hodiff.errors import InputError
from hodiff.recompute.reachable import named_modules
from hodiff.torch_internals.tensors import version_of


class BoundModel(NamedTuple):
    """A model bound to atoms of ASE: its energy, and where they are. Species and neighbours are constants.

    Attributes:
        energy: The energy in eV, a function `(positions, cell)` in Å; without a cell, in the atoms' own cell.
        positions: The atoms' positions (N, 3).
        cell: The atoms' cell (3, 3) with lattice vectors as rows; zeros, or a cell that the model needs, if they have
            none.
    """

    energy: Callable[..., Any]
    positions: Tensor
    cell: Tensor


def bind_model(caller: str, model: Any, atoms: Any) -> BoundModel:
    """Bind a model to atoms: a model or calculator of a package that hodiff knows, or a function of torch.

    Args:
        caller: The public function, for error messages.
        model: The model, or a function `(positions, cell, atoms) -> energy`.
        atoms: `ase.Atoms`.

    Returns:
        The bound model.

    Raises:
        InputError: If the model is none of these, or if positions or cell are not finite or not complete.
    """
    bind = adapter_of(caller, model)
    require_atoms(caller, atoms)
    energy, positions, own_cell = bind(caller, model, atoms)
    return BoundModel(lambda x, cell=None: energy(x, own_cell if cell is None else cell), positions, own_cell)


def adapter_of(caller: str, model: Any) -> Callable[[str, Any, Any], BoundModel]:
    """Return the function that binds a model, or raise if hodiff does not know it."""
    for package, bind in _PACKAGES.items():
        if any(f"{each.__module__}.".startswith(f"{package}.") for each in type(model).__mro__):
            return bind
    found = name_of(model)
    if callable(model) and not hasattr(model, "get_potential_energy"):
        try:
            inspect.signature(getattr(model, "forward", model)).bind(None, None, None)
        except TypeError:
            found += ", which does not take these three arguments"
        except ValueError:  # no signature
            return _of_function
        else:
            if not isinstance(model, (torch.jit.ScriptModule, torch.jit.ScriptFunction)):
                return _of_function
            found += ", a script, which takes no ase.Atoms"
    known = ", ".join(package for package in _PACKAGES if "." not in package)
    raise InputError(
        f"{caller}: model: expected a model of {known}, or a function (positions, cell, atoms) that returns the "
        f"energy in eV, got {found}; write such a function, which calls your model with the tensor `positions`."
    )


def require_atoms(caller: str, atoms: Any) -> None:
    """Raise unless atoms have finite positions, and lattice vectors along their periodic directions."""
    from ase import Atoms

    if not isinstance(atoms, Atoms):
        raise InputError(f"{caller}: atoms: expected ase.Atoms, got {type(atoms).__name__}; pass an ase.Atoms.")
    for name, each in (("positions", atoms.positions), ("cell", atoms.cell.array)):
        wrong = np.flatnonzero(~np.isfinite(each).all(1))
        if len(wrong):
            # Neighbour lists find nothing at NaN: forces and Hessian would be zero.
            row = f"{'lattice vector' if name == 'cell' else 'atom'} {wrong[0]}"
            raise InputError(
                f"{caller}: atoms: expected finite {name}, got {each[wrong[0]].tolist()} for {row}; repair the "
                "structure, or take a shorter step."
            )
    if np.linalg.matrix_rank(atoms.cell.array[atoms.pbc]) < sum(atoms.pbc):
        raise InputError(
            f"{caller}: atoms: expected independent lattice vectors along periodic directions, got "
            f"pbc={atoms.pbc.tolist()} and the cell {atoms.cell.array.tolist()}; set the cell, or pbc=False."
        )


def state_of_model(model: Any) -> list[Any]:
    """Return what changes with a model's weights, and with a calculator's settings, such as the head of MACE."""
    roots, settings = [model], {}
    if hasattr(model, "get_potential_energy"):
        roots = [getattr(model, "model", None), *(getattr(model, "models", None) or ())]
        kinds = (str, int, float, bool, list)
        settings = {name: repr(each) for name, each in vars(model).items() if isinstance(each, kinds)}
    modules = [module for root in roots for module in named_modules(root)]
    weights = [each for of in modules for each in (*of.parameters(recurse=False), *of.buffers(recurse=False))]
    return [settings, *((id(each), 0 if each.is_inference() else version_of(each)) for each in weights)]


def _of_function(caller: str, model: Any, atoms: Any) -> BoundModel:
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
    if calculator.use_compile or any(getattr(calculator, f"pad_num_{what}", 0) for what in ("atoms", "edges")):
        raise InputError(
            f"{caller}: model: expected a MACECalculator without compile_mode and padding, got one with a padded "
            "graph; omit compile_mode, pad_num_atoms and pad_num_edges."
        )
    if "Energy" not in calculator.model_type and "Dipole" in calculator.model_type:
        raise InputError(
            f"{caller}: model: expected a MACECalculator with energies, got the model_type {calculator.model_type}; "
            "pass a model of energies."
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
        energies = [each(dict(moved), compute_force=False)["energy"] for each in calculator.models]
        return unit * torch.stack(energies).sum(0).reshape(())

    # MACE gives atoms without a cell one of its own.
    return BoundModel(energy, batch["positions"].detach(), batch["cell"].detach().view(3, 3))


def _of_torchani(caller: str, model: Any, atoms: Any) -> BoundModel:
    from ase.units import Hartree

    model = getattr(model, "model", model)
    positions, cell = _tensors(atoms, *_kind_of(model))
    if any(atoms.pbc):  # TorchANI inverts the cell, also that of a slab.
        cell = torch.as_tensor(atoms.cell.complete().array).to(cell)
    species = torch.as_tensor(atoms.numbers, device=positions.device).long()[None]
    pbc = torch.as_tensor(atoms.pbc, device=positions.device)

    def energy(positions: Tensor, cell: Tensor) -> Tensor:
        found = model((species, positions[None]), cell, pbc) if any(atoms.pbc) else model((species, positions[None]))
        energy: Tensor = Hartree * found.energies
        return energy.reshape(())

    return BoundModel(energy, positions, cell)


def _of_torchmdnet(caller: str, model: Any, atoms: Any) -> BoundModel:
    positions, cell = _tensors(atoms, *_kind_of(model))
    cutoff = float(getattr(getattr(model, "representation_model", None), "cutoff_upper", 0))
    # TorchMD-Net looks at the nearest image of each atom only, in all three directions.
    if any(atoms.pbc) and not (
        all(atoms.pbc) and 2 * cutoff <= 1 / np.linalg.norm(atoms.cell.reciprocal(), axis=1).max()
    ):
        raise InputError(
            f"{caller}: atoms: expected a cell of at least twice the cutoff of {cutoff} Å, periodic in all directions, "
            f"or no cell, as TorchMD-Net takes one image of each atom, got pbc={atoms.pbc.tolist()} and the cell "
            f"{atoms.cell.array.tolist()}; repeat the cell, or add a vacuum."
        )
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
    return BoundModel(lambda x, h: energies(x, h[None]).reshape(()), state.positions, state.cell[0].mT)


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


def _of_hodiff(caller: str, calculator: Any, atoms: Any) -> BoundModel:
    return bind_model(caller, calculator.model, atoms)


# Adapters by the package of the model's class. Models of torch-sim may be of other packages, too.
_PACKAGES: dict[str, Callable[[str, Any, Any], BoundModel]] = {
    "torch_sim": _of_torch_sim,
    "mace": _of_mace,
    "torchani": _of_torchani,
    "torchmdnet": _of_torchmdnet,
    "nequip": _of_nequip,
    "schnetpack": _of_schnetpack,
    "hodiff.atoms.ase": _of_hodiff,
}
