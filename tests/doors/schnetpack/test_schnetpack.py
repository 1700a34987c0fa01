"""SchNetPack: energies, forces and stress of its calculator, Hessians against differences of forces."""

import typing
from typing import Any

import pytest
import torch
import torch.utils.data.dataloader
from ase.build import bulk
from doors.atoms.comparisons import compare_crystal, compare_loss_by_weights, compare_molecule, rattled

import hodiff
from hodiff.atoms.ase import energy_of

pytestmark = pytest.mark.filterwarnings("ignore")
CUTOFF = 4.0


def schnet_calculator(representation: str = "SchNet", interactions: int = 2) -> Any:
    # SchNetPack imports this name, which torch 2.13 no longer has.
    if not hasattr(torch.utils.data.dataloader, "T_co"):
        torch.utils.data.dataloader.T_co = typing.TypeVar("T_co", covariant=True)
    import schnetpack
    from schnetpack import atomistic
    from schnetpack import representation as representations
    from schnetpack.interfaces import SpkCalculator
    from schnetpack.nn import CosineCutoff, GaussianRBF
    from schnetpack.transform import ASENeighborList

    torch.manual_seed(0)
    model = schnetpack.model.NeuralNetworkPotential(
        representation=getattr(representations, representation)(
            n_atom_basis=16,
            n_interactions=interactions,
            radial_basis=GaussianRBF(8, CUTOFF),
            cutoff_fn=CosineCutoff(CUTOFF),
        ),
        input_modules=[atomistic.Strain(), atomistic.PairwiseDistances()],
        output_modules=[atomistic.Atomwise(16, output_key="energy"), atomistic.Forces(calc_stress=True)],
    )

    class Calculator(SpkCalculator):
        """A calculator of a model that is in no file."""

        def _load_model(self, model_file: Any) -> Any:
            return model.double().eval()

    return Calculator("", ASENeighborList(CUTOFF), stress_key="stress", energy_unit="eV", dtype=torch.float64)


@pytest.fixture(scope="module", params=["SchNet", "PaiNN"])
def model(request: pytest.FixtureRequest) -> Any:
    return schnet_calculator(request.param)


def test_molecule(model: Any) -> None:
    compare_molecule(model)


def test_crystal(model: Any) -> None:
    compare_crystal(model)


def test_loss_of_products_by_weights(model: Any) -> None:
    compare_loss_by_weights(model, model.model)


def test_range_of_one_layer() -> None:
    """A long cell of 32 atoms, of which each interacts with those within twice the cutoff."""
    model = schnet_calculator(interactions=1)
    atoms = rattled(bulk("Al", cubic=True) * (1, 1, 8))
    bound = energy_of(model, atoms)
    dense = hodiff.atoms.hessian(bound.energy, bound.positions).reshape(96, 96)
    found = hodiff.atoms.sparse_hessian(bound.energy, bound.positions, 2 * CUTOFF, bound.cell)
    assert found.values().numel() < 0.6 * 96**2
    torch.testing.assert_close(found.to_dense(), dense, rtol=1e-10, atol=1e-10 * dense.abs().max().item())
    with pytest.raises(hodiff.InputError, match="interaction_range"):
        hodiff.atoms.sparse_hessian(bound.energy, bound.positions, CUTOFF, bound.cell)


def test_other_objects_are_refused() -> None:
    calculator = schnet_calculator()
    calculator.model = torch.nn.Linear(1, 1)
    with pytest.raises(hodiff.InputError, match="expected an SpkCalculator of a NeuralNetworkPotential"):
        energy_of(calculator, bulk("Al"))
