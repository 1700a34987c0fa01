"""Potentials of NequIP and SchNetPack, small and with random weights."""

import typing
from typing import Any

import torch
import torch.utils.data.dataloader

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
    before = torch.get_default_dtype()
    # SchNetPack builds no radial functions under another default.
    torch.set_default_dtype(torch.float32)
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

    torch.set_default_dtype(before)

    class Calculator(SpkCalculator):
        """A calculator of a model that is in no file."""

        def _load_model(self, model_file: Any) -> Any:
            return model.double().eval()

    return Calculator("", ASENeighborList(CUTOFF), stress_key="stress", energy_unit="eV", dtype=torch.float64)
