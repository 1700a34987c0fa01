"""Elastic constants of silicon in Stillinger and Weber's potential, and how the atoms follow a strain.

    python examples/elastic_constants.py
    python examples/elastic_constants.py --quick

Second derivatives of the energy by strain, and by strain and positions together, come from one recording of the energy.
No deformed crystal is relaxed. In silicon, the two atoms of the cell move against each other under shear, which halves
C44. The script first finds the side of the cubic cell at zero stress, then prints the constants beside those of the
literature, and compares both C44, clamped and relaxed, with curvatures of the energy of sheared crystals.

Source: F. Stillinger & T. Weber, Physical Review B 31 (1985), for the potential; E. R. Cowley, Physical Review Letters
60 (1988), for its elastic constants.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from scipy.optimize import brentq, minimize
from torch import Tensor

import hodiff
from hodiff.checks import along_directions

# Energy in eV, length in Å.
DEPTH, LENGTH = 2.1683, 2.0951
A, B, REACH, ANGULAR, DECAY = 7.049556277, 0.6022245584, 1.8, 21.0, 1.2
GPA = 160.21766  # one eV / Å³
PUBLISHED = {"C11": 151.4, "C12": 76.4, "C44": 56.4}  # GPa, of Cowley


def silicon(side: float) -> tuple[Tensor, Tensor]:
    """Return positions and cell of the diamond structure, two atoms in the primitive cell."""
    cell = side / 2 * torch.tensor([[0.0, 1.0, 1.0], [1.0, 0.0, 1.0], [1.0, 1.0, 0.0]], dtype=torch.float64)
    return torch.tensor([[0.0] * 3, [0.25] * 3], dtype=torch.float64) * side, cell


class StillingerWeber:
    """The potential with the neighbours of one structure, as constants."""

    def __init__(self, positions: Tensor, cell: Tensor):
        images = torch.cartesian_prod(*[torch.arange(-2.0, 3.0)] * 3).double()
        apart = (positions[None] - positions[:, None])[:, :, None] + images @ cell
        distance = apart.norm(dim=-1)
        self.center, self.other, place = ((distance > 0) & (distance < REACH * LENGTH)).nonzero(as_tuple=True)
        self.image = images[place]
        # Pairs of neighbours of one atom.
        same = self.center[:, None] == self.center[None]
        self.first, self.second = same.triu(1).nonzero(as_tuple=True)

    def __call__(self, positions: Tensor, cell: Tensor) -> Tensor:
        """Compute the energy of a cell."""
        apart = positions[self.other] - positions[self.center] + self.image @ cell
        r = apart.norm(dim=1)
        tail = 1 / (r / LENGTH - REACH)
        pairs = A * (B * (LENGTH / r) ** 4 - 1) * tail.exp() / 2
        direction = apart / r[:, None]
        cosine = (direction[self.first] * direction[self.second]).sum(1)
        angles = ANGULAR * (cosine + 1 / 3) ** 2 * (DECAY * (tail[self.first] + tail[self.second])).exp()
        return DEPTH * (pairs.sum() + angles.sum())


def side_at_rest() -> float:
    """Return the side of the cubic cell without stress."""

    def pressure(side: float) -> float:
        x, cell = silicon(side)
        _, stress = hodiff.atoms.forces(StillingerWeber(x, cell), x, cell)
        return stress.diagonal().sum().item()

    return float(brentq(pressure, 5.2, 5.7, xtol=1e-12))


def relaxed_energy(energy: StillingerWeber, x: Tensor, cell: Tensor) -> float:
    """Return the energy after the atoms have moved to their minimum in a fixed cell."""

    def value_and_slopes(flat: object) -> tuple[float, object]:
        place = torch.as_tensor(flat).view(-1, 3).requires_grad_()
        value = energy(place, cell)
        return value.item(), torch.autograd.grad(value, place)[0].flatten().numpy()

    found = minimize(value_and_slopes, x.flatten().numpy(), jac=True, method="BFGS", options={"gtol": 1e-9})
    return float(found.fun)


def sheared_curvature(energy: StillingerWeber, x: Tensor, cell: Tensor, relaxed: bool, step: float = 1e-3) -> float:
    """Return C44 by differences of energies of sheared crystals."""
    energies = []
    for shear in (step, 0.0, -step):
        strain = torch.zeros(3, 3, dtype=x.dtype)
        strain[1, 2] = strain[2, 1] = shear / 2
        values, vectors = torch.linalg.eigh(torch.eye(3, dtype=x.dtype) + 2 * strain)
        stretch = vectors * values.sqrt() @ vectors.t()
        places = x @ stretch, cell @ stretch
        energies.append(relaxed_energy(energy, *places) if relaxed else energy(*places).item())
    return (energies[0] - 2 * energies[1] + energies[2]) / step**2 / torch.linalg.det(cell).abs().item()


def check() -> str:
    """Run hodiff's check on the energy, in positions and cell: all routes, gradgradcheck, SciPy's Hessian."""
    x, cell = silicon(5.5)
    energy = StillingerWeber(x, cell)
    few = along_directions(lambda both: energy(*both), (x, cell), size=0.1)
    return hodiff.assert_differentiable(few, torch.zeros(2, dtype=torch.float64), vmap=False).summary


def main(arguments: Sequence[str] | None = None) -> None:
    """Find the crystal at rest, and print its constants."""
    parser = argparse.ArgumentParser(description="Elastic constants of silicon.")
    parser.add_argument(
        "--quick", action="store_true", help="leave out the differences of sheared crystals, and the check"
    )
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    side = side_at_rest()
    x, cell = silicon(side)
    energy = StillingerWeber(x, cell)
    print(f"side {side:.4f} Å, energy {energy(x, cell).item() / 2:.4f} eV an atom")
    C = hodiff.atoms.elastic_constants(energy, x, cell)
    assert C.relaxed is not None
    rows = {
        "C11": C.relaxed[0, 0],
        "C12": C.relaxed[0, 1],
        "C44": C.relaxed[3, 3],
        "C44 clamped": C.clamped[3, 3],
    }
    print(f"\n{'GPa':14}{'found':>10}{'published':>12}")
    for name, value in rows.items():
        print(f"{name:14}{GPA * value.item():10.2f}{PUBLISHED.get(name, ''):>12}")
    if not options.quick:
        found = [GPA * sheared_curvature(energy, x, cell, relaxed) for relaxed in (True, False)]
        print(f"\nBy energies of sheared crystals: C44 {found[0]:.2f} GPa, clamped {found[1]:.2f} GPa")
        print(check())


if __name__ == "__main__":
    main()
