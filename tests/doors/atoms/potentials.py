"""Potentials of the real packages, small and with random weights."""

from typing import Any

import numpy as np
import torch


def mace_calculator(
    dtype: str = "float64", channels: int = 8, elements: tuple[int, ...] = (1, 6, 8, 13), layers: int = 2
) -> Any:
    # The file of constants of e3nn 0.4.4, which mace-torch requires, has a slice.
    torch.serialization.add_safe_globals([slice])
    from e3nn import o3
    from mace import modules
    from mace.calculators import MACECalculator
    from mace.tools.torch_tools import default_dtype

    torch.manual_seed(0)
    with default_dtype("float64"):
        model = modules.ScaleShiftMACE(
            r_max=4.0,
            num_bessel=6,
            num_polynomial_cutoff=5,
            max_ell=2,
            interaction_cls=modules.interaction_classes["RealAgnosticResidualInteractionBlock"],
            interaction_cls_first=modules.interaction_classes["RealAgnosticResidualInteractionBlock"],
            num_interactions=layers,
            num_elements=len(elements),
            hidden_irreps=o3.Irreps(f"{channels}x0e + {channels}x1o"),
            MLP_irreps=o3.Irreps("16x0e"),
            atomic_energies=np.zeros(len(elements)),
            avg_num_neighbors=8,
            atomic_numbers=list(elements),
            correlation=2,
            gate=torch.nn.functional.silu,
            atomic_inter_scale=1.0,
            atomic_inter_shift=0.0,
        )
    return MACECalculator(models=model.to(getattr(torch, dtype)), device="cpu", default_dtype=dtype)


def torchani_model(dtype: torch.dtype = torch.float64) -> Any:
    import torchani

    torch.manual_seed(0)
    return torchani.arch.simple_ani(("H", "C", "N", "O"), "wb97x-631gd", self_energies="zero").to(dtype)


def torchmdnet_model() -> Any:
    from torchmdnet.models.model import create_model

    torch.manual_seed(0)
    return create_model({
        "model": "tensornet", "embedding_dimension": 16, "num_layers": 1, "num_rbf": 8, "rbf_type": "expnorm",
        "trainable_rbf": False, "activation": "silu", "cutoff_lower": 0.0, "cutoff_upper": 4.5, "max_z": 20,
        "max_num_neighbors": 64, "equivariance_invariance_group": "O(3)", "derivative": True, "reduce_op": "add",
        "output_model": "Scalar", "prior_model": None, "prior_args": None, "atom_filter": -1, "precision": 64,
        "static_shapes": False, "check_errors": True, "vector_cutoff": True,
    })  # fmt: skip
