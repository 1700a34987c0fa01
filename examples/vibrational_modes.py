"""The slowest vibrations of a cluster of 500 atoms, from its sparse Hessian.

    python examples/vibrational_modes.py
    python examples/vibrational_modes.py --quick

Atoms attract each other by the potential of Lennard and Jones, which ends smoothly at a cutoff. The Hessian of the
energy therefore has entries for nearby atoms only. The cluster, a ball cut out of a crystal, is relaxed by L-BFGS and
then by Newton steps with the Hessian itself; pairs within reach are updated between the two. At the minimum the
eigenvalues of the Hessian are squares of frequencies (masses are 1). Six eigenvalues are zero, for three translations
and three rotations of the free cluster. `scipy.sparse.linalg.eigsh` finds the next lowest eigenvalues by inverting the
sparse matrix. First, the script compares a smaller cluster's Hessian with the dense Hessian.

Source: M. Born & K. Huang, Dynamical Theory of Crystal Lattices (1954), for vibrations; S. Stoddard & J. Ford, Physical
Review A 8 (1973) for potentials that end smoothly.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import matplotlib as mpl
import numpy as np
import torch
from scipy.optimize import minimize
from scipy.sparse import csr_array, eye_array
from scipy.sparse.linalg import eigsh, splu
from scipy.spatial import cKDTree
from torch import Tensor

import hodiff

mpl.use("Agg")
import matplotlib.pyplot as plt

CUTOFF, SKIN = 1.7, 0.3  # two shells of neighbours, and an extra distance for the list of pairs
SPACING = 2 ** (1 / 6)  # distance of the pair of least energy
NEWTON_STEPS = 8


def cluster(atoms: int) -> Tensor:
    """Return the sites of a face-centred cubic crystal next to a point without symmetry, (3 * atoms,)."""
    reach = int(np.ceil((atoms / 2) ** (1 / 3))) + 1
    cells = np.stack(np.meshgrid(*[np.arange(-reach, reach + 1)] * 3, indexing="ij"), -1).reshape(-1, 3)
    sites = cells[cells.sum(1) % 2 == 0] * SPACING / np.sqrt(2)
    nearest = np.linalg.norm(sites - [0.11, 0.05, 0.17], axis=1).argsort(kind="stable")[:atoms]
    return torch.from_numpy(sites[nearest].reshape(-1))


def pairs_within(x: Tensor, distance: float) -> tuple[Tensor, Tensor]:
    """Return the numbers of atoms within a distance, each pair once."""
    found = cKDTree(x.view(-1, 3).numpy()).query_pairs(distance, output_type="ndarray")
    one, other = torch.from_numpy(found[np.lexsort(found.T[::-1])]).long().T
    return one, other


def energy(x: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """Sum 4 (d^-12 - d^-6) over pairs, times (1 - (d / cutoff)^2)^3, which ends with two continuous derivatives."""
    places = x.view(-1, 3)
    squared = (places[one] - places[other]).square().sum(-1)
    gate = (1 - squared / CUTOFF**2).clamp_min(0) ** 3
    cube = squared**-3
    return (4 * (cube**2 - cube) * gate).sum()


def relaxed(x: Tensor) -> tuple[Tensor, float]:
    """Return the next minimum, and the largest remaining force."""

    def value_and_slopes(flat: np.ndarray) -> tuple[float, np.ndarray]:
        place = torch.from_numpy(flat).requires_grad_()
        value = energy(place, *pairs)
        (slopes,) = torch.autograd.grad(value, place)
        return value.item(), slopes.numpy()

    pairs = pairs_within(x, CUTOFF + SKIN)
    options = {"maxiter": 2000, "gtol": 1e-5, "maxcor": 30}
    x = torch.from_numpy(minimize(value_and_slopes, x.numpy(), jac=True, method="L-BFGS-B", options=options).x)
    pairs = pairs_within(x, CUTOFF + SKIN)
    hessian = hodiff.sparse.hessian(energy, method="acyclic", format="scipy")
    for _ in range(NEWTON_STEPS):
        _, slopes = value_and_slopes(x.numpy())
        if abs(slopes).max() < 1e-11:
            break
        # Rigid motions have no curvature. A small shift makes the matrix invertible without changing the step.
        shifted = (hessian(x, *pairs) + 1e-6 * eye_array(len(x))).tocsc()
        x = x - torch.from_numpy(splu(shifted).solve(slopes))
    return x, abs(value_and_slopes(x.numpy())[1]).max()


def low_modes(H: csr_array, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the lowest eigenvalues, increasing, and their vectors, by inverting H less a small negative number."""
    values, vectors = eigsh(H.tocsc(), k=count, sigma=-1e-3, which="LM", v0=np.ones(H.shape[0]) + np.arange(H.shape[0]))
    order = values.argsort()
    return values[order], vectors[:, order]


def rigid_motions(x: Tensor) -> np.ndarray:
    """Return three translations and three rotations as orthonormal columns (3 * atoms, 6)."""
    places = x.view(-1, 3).numpy()
    axes = np.eye(3)
    shifts = [np.broadcast_to(axis, places.shape) for axis in axes]
    turns = [np.cross(places - places.mean(0), axis) for axis in axes]
    return np.linalg.qr(np.stack([each.reshape(-1) for each in (*shifts, *turns)], 1))[0]


def compare(atoms: int) -> float:
    """Return the distance of a smaller cluster's sparse Hessian from the dense one, over the largest entry."""
    x, _ = relaxed(cluster(atoms))
    pairs = pairs_within(x, CUTOFF)
    dense = hodiff.hessian_matrix(energy, x, *pairs)
    off = hodiff.sparse.hessian(energy)(x, *pairs).to_dense() - dense
    return (off.abs().max() / dense.abs().max()).item()


def check() -> str:
    """Run hodiff's check on the energy: all routes, gradgradcheck, SciPy's Hessian."""
    x = 1.02 * cluster(4)
    one, other = pairs_within(x, CUTOFF)
    return hodiff.assert_differentiable(lambda x: energy(x, one, other), x, vmap=False).summary


def seconds(call: Callable[[], object], repeats: int = 3) -> float:
    """Return the least processor seconds of some calls."""

    def once() -> float:
        begun = time.process_time()
        call()
        return time.process_time() - begun

    return min(once() for _ in range(repeats))


def draw(H: csr_array, values: np.ndarray, path: Path) -> None:
    """Plot the pattern of the Hessian, and a histogram of frequencies."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    left.spy(H, markersize=0.3)
    left.set(title=f"Hessian, {H.shape[0]:,} x {H.shape[0]:,}, {H.nnz / H.shape[0] ** 2:.1%} of its entries", xticks=[])
    frequencies = np.sqrt(np.linalg.eigvalsh(H.toarray()).clip(0))
    right.hist(frequencies, 60, color="C0", label="all modes")
    right.plot(np.sqrt(values.clip(0)), np.zeros_like(values), "|", color="C1", markersize=18, label="found by eigsh")
    right.set(title="vibrations", xlabel="frequency")
    right.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=88)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    """Relax, differentiate, and find the modes."""
    parser = argparse.ArgumentParser(description="Vibrations of a cluster from its sparse Hessian.")
    parser.add_argument("--atoms", type=int, default=500, help="number of atoms in the cluster")
    parser.add_argument("--modes", type=int, default=40, help="number of modes to find")
    parser.add_argument("--quick", action="store_true", help="use 60 atoms and 20 modes")
    parser.add_argument("--output", type=Path, default=Path("figures/vibrational_modes.png"), help="path of the figure")
    options = parser.parse_args(arguments)
    if options.quick:
        options.atoms, options.modes = 60, 20
    torch.set_num_threads(1)
    small = min(options.atoms, 55)
    print(f"{small} atoms: sparse and dense Hessian differ by {compare(small):.1e} of the largest entry")
    x, force = relaxed(cluster(options.atoms))
    pairs = pairs_within(x, CUTOFF)
    print(f"{options.atoms} atoms: energy {energy(x, *pairs).item():.6f}, {len(pairs[0]):,} pairs, force {force:.0e}\n")
    begun = time.process_time()
    pattern = hodiff.sparse.hessian_pattern(energy, x, *pairs)
    colorings = [hodiff.sparse.color(pattern, method) for method in ("star", "acyclic")]
    found = time.process_time() - begun
    dense = seconds(lambda: hodiff.hessian_matrix(energy, x, *pairs), 1)
    print(f"{'':24}{'products':>10}{'seconds':>10}")
    print(f"{'pattern and colorings':24}{'':>10}{found:10.3f}")
    for coloring in colorings:
        hessian = hodiff.sparse.hessian(energy, coloring=coloring, format="scipy")
        print(f"{coloring.method:24}{coloring.num_colors:10,}{seconds(partial(hessian, x, *pairs)):10.3f}")
    print(f"{'dense':24}{len(x):10,}{dense:10.3f}\n")
    H = hodiff.sparse.hessian(energy, coloring=colorings[0], format="scipy")(x, *pairs)
    values, vectors = low_modes(H, options.modes)
    apart = np.linalg.norm(vectors[:, :6] - rigid_motions(x) @ (rigid_motions(x).T @ vectors[:, :6]))
    print(f"six zero modes          {abs(values[:6]).max():.1e} at most, {apart:.1e} from translations and rotations")
    print(f"slowest vibrations      {' '.join(f'{each:.4f}' for each in np.sqrt(values[6:12]))}")
    draw(H, values, options.output)
    print(f"Figure: {options.output}")
    if not options.quick:
        print(check())


if __name__ == "__main__":
    main()
