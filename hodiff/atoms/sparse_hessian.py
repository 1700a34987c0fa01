"""Sparse Hessians of energies in which distant atoms do not interact, from a few products."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from scipy.sparse import csr_array, kron
from scipy.spatial import cKDTree
from torch import Tensor

from hodiff.atoms.columns import in_groups
from hodiff.atoms.systems import Atoms, Energy, MovingAtoms, atom_indices, require_positions
from hodiff.common.options import require_choice, require_chunk_size, require_number
from hodiff.common.trees import describe
from hodiff.derivatives.bound_function import leave_inference_mode
from hodiff.errors import InputError
from hodiff.operators import HessianOperator
from hodiff.sparse.coloring import Coloring, color
from hodiff.sparse.coloring.compressed_patterns import FORMATS, pattern_of
from hodiff.sparse.recovery.recover import recover, require_whole

Array = np.ndarray[Any, Any]


@leave_inference_mode
def sparse_hessian(
    energy: Energy,
    positions: Tensor,
    interaction_range: float,
    cell: Tensor | None = None,
    *,
    free: Atoms = None,
    method: str = "acyclic",
    format: str = "csr",
    chunk_size: int | str | None = "auto",
) -> Any:
    r"""Compute the Hessian of an energy in which distant atoms do not interact, from a few products.

    $$ H_{ia,jb} = 0 \quad\text{for}\quad |r_i - r_j| > R $$

    Atoms that have no neighbour in common share their columns: three products for each color of atoms, however many
    atoms there are. One product with a random vector then shows whether the energy has a longer range. It misses
    couplings of distant atoms that are smaller than the tolerance of their row, about 2e-12 of its size in float64 and
    6e-6 in float32.

    Args:
        energy: Function of the positions that returns the energy, as in `hessian`.
        positions: Positions of shape (N, 3).
        interaction_range: The distance R. It is the cutoff of a potential of pairs. In a potential of atomic energies
            it is twice the distance from which an atomic energy depends on an atom: twice the cutoff for angles,
            embedded atoms and TorchANI, and 2 L times the cutoff for L layers of messages, as in MACE.
        cell: Lattice vectors as rows, (3, 3), of a periodic crystal; rows of zeros for directions without period.
        free: Atoms that move, as in `hessian`.
        method: "acyclic" or "star", the method of coloring of `hodiff.sparse.hessian`: "star" reads all entries from
            the products, without substitution, and needs up to twice as many.
        format: "csr" or "coo" for a sparse tensor, or "scipy" for a `csr_array`.
        chunk_size: Number of products that are computed together, as in `hessian`.

    Returns:
        The matrix (3 F, 3 F) for F free atoms, in the dtype of the positions, with blocks (3, 3) of atoms within the
        range.

    Raises:
        InputError: If an argument is invalid, as in `hessian`, or if the energy has a longer range.
        RouteError: If a second derivative does not exist.

    Example:
        >>> import torch, hodiff
        >>> def chain(x):  # springs between neighbours
        ...     return ((x[1:] - x[:-1]).norm(dim=1) - 1).square().sum() / 2
        >>> x = torch.tensor([[float(i), 0, 0] for i in range(1000)])
        >>> H = hodiff.atoms.sparse_hessian(chain, x, 1.1)
        >>> H.shape, H.values().numel()
        (torch.Size([3000, 3000]), 26982)
        >>> H[3, 0], H[3, 3]
        (tensor(-1.), tensor(2.))

    Source: A. Gebremedhin, A. Pothen, A. Tarafdar & A. Walther, "Efficient computation of sparse Hessians using
    coloring and automatic differentiation", INFORMS Journal on Computing 21, 2009.
    """
    caller = "atoms.sparse_hessian"
    positions = require_positions(caller, positions)
    require_number(caller, "interaction_range", interaction_range, positive=True, finite=True)
    require_choice(caller, "method", method, ("star", "acyclic"))
    require_choice(caller, "format", format, FORMATS)
    require_chunk_size(caller, "chunk_size", chunk_size)
    lattice = _require_lattice(caller, cell)
    moving = atom_indices(caller, "free", free, len(positions))
    place = MovingAtoms.of(caller, energy, positions, moving)
    sites = place.point.double().cpu().numpy()
    coloring = by_atoms(color(pairs_within(sites, interaction_range, lattice), method))
    A = HessianOperator(place.energy, place.point, chunk_size=None)

    def multiply(rows: Tensor) -> Tensor:
        return in_groups(A, len(rows), chunk_size, lambda: A @ rows.t()).t()

    values, off = recover(coloring, {"columns": multiply}, [place.point], torch.finfo(A.dtype).eps)
    if off is not None and len(off.missing):
        atoms = off.missing[:1] // 3
        raise InputError(
            f"{caller}: interaction_range: expected at least the largest distance of two atoms that interact, got "
            f"{interaction_range}: by a product with a random vector, {len(off.missing)} forces depend on positions of "
            f"more distant atoms, such as on atom {int(atoms if moving is None else moving[atoms.cpu()])}. Use twice "
            "the distance from which an atomic energy depends on an atom, or hodiff.atoms.hessian."
        )
    require_whole(caller, "interaction_range", coloring, off)
    return coloring.matrix(values, format)


def pairs_within(positions: Array, distance: float, lattice: Array) -> csr_array:
    """Find the atoms, and their periodic images, within a distance of each atom; an atom is within it of itself."""
    count = len(positions)
    periodic = lattice.any(1)
    box = _completed(lattice)
    fractions = positions @ np.linalg.inv(box)
    fractions[:, periodic] %= 1
    # Distances between opposite faces of the cell.
    margins = distance * np.linalg.norm(np.linalg.inv(box), axis=0)
    images, atoms = fractions, np.arange(count)
    for axis in np.flatnonzero(periodic):
        reach = math.ceil(margins[axis])
        steps = np.zeros((2 * reach + 1, 1, 3))
        steps[:, 0, axis] = np.arange(-reach, reach + 1)
        images = (images + steps).reshape(-1, 3)
        atoms = np.tile(atoms, 2 * reach + 1)
        near = (images[:, axis] >= -margins[axis]) & (images[:, axis] <= 1 + margins[axis])
        images, atoms = images[near], atoms[near]
    # Rounding must not lose a pair at exactly this distance.
    found = cKDTree(fractions @ box).query_ball_tree(cKDTree(images @ box), distance * (1 + 1e-9))
    rows = np.repeat(np.arange(count), [len(each) for each in found])
    columns = atoms[np.concatenate([np.asarray(each, dtype=int) for each in found])]
    pattern = csr_array((np.ones(len(rows), dtype=bool), (rows, columns)), shape=(count, count))
    pattern.sum_duplicates()
    return csr_array(pattern + pattern.T)


def by_atoms(atoms: Coloring) -> Coloring:
    """Give the coordinates of atoms of one color three colors."""
    assert atoms.column_colors is not None
    places = atoms.pattern.rows, atoms.pattern.columns
    pattern = csr_array((np.ones(atoms.nnz, dtype=bool), places), shape=atoms.shape)
    blocks = pattern_of("atoms.sparse_hessian", csr_array(kron(pattern, np.ones((3, 3), dtype=bool))))
    colors = 3 * atoms.column_colors[:, None] + np.arange(3, dtype=atoms.column_colors.dtype)
    return Coloring(atoms.method, atoms.order, blocks, column_colors=colors.reshape(-1))


def _require_lattice(caller: str, cell: Any) -> Array:
    if cell is None:
        return np.zeros((3, 3))
    valid = isinstance(cell, Tensor) and cell.shape == (3, 3) and cell.is_floating_point()
    lattice = cell.detach().double().cpu().numpy() if valid else np.full((3, 3), np.nan)
    if not np.isfinite(lattice).all() or np.linalg.matrix_rank(lattice) < lattice.any(1).sum():
        raise InputError(
            f"{caller}: cell: expected lattice vectors, a tensor of shape (3, 3) whose rows are independent or zero, "
            f"got {describe(cell)}; omit it for a molecule."
        )
    return lattice


def _completed(lattice: Array) -> Array:
    """Replace lattice vectors of zeros by unit vectors that are orthogonal to the others."""
    periodic = lattice.any(1)
    if periodic.all():
        return lattice
    _, _, basis = np.linalg.svd(lattice)
    box = lattice.copy()
    box[~periodic] = basis[int(periodic.sum()) :]
    return box
