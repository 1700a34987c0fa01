"""Potentials of pairs with closed derivatives of second order, of clusters and crystals."""

import numpy as np
import torch
from torch import Tensor

SHIFTS = torch.cartesian_prod(*[torch.arange(-2.0, 3.0)] * 3).double()


def lennard_jones(x: Tensor) -> Tensor:
    """The energy of a cluster, or (B,) of several."""
    one, other = torch.triu_indices(x.shape[-2], x.shape[-2], 1)
    cube = (x[..., one, :] - x[..., other, :]).square().sum(-1) ** -3
    return 4 * (cube**2 - cube).sum(-1)


def cluster(atoms: int, dtype: torch.dtype = torch.float64) -> Tensor:
    sites = torch.cartesian_prod(*[torch.arange(3.0)] * 3)[:atoms]
    return (1.2 * sites + 0.1 * torch.randn(atoms, 3, generator=torch.Generator().manual_seed(1))).to(dtype)


def slopes(r: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """First and second derivative of the potential of Lennard and Jones by distance."""
    return -48 * r**-13 + 24 * r**-7, 624 * r**-14 - 168 * r**-8


def pair_hessian(x: np.ndarray) -> np.ndarray:
    """The Hessian of a cluster by the closed form of central forces."""
    n = len(x)
    H = np.zeros((n, 3, n, 3))
    for i in range(n):
        for j in range(n):
            if i != j:
                d = x[i] - x[j]
                r = np.linalg.norm(d)
                first, second = slopes(r)
                block = (second - first / r) * np.outer(d, d) / r**2 + first / r * np.eye(3)
                H[i, :, i] += block
                H[i, :, j] -= block
    return H


def crystal_energy(x: Tensor, cell: Tensor) -> Tensor:
    """The energy per cell of Lennard and Jones's potential, which ends smoothly at a distance of 2."""
    d = x[:, None, None] - x[None, :, None] + (SHIFTS @ cell)[None, None]
    squared = d.square().sum(-1)
    squared = torch.where(squared == 0, 4.0, squared)
    cube = squared**-3
    return (2 * (cube**2 - cube) * (1 - squared / 4).clamp_min(0) ** 4).sum()


def face_centred(side: float) -> tuple[Tensor, Tensor]:
    """One atom in the primitive cell of a face-centred cubic crystal."""
    cell = side / 2 * torch.tensor([[0.0, 1.0, 1.0], [1.0, 0.0, 1.0], [1.0, 1.0, 0.0]], dtype=torch.float64)
    return torch.zeros(1, 3, dtype=torch.float64), cell
