"""NequIP and SchNetPack: energies, forces and stress of their calculators, Hessians against differences of forces."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from ase.build import bulk, molecule
from doors.atoms.differences import hessian_by_differences
from doors.nequip.potentials import CUTOFF, nequip_calculator, schnet_calculator

import hodiff.atoms.ase
from hodiff.atoms.models import BoundModel, bind_model

pytestmark = pytest.mark.filterwarnings("ignore")

MODELS: dict[str, Callable[[], Any]] = {
    "NequIP": nequip_calculator,
    "SchNet": schnet_calculator,
    "PaiNN": lambda: schnet_calculator("PaiNN"),
}
KEPT: dict[str, Any] = {}


@pytest.fixture(scope="module", autouse=True)
def double_precision() -> Iterator[None]:
    """NequIP converts atoms to the default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Any:
    if request.param not in KEPT:
        KEPT[request.param] = MODELS[request.param]()
    return KEPT[request.param]


def rattled(atoms: Any) -> Any:
    atoms.rattle(0.05, seed=1)
    return atoms


def bound_to(model: Any, atoms: Any) -> BoundModel:
    return bind_model("test", model, atoms)


def largest_difference(found: np.ndarray, expected: np.ndarray) -> float:
    assert found.shape == expected.shape
    return abs(found - expected).max() / abs(expected).max()


def test_molecule(model: Any) -> None:
    atoms = rattled(molecule("CH3OH"))
    atoms.calc = model
    energy, forces, differences = atoms.get_potential_energy(), atoms.get_forces(), hessian_by_differences(atoms)
    atoms.calc = hodiff.atoms.ase.calculator(model)
    assert atoms.get_potential_energy() == pytest.approx(energy, abs=1e-12)
    assert largest_difference(atoms.get_forces(), forces) < 1e-12
    assert largest_difference(atoms.calc.get_hessian(atoms), differences) < 1e-6


def test_crystal(model: Any) -> None:
    """Stress, and second derivatives by positions and strain, against differences of forces and energies."""
    atoms = rattled(bulk("Al", cubic=True))
    atoms.calc = model
    stress, differences = atoms.get_stress(), hessian_by_differences(atoms)
    atoms.calc = hodiff.atoms.ase.calculator(model)
    assert largest_difference(atoms.get_stress(), stress) < 1e-10
    assert largest_difference(atoms.calc.get_hessian(atoms), differences) < 1e-6
    bound = bound_to(model, atoms)
    C = hodiff.atoms.elastic_constants(bound.energy, bound.positions, bound.cell, relaxed=False)
    step, energies = 1e-3, []
    cell, places = atoms.cell.array.copy(), atoms.get_scaled_positions()
    atoms.calc = model
    for sign in (1, 0, -1):
        atoms.set_cell(cell @ np.diag([np.sqrt(1 + 2 * sign * step), 1, 1]))
        atoms.set_scaled_positions(places)
        energies.append(atoms.get_potential_energy())
    second = (energies[0] - 2 * energies[1] + energies[2]) / step**2 / abs(np.linalg.det(cell))
    assert C.clamped[0, 0].item() == pytest.approx(second, rel=2e-3)


def test_loss_of_products_by_weights(model: Any) -> None:
    """Third derivatives, twice by positions and once by weights, against differences of a loss."""
    atoms = rattled(molecule("H2O"))
    bound = bound_to(model, atoms)
    draw = torch.Generator().manual_seed(0)
    v = torch.randn(3, 3, generator=draw, dtype=torch.float64)
    weights = [each for each in model.model.parameters() if each.requires_grad and each.numel() > 1]
    u = [torch.randn(each.shape, generator=draw, dtype=torch.float64) for each in weights]

    def loss() -> torch.Tensor:
        _, force, product = hodiff.value_grad_hvp(bound.of_positions, bound.positions, v)
        return force.square().sum() + product.square().sum()

    gradients = torch.autograd.grad(loss(), weights, allow_unused=True)
    slope = sum((g * each).sum() for g, each in zip(gradients, u, strict=True) if g is not None).item()
    step, values = 1e-5, []
    for sign in (1, -2, 1):
        with torch.no_grad():
            for each, direction in zip(weights, u, strict=True):
                each += sign * step * direction
        values.append(loss().item())
    assert slope == pytest.approx((values[0] - values[1]) / (2 * step), rel=1e-5)


def test_range_of_one_layer() -> None:
    """A long cell of 32 atoms, of which each interacts with those within twice the cutoff."""
    model = schnet_calculator(interactions=1)
    atoms = rattled(bulk("Al", cubic=True) * (1, 1, 8))
    bound = bound_to(model, atoms)
    dense = hodiff.atoms.hessian(bound.of_positions, bound.positions).reshape(96, 96)
    found = hodiff.atoms.sparse_hessian(bound.of_positions, bound.positions, 2 * CUTOFF, bound.cell)
    assert found.values().numel() < 0.6 * 96**2
    torch.testing.assert_close(found.to_dense(), dense, rtol=1e-10, atol=1e-10 * dense.abs().max().item())
    with pytest.raises(hodiff.InputError, match="interaction_range"):
        hodiff.atoms.sparse_hessian(bound.of_positions, bound.positions, CUTOFF, bound.cell)


def test_models_without_a_graph_are_refused() -> None:
    calculator = nequip_calculator()
    calculator.model = torch.nn.Linear(1, 1)
    with pytest.raises(hodiff.InputError, match="expected a NequIPCalculator of an eager model"):
        bound_to(calculator, molecule("H2O"))
