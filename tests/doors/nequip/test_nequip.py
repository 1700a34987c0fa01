"""NequIP: energies, forces and stress of its calculator, Hessians against differences of forces."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from ase.build import molecule
from doors.atoms.comparisons import compare_crystal, compare_loss_by_weights, compare_molecule

import hodiff
from hodiff.atoms.ase import energy_of

pytestmark = pytest.mark.filterwarnings("ignore")
CUTOFF = 4.0


def nequip_calculator() -> Any:
    from nequip.data.transforms import ChemicalSpeciesToAtomTypeMapper, NeighborListTransform
    from nequip.integrations.ase import NequIPCalculator
    from nequip.model import NequIPGNNModel
    from nequip.utils.global_state import set_global_state

    set_global_state()
    species = ["H", "C", "O", "Al"]
    model = NequIPGNNModel(
        seed=0, model_dtype="float64", type_names=species, r_max=CUTOFF, num_layers=2, l_max=1, num_features=8,
        radial_mlp_width=16, avg_num_neighbors=8.0,
    ).eval()  # fmt: skip
    transforms = [
        ChemicalSpeciesToAtomTypeMapper(species),
        NeighborListTransform(r_max=CUTOFF, backend="ase"),
    ]
    return NequIPCalculator(model, "cpu", transforms=transforms)


@pytest.fixture(scope="module", autouse=True)
def double_precision() -> Iterator[None]:
    """NequIP converts atoms to the default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.fixture(scope="module")
def model(double_precision: None) -> Any:
    return nequip_calculator()


def test_molecule(model: Any) -> None:
    compare_molecule(model)


def test_crystal(model: Any) -> None:
    compare_crystal(model)


def test_loss_of_products_by_weights(model: Any) -> None:
    compare_loss_by_weights(model, model.model)


def test_models_without_a_graph_are_refused(model: Any) -> None:
    calculator = type(model)(torch.nn.Linear(1, 1).eval(), "cpu")
    with pytest.raises(hodiff.InputError, match="expected a NequIPCalculator of an eager model"):
        energy_of(calculator, molecule("H2O"))
