"""Models of MACE, TorchANI and TorchMD-Net: Hessians against differences of their forces and their own Hessians."""

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from ase.build import bulk, molecule
from doors.atoms.comparisons import compare_loss_by_weights
from doors.atoms.differences import hessian_by_differences
from doors.atoms.potentials import mace_calculator, torchani_model, torchmdnet_model

import hodiff.atoms.ase
from hodiff.atoms.ase import energy_of

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def mace() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return mace_calculator()


@pytest.fixture
def methanol() -> Any:
    atoms = molecule("CH3OH")
    atoms.rattle(0.05, seed=1)
    return atoms


def largest_difference(found: np.ndarray, expected: np.ndarray) -> float:
    assert found.shape == expected.shape
    return abs(found - expected).max() / abs(expected).max()


def test_mace(mace: Any, methanol: Any) -> None:
    methanol.calc = mace
    energy, forces = methanol.get_potential_energy(), methanol.get_forces()
    own, differences = mace.get_hessian(methanol).reshape(6, 3, 6, 3), hessian_by_differences(methanol)
    methanol.calc = hodiff.atoms.ase.calculator(mace)
    assert methanol.get_potential_energy() == pytest.approx(energy, abs=1e-12)
    assert largest_difference(methanol.get_forces(), forces) < 1e-12
    H = methanol.calc.get_hessian(methanol)
    assert largest_difference(H, own) < 1e-12
    assert largest_difference(H, differences) < 1e-7
    assert not methanol.calc.check_state(methanol)
    bound = energy_of(mace, methanol)
    hodiff.atoms.check_forces(bound.energy, torch.from_numpy(forces), bound.positions)


def test_mace_in_single_precision(mace: Any, methanol: Any) -> None:
    exact = hodiff.atoms.ase.calculator(mace).get_hessian(methanol)
    single = hodiff.atoms.ase.calculator(mace_calculator("float32")).get_hessian(methanol)
    assert single.dtype == np.float64
    assert 0 < largest_difference(single, exact) < 1e-4


def test_mace_crystal(mace: Any) -> None:
    aluminium = bulk("Al", cubic=True)
    aluminium.rattle(0.05, seed=0)
    aluminium.calc = mace
    stress = aluminium.get_stress()
    aluminium.calc = hodiff.atoms.ase.calculator(mace)
    assert largest_difference(aluminium.get_stress(), stress) < 1e-12
    H = aluminium.calc.get_property("hessian", aluminium)
    assert largest_difference(H, hessian_by_differences(aluminium)) < 1e-6
    # Second derivatives by strain against differences of MACE's stress: the clamped constants at this stress.
    bound = energy_of(mace, aluminium)
    C = hodiff.atoms.elastic_constants(bound.energy, bound.positions, bound.cell, relaxed=False)
    cell, places = aluminium.cell.array.copy(), aluminium.get_scaled_positions()
    step, energies = 1e-3, []
    for sign in (1, 0, -1):
        stretch = np.diag([np.sqrt(1 + 2 * sign * step), 1, 1])
        aluminium.calc = mace
        aluminium.set_cell(cell @ stretch)
        aluminium.set_scaled_positions(places)
        energies.append(aluminium.get_potential_energy())
    second = (energies[0] - 2 * energies[1] + energies[2]) / step**2 / abs(np.linalg.det(cell))
    assert C.clamped[0, 0].item() == pytest.approx(second, rel=1e-3)


def test_mace_without_batching_rules_in_copies(mace: Any, methanol: Any) -> None:
    """Copies of a molecule in one graph of MACE, as where its kernels have no rules for vmap."""
    bound = energy_of(mace, methanol)
    one = mace._atoms_to_batch(methanol).to_dict()
    n = len(methanol)

    def energies(positions: torch.Tensor) -> torch.Tensor:
        copies = len(positions)
        shift = n * torch.arange(copies).repeat_interleave(one["edge_index"].shape[1])
        graph = {
            name: torch.cat([each] * copies) if isinstance(each, torch.Tensor) and each.ndim and len(each) else each
            for name, each in one.items()
        }
        graph.update(
            positions=positions.reshape(-1, 3),
            edge_index=one["edge_index"].repeat(1, copies) + shift,
            batch=torch.arange(copies).repeat_interleave(n),
            ptr=n * torch.arange(copies + 1),
        )
        return mace.models[0](graph, compute_force=False)["energy"]

    expected = hodiff.atoms.hessian(bound.energy, bound.positions)
    found = hodiff.atoms.hessian(energies, bound.positions, batched=True, chunk_size=7)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("package", ["mace", "torchani"])
def test_loss_of_products_by_weights(package: str) -> None:
    model = mace_calculator() if package == "mace" else torchani_model()
    module = model.models[0] if package == "mace" else model
    # MACE's calculator freezes its models.
    compare_loss_by_weights(model, module.requires_grad_())


@pytest.mark.parametrize("place", [np.nan, np.inf])
def test_atoms_that_are_not_finite(mace: Any, methanol: Any, place: float) -> None:
    """MACE's neighbour list finds nothing there, so that its energy is finite."""
    methanol.calc = hodiff.atoms.ase.calculator(mace)
    methanol.positions[0, 0] = place
    for call in (methanol.get_potential_energy, methanol.get_forces, lambda: methanol.calc.get_hessian(methanol)):
        with pytest.raises(hodiff.InputError, match=r"expected finite positions, got .* for atom 0"):
            call()


def test_padded_graphs_and_models_of_dipoles_are_refused(mace: Any, methanol: Any, monkeypatch: Any) -> None:
    for name, value, message in (("pad_num_atoms", 8, "with a padded graph"), ("model_type", "DipoleMACE", "energies")):
        with monkeypatch.context() as changed:
            changed.setattr(mace, name, value)
            with pytest.raises(hodiff.InputError, match=message):
                energy_of(mace, methanol)


def test_settings_of_a_calculator_change(methanol: Any) -> None:
    model = mace_calculator()
    methanol.calc = hodiff.atoms.ase.calculator(model)
    energy, forces = methanol.get_potential_energy(), methanol.get_forces()
    model.energy_units_to_eV = 2.0
    assert methanol.get_potential_energy() == pytest.approx(2 * energy)
    np.testing.assert_allclose(methanol.get_forces(), 2 * forces)
    with torch.no_grad():
        for each in model.models[0].parameters():
            each.zero_()
    assert abs(methanol.get_potential_energy()) < 1e-12


def test_torchani(methanol: Any) -> None:
    from torchani.grad import energies_forces_and_hessians

    model = torchani_model()
    methanol.calc = model.ase()
    forces, differences = methanol.get_forces(), hessian_by_differences(methanol)
    methanol.calc = hodiff.atoms.ase.calculator(model)
    assert largest_difference(methanol.get_forces(), forces) < 1e-12
    H = methanol.calc.get_hessian(methanol)
    assert largest_difference(H, differences) < 1e-6
    assert not methanol.calc.check_state(methanol)
    species, places = torch.from_numpy(methanol.numbers)[None], torch.from_numpy(methanol.positions)[None]
    own = energies_forces_and_hessians(model, species, places).hessians
    from ase.units import Hartree

    assert largest_difference(H, Hartree * own.view(6, 3, 6, 3).detach().numpy()) < 1e-12
    # Two conformers in one call.
    pair = torch.cat([places, places + 0.01 * torch.randn(1, 6, 3, dtype=places.dtype)]).detach()
    both = hodiff.atoms.hessian(lambda x: model((species.expand(2, -1), x)).energies, pair)
    np.testing.assert_allclose(Hartree * both[0].numpy(), H, atol=1e-9)


def test_torchani_in_a_box(methanol: Any) -> None:
    model = torchani_model()
    methanol.set_cell([9.0, 9.5, 11.0])
    methanol.pbc = True
    methanol.calc = model.ase()
    stress = methanol.get_stress()
    methanol.calc = hodiff.atoms.ase.calculator(model)
    assert largest_difference(methanol.get_stress(), stress) < 1e-10


def test_torchmdnet(methanol: Any) -> None:
    model = torchmdnet_model()
    forces = model(torch.from_numpy(methanol.numbers).long(), torch.from_numpy(methanol.positions))[1]
    methanol.calc = hodiff.atoms.ase.calculator(model)
    assert largest_difference(methanol.get_forces(), forces.detach().numpy()) < 1e-12
    H = methanol.calc.get_hessian(methanol)
    assert not methanol.calc.check_state(methanol)
    assert largest_difference(H, hessian_by_differences(methanol)) < 1e-6
    assert model.derivative


def test_cells_that_torchmdnet_does_not_take() -> None:
    """TorchMD-Net itself returns an energy for them, which differs from that of the repeated cell."""
    model, atoms = torchmdnet_model(), molecule("CH3OH", cell=[9.2, 9.3, 9.4], pbc=True)
    once, twice = (hodiff.atoms.ase.calculator(model).get_potential_energy(each) for each in (atoms, atoms * (2, 1, 1)))
    assert twice == pytest.approx(2 * once)
    for cell, pbc in (([9.2, 9.3, 8.9], True), ([9.2, 9.3, 9.4], [True, True, False])):
        atoms.set_cell(cell)
        atoms.pbc = pbc
        with pytest.raises(hodiff.InputError, match="expected a cell of at least twice the cutoff"):
            energy_of(model, atoms)


def test_torchani_for_a_slab(methanol: Any) -> None:
    """A cell without a third vector, as in ASE's slabs without vacuum."""
    model = torchani_model()
    methanol.set_cell([9.0, 9.5, 0])
    methanol.pbc = [True, True, False]
    methanol.calc = model.ase()
    energy, forces = methanol.get_potential_energy(), methanol.get_forces()
    methanol.calc = hodiff.atoms.ase.calculator(model)
    assert methanol.get_potential_energy() == pytest.approx(energy)
    assert largest_difference(methanol.get_forces(), forces) < 1e-10
