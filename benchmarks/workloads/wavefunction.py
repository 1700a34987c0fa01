"""Wavefunction of electrons with attention, in torch; its parameters are NumPy arrays, which peers read, too.

Queries, keys and values are features of single electrons, and outputs of attention are added up separately. So the
attention weights have sparse derivatives, as Li et al. 2024 require. ψ is a sum of determinants of orbitals with an
envelope, times a pair factor.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

ELECTRONS, FEATURES, HEADS, BLOCKS, DETERMINANTS = 16, 128, 4, 4, 4


def parameters(electrons: int = ELECTRONS, features: int = FEATURES) -> dict[str, Any]:
    """Return random weights in float64."""
    random = np.random.RandomState(0)

    def matrix(rows: int, columns: int, scale: float = 1.0) -> Any:
        return scale * random.randn(rows, columns) / np.sqrt(rows)

    scales = {"query": 1.0, "key": 1.0, "value": 1.0, "out": 0.25, "inner": 1.0, "outer": 0.5}
    return {
        "embedding": matrix(4, features),
        "blocks": [{name: matrix(features, features, scale) for name, scale in scales.items()} for _ in range(BLOCKS)],
        "orbitals": matrix(features, electrons * DETERMINANTS),
        "decay": 0.5 + 0.3 * np.abs(random.randn(electrons * DETERMINANTS)),
    }


def positions(walkers: int, electrons: int = ELECTRONS) -> Tensor:
    """Return random positions of the electrons, (walkers, electrons, 3), always the same."""
    return torch.randn(walkers, electrons, 3, generator=torch.Generator().manual_seed(1))


def as_tensors(tree: Any, dtype: torch.dtype) -> Any:
    """Convert the parameters to torch."""
    if isinstance(tree, dict):
        return {name: as_tensors(each, dtype) for name, each in tree.items()}
    return [as_tensors(each, dtype) for each in tree] if isinstance(tree, list) else torch.as_tensor(tree, dtype=dtype)


def log_psi(weights: Any, x: Tensor) -> Tensor:
    """Compute log |ψ| of electrons at (..., n, 3)."""
    n = x.shape[-2]
    radius = x.norm(dim=-1, keepdim=True)
    single = torch.tanh(torch.cat([x, radius], -1) @ weights["embedding"])
    gathered = single
    for block in weights["blocks"]:
        gathered = gathered + attention(block, single)
        single = single + torch.tanh(single @ block["inner"]) @ block["outer"]
    orbitals = ((gathered + single) @ weights["orbitals"]) * torch.exp(-radius * weights["decay"])
    sign, log = torch.linalg.slogdet(orbitals.unflatten(-1, (-1, n)).movedim(-2, -3))
    top = log.detach().amax(-1, keepdim=True)
    total = (sign * torch.exp(log - top)).sum(-1)
    gaps = x.unsqueeze(-2) - x.unsqueeze(-3)
    distances = torch.sqrt((gaps**2).sum(-1) + torch.eye(n, dtype=x.dtype))
    pairs = (0.5 / (1 + distances)).triu(1).sum((-1, -2))
    return torch.log(torch.abs(total)) + top.squeeze(-1) - pairs


def attention(block: Any, single: Tensor) -> Tensor:
    """Return the output of attention for every electron."""
    q, k, v = (
        (single @ block[name]).unflatten(-1, (HEADS, -1)).transpose(-3, -2) for name in ("query", "key", "value")
    )
    weights = torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1)
    return (weights @ v).transpose(-3, -2).flatten(-2) @ block["out"]
