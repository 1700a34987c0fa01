"""Energies of atoms with a cutoff, whose Hessians are sparse."""

from __future__ import annotations

import runpy
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.spatial import cKDTree
from torch import Tensor

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
DISPLACEMENT = 0.02  # breaks the symmetry of the crystal

# F. Stillinger & T. Weber, Physical Review B 31 (1985), equations 2.3, 2.5 and 2.7.
A, B, REACH, STRENGTH, DECAY = 7.049556277, 0.6022245584, 1.8, 21.0, 1.2


@dataclass(frozen=True)
class Atoms:
    """Energy and the point where it is differentiated."""

    name: str
    energy: Any
    x: Tensor


def lennard_jones(atoms: int) -> Atoms:
    """Return the energy of `vibrational_modes`: pairs in a face-centred cubic crystal, some 16 neighbours an atom."""
    example = runpy.run_path(str(EXAMPLES / "vibrational_modes.py"))
    x = displaced(example["cluster"](atoms))
    one, other = example["pairs_within"](x, example["CUTOFF"])
    return Atoms("Lennard-Jones, pairs", partial(example["energy"], one=one, other=other), x)


def stillinger_weber(atoms: int) -> Atoms:
    """Return the energy of pairs and angles in a crystal of silicon, with four neighbours per atom."""
    x = displaced(diamond(atoms))
    pairs = cKDTree(x.view(-1, 3).numpy()).query_pairs(REACH - 0.05, output_type="ndarray")
    near: list[list[int]] = [[] for _ in range(atoms)]
    for one, other in pairs:
        near[one].append(other)
        near[other].append(one)
    triples = np.array([(i, j, k) for i in range(atoms) for j, k in combinations(sorted(near[i]), 2)])
    chosen = {
        "pairs": torch.from_numpy(pairs).long().T.contiguous(),
        "triples": torch.from_numpy(triples).long().T.contiguous(),
    }
    return Atoms("Stillinger-Weber, pairs and angles", partial(angular_energy, **chosen), x)


def angular_energy(x: Tensor, pairs: Tensor, triples: Tensor) -> Tensor:
    """Sum A (B d^-4 - 1) exp(1 / (d - a)) over pairs, and (cos + 1/3)^2 over angles, damped by both sides."""
    places = x.view(-1, 3)
    d = (places[pairs[0]] - places[pairs[1]]).square().sum(-1).sqrt()
    bonds = A * (B * d**-4 - 1) * torch.exp(1 / (d - REACH))
    one, other = places[triples[1]] - places[triples[0]], places[triples[2]] - places[triples[0]]
    p, q = one.square().sum(-1).sqrt(), other.square().sum(-1).sqrt()
    fades = torch.exp(DECAY / (p - REACH) + DECAY / (q - REACH))
    angles = STRENGTH * ((one * other).sum(-1) / (p * q) + 1 / 3) ** 2 * fades
    return bonds.sum() + angles.sum()


def diamond(atoms: int) -> Tensor:
    """Return the sites of silicon's crystal next to a point without symmetry, (3 * atoms,)."""
    reach = int(np.ceil(atoms ** (1 / 3))) + 1
    cells = np.stack(np.meshgrid(*[np.arange(-reach, reach + 1)] * 3, indexing="ij"), -1).reshape(-1, 3)
    cells = cells[cells.sum(1) % 2 == 0]
    sites = np.concatenate([cells, cells + 0.5]) * (2 ** (1 / 6) / 0.75**0.5)
    nearest = np.linalg.norm(sites - [0.11, 0.05, 0.17], axis=1).argsort(kind="stable")[:atoms]
    return torch.from_numpy(sites[nearest].reshape(-1))


def displaced(x: Tensor) -> Tensor:
    """Move all places by small random displacements."""
    return x + DISPLACEMENT * torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=x.dtype)
