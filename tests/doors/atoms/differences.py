"""Hessians from central differences of a calculator's forces."""

from typing import Any

import numpy as np


def hessian_by_differences(atoms: Any, step: float = 1e-3) -> np.ndarray:
    """Differences of fourth order, so that a step is far from rounding."""
    place, n = atoms.positions.copy(), len(atoms)
    H = np.zeros((n, 3, n, 3))
    for i in range(n):
        for axis in range(3):
            for steps, weight in ((1, 2 / 3), (-1, -2 / 3), (2, -1 / 12), (-2, 1 / 12)):
                atoms.positions = place
                atoms.positions[i, axis] += steps * step
                H[i, axis] -= weight * atoms.get_forces(apply_constraint=False) / step
    atoms.positions = place
    return H
