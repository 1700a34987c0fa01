"""ASE's calculator with exact Hessians: properties, constraints, vibrations and thermochemistry."""

import doctest
from typing import Any

import numpy as np
import pytest
import torch
from ase import Atoms, units
from ase.build import bulk, molecule
from ase.calculators.calculator import PropertyNotImplementedError
from ase.calculators.lj import LennardJones
from ase.calculators.singlepoint import SinglePointCalculator
from ase.constraints import FixAtoms, FixBondLength, FixCartesian, FixCom, FixedPlane
from ase.thermochemistry import HarmonicThermo, IdealGasThermo
from ase.vibrations import Vibrations
from torch import Tensor

import hodiff
import hodiff.atoms.ase
from hodiff.atoms.ase import calculator, energy_of


def lennard_jones(positions: Tensor, cell: Tensor, atoms: Any) -> Tensor:
    """Without images, as `ase.calculators.lj.LennardJones` for molecules with a large cutoff."""
    one, other = torch.triu_indices(len(positions), len(positions), 1)
    cube = (positions[one] - positions[other]).square().sum(-1) ** -3
    return 4 * (cube**2 - cube).sum()


def spring(positions: Tensor, cell: Tensor, atoms: Any) -> Tensor:
    return 143.9 * ((positions[1] - positions[0]).norm() - 1.098) ** 2 / 2


@pytest.fixture
def cluster() -> Atoms:
    places = np.random.default_rng(0).normal(size=(5, 3)) * 0.05
    places += 1.12 * np.array([[0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0]])
    return Atoms("Ar5", places, calculator=calculator(lennard_jones))


def test_energy_and_forces_of_a_calculator_of_ase(cluster: Atoms) -> None:
    other = cluster.copy()
    other.calc = LennardJones(rc=1e3)
    assert cluster.get_potential_energy() == pytest.approx(other.get_potential_energy(), rel=1e-6)
    np.testing.assert_allclose(cluster.get_forces(), other.get_forces(), rtol=1e-6, atol=1e-10)
    with pytest.raises(PropertyNotImplementedError):
        cluster.get_stress()


def test_hessian_and_constraints(cluster: Atoms) -> None:
    full = cluster.calc.get_property("hessian", cluster)
    assert full.shape == (5, 3, 5, 3)
    np.testing.assert_array_equal(cluster.calc.hessian_function(cluster), full.reshape(15, 15))
    cluster.set_constraint(FixAtoms([0, 3]))
    free = [1, 2, 4]
    np.testing.assert_allclose(cluster.calc.get_hessian(cluster), full[free][:, :, free], atol=1e-10)
    np.testing.assert_allclose(cluster.calc.get_hessian(cluster, free=[0]), full[[0]][:, :, [0]], atol=1e-10)
    assert cluster.calc.vibrations(cluster).get_hessian().shape == (3, 3, 3, 3)
    assert cluster.calc.get_property("hessian", cluster).shape == (5, 3, 5, 3)


def test_vibrations_of_ase_by_displacements(tmp_path: Any) -> None:
    water = molecule("H2O")

    def energy(positions: Tensor, cell: Tensor, atoms: Any) -> Tensor:
        bonds = (positions[1:] - positions[0]).norm(dim=1)
        return 25 * (bonds - 0.97).square().sum() + 8 * ((positions[1] - positions[2]).norm() - 1.53) ** 2

    water.calc = calculator(energy)
    from ase.optimize import BFGS

    BFGS(water, logfile=None).run(fmax=1e-8)
    by_differences = Vibrations(water, name=str(tmp_path / "vibrations"), delta=1e-3)
    by_differences.run()
    exact = water.calc.vibrations(water).get_frequencies()
    np.testing.assert_allclose(exact[-3:], by_differences.get_frequencies()[-3:], rtol=1e-5)
    own = hodiff.atoms.vibrations(
        lambda x: energy(x, None, water), torch.from_numpy(water.positions), torch.from_numpy(water.get_masses())
    )
    np.testing.assert_allclose(own.wavenumbers[-3:], exact[-3:].real, rtol=1e-7)
    assert own.zero_point_energy == pytest.approx(water.calc.vibrations(water).get_zero_point_energy(), rel=1e-6)


def test_thermochemistry_of_nitrogen() -> None:
    nitrogen = Atoms("N2", [[0, 0, 0], [0, 0, 1.098]], calculator=calculator(spring))
    quantum = nitrogen.calc.vibrations(nitrogen).get_energies()[-1].real
    exact = units._hbar * units.m / np.sqrt(units._e * units._amu) * np.sqrt(143.9 / (14.007 / 2)) * 1e10 / units.m
    assert quantum == pytest.approx(exact, rel=1e-6)
    gas = IdealGasThermo([quantum], "linear", 0.0, nitrogen, symmetrynumber=2, spin=0)
    # The entropy of nitrogen at 298.15 K and 1 bar is 191.6 J / (mol K).
    entropy = gas.get_entropy(298.15, 1e5, verbose=False) / (units.kJ / units.mol) * 1000
    assert entropy == pytest.approx(191.6, abs=0.3)
    assert HarmonicThermo([quantum]).get_ZPE_correction() == pytest.approx(quantum / 2)


def test_stress_of_a_crystal() -> None:
    """ASE's own stress by central differences of the energy by strain."""
    from ase.calculators.fd import calculate_numerical_stress

    def energy(positions: Tensor, cell: Tensor, atoms: Any) -> Tensor:
        shifts = torch.cartesian_prod(*[torch.arange(-1.0, 2.0)] * 3).double() @ cell
        squared = (positions[:, None, None] - positions[None, :, None] + shifts).square().sum(-1)
        return torch.exp(-squared / 4).sum()

    crystal = bulk("Cu", cubic=True)
    crystal.rattle(0.1)
    crystal.calc = calculator(energy)
    expected = calculate_numerical_stress(crystal, eps=1e-5)
    np.testing.assert_allclose(crystal.get_stress(), expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("model", [
    LennardJones(), 3, lambda p: p.sum(), torch.nn.Linear(3, 1), torch.jit.trace(torch.sin, torch.ones(1)),
])  # fmt: skip
def test_unknown_models(model: object) -> None:
    for bind in (calculator, lambda each: energy_of(each, molecule("H2"))):
        with pytest.raises(hodiff.InputError, match="model: expected a model of torch_sim, mace, torchani"):
            bind(model)


@pytest.mark.parametrize(("change", "message"), [
    (lambda a: a.positions.__setitem__((2, 1), np.nan), "expected finite positions, got .*nan.* for atom 2"),
    (lambda a: a.positions.__setitem__((2, 1), np.inf), "expected finite positions, got .*inf.* for atom 2"),
    (lambda a: a.set_cell([9, np.nan, 9]), "expected finite cell, got .* for lattice vector 1"),
    (lambda a: a.set_pbc([True, False, False]), "expected independent lattice vectors along periodic"),
    (lambda a: a.positions.__setitem__(1, a.positions[0]), "energy, forces and Hessian are finite, got NaN or Inf in"),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*holds numbers that are not finite")
def test_atoms_that_are_not_finite(cluster: Atoms, change: Any, message: str) -> None:
    change(cluster)
    calls = (cluster.get_potential_energy, cluster.get_forces, lambda: cluster.calc.get_property("hessian", cluster))
    for call in (*calls, lambda: cluster.calc.get_hessian(cluster), lambda: cluster.calc.vibrations(cluster)):
        with pytest.raises(hodiff.InputError, match=message):
            call()


def test_constraints_that_do_not_fix_whole_atoms(cluster: Atoms) -> None:
    full = cluster.calc.get_hessian(cluster)
    for constraint in (FixCartesian(0, (True, False, False)), FixBondLength(0, 1), FixedPlane(0, (1, 0, 0)), FixCom()):
        cluster.set_constraint(constraint)
        for method in (cluster.calc.get_hessian, cluster.calc.vibrations):
            with pytest.raises(hodiff.InputError, match=f"got {type(constraint).__name__}; pass free="):
                method(cluster)
        np.testing.assert_array_equal(cluster.calc.get_hessian(cluster, free=range(5)), full)
        np.testing.assert_array_equal(cluster.calc.vibrations(cluster, free=range(5)).get_hessian(), full)
        np.testing.assert_array_equal(cluster.calc.get_property("hessian", cluster), full)
    cluster.set_constraint(FixCartesian([0, 2]))
    np.testing.assert_allclose(cluster.calc.get_hessian(cluster), full[[1, 3, 4]][:, :, [1, 3, 4]], atol=1e-10)
    cluster.set_constraint(FixAtoms(range(5)))
    with pytest.raises(hodiff.InputError, match="expected an atom that moves, got constraints that fix all 5"):
        cluster.calc.get_hessian(cluster)


def test_selections_of_free_atoms(cluster: Atoms) -> None:
    full, mask = cluster.calc.get_hessian(cluster), np.arange(5) > 2
    for free in ([-2, -1], slice(3, None), (i for i in (3, 4)), mask, list(mask), torch.tensor([3, 4])):
        np.testing.assert_allclose(cluster.calc.get_hessian(cluster, free), full[3:, :, 3:], atol=1e-10)
    for free in ("abc", [5], [-6], [0, -5], [], [0.5], 3, [True], int):
        with pytest.raises(hodiff.InputError, match="free: expected indices from -5 to 4"):
            cluster.calc.get_hessian(cluster, free)
    # VibrationsData pairs rows of the Hessian with masses in the order of the atoms.
    cluster.set_masses([1, 2, 3, 4, 50])
    ordered, turned = (cluster.calc.vibrations(cluster, free).get_energies() for free in ([1, 4], [-1, 1]))
    np.testing.assert_allclose(turned, ordered)
    with pytest.raises(hodiff.InputError, match=r"expected ase.Atoms, got str"):
        cluster.calc.get_hessian("water")


def test_results_are_of_the_model_as_it_is(cluster: Atoms) -> None:
    class Spring(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stiffness = torch.nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

        def forward(self, positions: Tensor, cell: Tensor, atoms: Any) -> Tensor:
            calls.append(positions)
            return self.stiffness * atoms.info.get("scale", 1) * positions.square().sum()

    calls: list[Tensor] = []
    model = Spring()
    cluster.calc = calculator(model)
    first, forces = cluster.get_potential_energy(), cluster.get_forces()
    assert len(calls) == 1
    with torch.no_grad():
        model.stiffness *= 3
    assert cluster.get_potential_energy() == pytest.approx(3 * first)
    np.testing.assert_allclose(cluster.get_forces(), 3 * forces)
    cluster.info["scale"] = 2
    assert cluster.get_potential_energy() == pytest.approx(6 * first)
    calls.clear()
    cluster.set_momenta(np.ones((5, 3)))
    cluster.get_forces()
    assert not calls
    # All names in `results` are known to ASE.
    cluster.calc.get_property("hessian", cluster)
    assert SinglePointCalculator(cluster, **cluster.calc.results).get_potential_energy() == pytest.approx(6 * first)


def test_inference_mode_and_a_calculator_as_a_model(cluster: Atoms) -> None:
    forces, full = cluster.get_forces(), cluster.calc.get_hessian(cluster)
    cluster.calc = calculator(cluster.calc)
    with torch.inference_mode():
        np.testing.assert_array_equal(cluster.get_forces(), forces)
        np.testing.assert_array_equal(cluster.calc.get_hessian(cluster), full)
        bound = energy_of(cluster.calc, cluster)
        np.testing.assert_array_equal(hodiff.atoms.hessian(bound.energy, bound.positions).numpy(), full)


def test_example_of_the_docstring() -> None:
    assert doctest.testmod(hodiff.atoms.ase).attempted >= 11
    assert not doctest.testmod(hodiff.atoms.ase).failed
