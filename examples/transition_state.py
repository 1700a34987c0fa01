"""Transition states of clusters by Sella, with and without exact Hessians.

    pip install "hodiff[atoms]" sella
    python examples/transition_state.py

Sella follows the softest mode of an atomic system uphill to a saddle point of first order. It learns the Hessian from
forces, with extra forces for its iterative eigenvalues, or takes it from a function. `hessian_function` of hodiff's
calculator for ASE computes it exactly. The saddle points are those of four atoms between two tetrahedra, and of seven
atoms, of Lennard and Jones's potential. The script prints the steps, and the numbers of forces and Hessians until the
largest force is 1e-6. One Hessian costs 3 N products in groups, which is less than 3 N forces. The seven atoms start
near their saddle: far from it, Sella with exact Hessians may climb until the cluster breaks.

Source: E. D. Hermes, K. Sargsyan, H. N. Najm & J. Zádor, Journal of Chemical Theory and Computation 18 (2022).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from ase import Atoms
from sella import Sella
from torch import Tensor

from hodiff.atoms.ase import HessianCalculator

RHOMBUS = 1.12 * np.array([[0, 0, 0], [1, 0.05, 0.1], [0.5, 0.87, -0.1], [1.5, 0.84, 0.25]])


def lennard_jones(positions: Tensor, cell: Tensor, atoms: Any) -> Tensor:
    """Compute the energy of a cluster."""
    one, other = torch.triu_indices(len(positions), len(positions), 1)
    cube = (positions[one] - positions[other]).square().sum(-1) ** -3
    return 4 * (cube**2 - cube).sum()


class Counting(HessianCalculator):
    """A calculator that counts forces and Hessians."""

    forces = hessians = 0

    def calculate(self, *args: Any, **kwargs: Any) -> None:
        """Count a computation of forces."""
        self.forces += 1
        super().calculate(*args, **kwargs)

    def hessian_function(self, atoms: Any) -> Any:
        """Count a computation of the Hessian."""
        self.hessians += 1
        return super().hessian_function(atoms)


def near_saddle() -> Any:
    """Return seven atoms near a saddle point: a pentagon with two tips after a first search, and displacements."""
    turn = 2 * np.pi * np.arange(5) / 5
    ring = np.stack([0.95 * np.cos(turn), 0.95 * np.sin(turn), 0 * turn], 1)
    found, _ = search(np.concatenate([ring, [[0, 0, 0.57], [0.7, 0.1, -0.75]]]), {})
    return found.positions + 0.05 * np.random.default_rng(0).normal(size=(7, 3))


def search(positions: Any, options: dict[str, Any]) -> tuple[Any, int]:
    """Run Sella to a saddle point; return the atoms and the number of steps."""
    atoms = Atoms(f"Ar{len(positions)}", positions, calculator=Counting(lennard_jones))
    exact = {"hessian_function": atoms.calc.hessian_function} if "diag_every_n" in options else {}
    optimizer = Sella(atoms, order=1, internal=False, logfile=None, **exact, **options)
    optimizer.run(fmax=1e-6, steps=500)
    return atoms, optimizer.nsteps


def main(arguments: Sequence[str] | None = None) -> None:
    """Search from each start by each way."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print(f"{'atoms':8}{'Hessian':18}{'steps':>7}{'forces':>8}{'Hessians':>10}{'energy':>12}{'negative':>10}")
    for positions in (RHOMBUS, near_saddle()):
        for name, options in (
            ("of Sella", {}),
            ("exact, fifth step", {"diag_every_n": 5}),
            ("exact, each step", {"diag_every_n": 0}),
        ):
            atoms, steps = search(positions, options)
            # Counted before the next line asks for more.
            forces, hessians = atoms.calc.forces, atoms.calc.hessians
            negative = (np.linalg.eigvalsh(atoms.calc.hessian_function(atoms)) < -1e-3).sum()
            energy = atoms.get_potential_energy()
            print(f"{len(atoms):<8}{name:18}{steps:7}{forces:8}{hessians:10}{energy:12.6f}{negative:10}")


if __name__ == "__main__":
    main()
