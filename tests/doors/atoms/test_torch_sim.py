"""torch-sim: Hessians of all systems of a state, against the Hessians of each system's own calculator."""

import doctest
from typing import Any

import numpy as np
import pytest
import torch
from ase.build import bulk, molecule
from ase.neighborlist import neighbor_list
from atoms.crystals import slopes
from doors.atoms.potentials import mace_calculator
from torch_sim.io import atoms_to_state
from torch_sim.models.lennard_jones import LennardJonesModel
from torch_sim.models.mace import MaceModel

import hodiff.atoms.ase
import hodiff.atoms.torch_sim

pytestmark = pytest.mark.filterwarnings("ignore")
CPU = torch.device("cpu")


def test_mace() -> None:
    calculator = mace_calculator()
    model = MaceModel(calculator.models[0], device=CPU, dtype=torch.float64, compute_stress=True)
    systems = [molecule("CH3OH"), molecule("H2O")]
    for atoms in systems:
        atoms.rattle(0.05, seed=1)
        atoms.set_cell([9, 9.5, 10])
        atoms.pbc = True
    state = atoms_to_state(systems, CPU, torch.float64)
    before = model(state)["forces"]
    found = hodiff.atoms.torch_sim.hessian(model, state)
    assert len(found) == 2
    for atoms, H in zip(systems, found, strict=True):
        own = calculator.get_hessian(atoms).reshape(H.shape)
        np.testing.assert_allclose(H.numpy(), own, atol=1e-12 * abs(own).max())
        atoms.calc = calculator
        stress = atoms.get_stress()
        atoms.calc = hodiff.atoms.ase.calculator(model)
        np.testing.assert_allclose(atoms.get_stress(), stress, atol=1e-10 * abs(stress).max())
        np.testing.assert_allclose(atoms.calc.get_hessian(atoms), own, atol=1e-12 * abs(own).max())
    # The model computes its own forces as before.
    assert torch.equal(model(state)["forces"], before)


@pytest.mark.parametrize("neighbour_list", [True, False])
def test_lennard_jones(neighbour_list: bool) -> None:
    model = LennardJonesModel(
        sigma=3.4, epsilon=0.0104, cutoff=5.0, dtype=torch.float64, use_neighbor_list=neighbour_list
    )
    systems = [bulk("Ar", a=a, cubic=True) * (2, 2, size) for a, size in ((5.2, 2), (5.3, 3))]
    for atoms in systems:
        atoms.rattle(0.02, seed=0)
    state = atoms_to_state(systems, CPU, torch.float64)
    for atoms, H in zip(systems, hodiff.atoms.torch_sim.hessian(model, state), strict=True):
        expected = pair_hessian(atoms)
        np.testing.assert_allclose(H.numpy(), expected, atol=1e-12 * abs(expected).max())


def pair_hessian(atoms: Any) -> np.ndarray:
    """The closed form of central forces; the model's own forces are no oracle, as torch-sim 0.3 doubles them."""
    first, other, apart = neighbor_list("ijD", atoms, 5.0)
    H = np.zeros((len(atoms), 3, len(atoms), 3))
    for i, j, d in zip(first, other, apart, strict=True):
        r = np.linalg.norm(d)
        slope, curvature = (0.0104 * each / 3.4**power for power, each in enumerate(slopes(np.array(r / 3.4)), 1))
        block = (curvature - slope / r) * np.outer(d, d) / r**2 + slope / r * np.eye(3)
        H[i, :, i] += block
        H[i, :, j] -= block
    return H


def test_models_without_a_graph_are_refused() -> None:
    class Detached(LennardJonesModel):
        def forward(self, state: Any) -> Any:
            return {"energy": super().forward(state)["energy"].detach()}

    state = atoms_to_state([bulk("Ar", cubic=True)], CPU, torch.float64)
    with pytest.raises(hodiff.InputError, match="expected a model whose energy torch can differentiate"):
        hodiff.atoms.torch_sim.hessian(Detached(sigma=3.4, dtype=torch.float64), state)


def test_states_that_are_not_finite_are_refused() -> None:
    state = atoms_to_state([bulk("Ar", cubic=True)], CPU, torch.float64)
    state.positions[1, 0] = torch.nan
    with pytest.raises(hodiff.InputError, match="state: expected finite positions"):
        hodiff.atoms.torch_sim.hessian(LennardJonesModel(sigma=3.4, dtype=torch.float64), state)


def test_example_of_the_docstring() -> None:
    failed, tried = doctest.testmod(hodiff.atoms.torch_sim)
    assert (failed, tried > 4) == (0, True)
