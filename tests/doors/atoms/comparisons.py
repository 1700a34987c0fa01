"""Comparisons of a model in hodiff with its package's own calculator, for the tests of several doors."""

from typing import Any

import numpy as np
import pytest
import torch
from ase.build import bulk, molecule
from doors.atoms.differences import hessian_by_differences

import hodiff.atoms.ase
from hodiff.atoms.ase import energy_of


def rattled(atoms: Any) -> Any:
    atoms.rattle(0.05, seed=1)
    return atoms


def largest_difference(found: np.ndarray, expected: np.ndarray) -> float:
    assert found.shape == expected.shape
    return abs(found - expected).max() / abs(expected).max()


def compare_molecule(model: Any) -> None:
    """Compare energy and forces with the package's calculator, and the Hessian with differences of its forces."""
    atoms = rattled(molecule("CH3OH"))
    atoms.calc = model
    energy, forces, differences = atoms.get_potential_energy(), atoms.get_forces(), hessian_by_differences(atoms)
    atoms.calc = hodiff.atoms.ase.calculator(model)
    assert atoms.get_potential_energy() == pytest.approx(energy, abs=1e-12)
    assert largest_difference(atoms.get_forces(), forces) < 1e-12
    assert largest_difference(atoms.calc.get_hessian(atoms), differences) < 1e-6
    assert not atoms.calc.check_state(atoms)
    atoms.positions[1, 2] = np.nan
    for call in (atoms.get_forces, lambda: atoms.calc.get_hessian(atoms), lambda: energy_of(model, atoms)):
        with pytest.raises(hodiff.InputError, match=r"expected finite positions, got .* for atom 1"):
            call()


def compare_crystal(model: Any) -> None:
    """Compare stress, and second derivatives by positions and strain with differences of forces and energies."""
    atoms = rattled(bulk("Al", cubic=True))
    atoms.calc = model
    stress, differences = atoms.get_stress(), hessian_by_differences(atoms)
    atoms.calc = hodiff.atoms.ase.calculator(model)
    assert largest_difference(atoms.get_stress(), stress) < 1e-10
    assert largest_difference(atoms.calc.get_hessian(atoms), differences) < 1e-6
    bound = energy_of(model, atoms)
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


def compare_loss_by_weights(model: Any, module: torch.nn.Module) -> None:
    """Compare third derivatives, twice by positions and once by weights, with differences of a loss."""
    atoms = rattled(molecule("H2O"))
    bound = energy_of(model, atoms)
    draw = torch.Generator().manual_seed(0)
    v = torch.randn(3, 3, generator=draw, dtype=torch.float64)
    weights = [each for each in module.parameters() if each.requires_grad and each.numel() > 1]
    u = [torch.randn(each.shape, generator=draw, dtype=torch.float64) for each in weights]

    def loss() -> torch.Tensor:
        _, force, product = hodiff.value_grad_hvp(bound.energy, bound.positions, v)
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
