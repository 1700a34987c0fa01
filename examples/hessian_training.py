"""Train a potential on energies, forces and products of the Hessian with random vectors.

    python examples/hessian_training.py
    python examples/hessian_training.py --quick

Frequencies and transition states depend on second derivatives, which training on energies and forces leaves free. The
whole Hessian of each configuration in a loss costs 3 N products a step. One product with a random vector costs one, and
its squared error is an unbiased estimate of the squared error of the Hessian. `hodiff.value_grad_hvp` returns energy,
forces and product from one recording, differentiable in the weights; configurations of a batch share the call, as they
do not interact. The teacher is the potential of Lennard and Jones for a cluster of 5 atoms, the model a network of pair
distances. Both models take the same steps, from the same weights, with the same data. The script prints errors of
held-out forces, Hessians and frequencies during training, and the time of a step beside that of one gradient of the
energy by the weights.

Source: M. F. Hutchinson, Communications in Statistics 18 (1989), for the estimate; W. M. Czarnecki et al., "Sobolev
training for neural networks", NeurIPS (2017), for derivatives in the loss; "Projected Hessian learning",
arXiv:2603.04523, for products of potentials.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

import hodiff
from hodiff.checks import along_directions

ATOMS = 5
CURVE = 6  # points of a learning curve
ONE, OTHER = torch.triu_indices(ATOMS, ATOMS, 1)
Energy = Callable[[Tensor], Tensor]


def squared_distances(x: Tensor) -> Tensor:
    """Return the squared distances of all pairs, (B, pairs)."""
    return (x[:, ONE] - x[:, OTHER]).square().sum(-1)


def lennard_jones(x: Tensor) -> Tensor:
    """Compute the energies (B,) of clusters (B, ATOMS, 3)."""
    cube = squared_distances(x) ** -3
    return 4 * (cube**2 - cube).sum(1)


class Potential(nn.Module):
    """A sum over atoms of a network of the radial functions of the neighbours."""

    centers: Tensor

    def __init__(self, width: int):
        super().__init__()
        self.register_buffer("centers", torch.linspace(0.3, 1.2, 12))
        self.atom = nn.Sequential(
            nn.Linear(12, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Compute the energies (B,) of clusters (B, ATOMS, 3)."""
        inverse = squared_distances(x).rsqrt()
        radial = torch.exp(-30 * (inverse[..., None] - self.centers) ** 2)
        atoms = radial.new_zeros(len(x), ATOMS, 12).index_add(1, ONE, radial).index_add(1, OTHER, radial)
        energies: Tensor = self.atom(atoms).sum((1, 2))
        return energies


def sample(count: int, generator: torch.Generator) -> Tensor:
    """Draw configurations around a bipyramid, whose bonds have the length of least energy."""
    side = 2 ** (1 / 6)
    turn = torch.arange(3) * 2 * torch.pi / 3
    ring = torch.stack([turn.cos(), turn.sin(), torch.zeros(3)], 1) * side / 3**0.5
    tips = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, -1.0]]) * side * (2 / 3) ** 0.5
    return torch.cat([ring, tips]) + 0.04 * torch.randn(count, ATOMS, 3, generator=generator)


def derivatives(energy: Energy, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute energies, gradients and Hessian-vector products of a batch, from one recording."""
    total, gradient, product = hodiff.value_grad_hvp(lambda x: energy(x).sum(), x, v)
    return total, gradient, product


def train(
    model: Potential, x: Tensor, steps: int, seed: int, hessians: bool, look: Callable[[int], None] = lambda _: None
) -> float:
    """Train by Adam on forces, and with `hessians` on products; return milliseconds for a step of the model."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    spent = 0.0
    for step in range(steps):
        chosen = x[torch.randint(len(x), (16,), generator=generator)]
        v = torch.randn(chosen.shape, generator=generator)
        _, slope, curvature = derivatives(lennard_jones, chosen, v)
        begun = time.process_time()
        if hessians:
            _, own_slope, own_curvature = derivatives(model, chosen, v)
            # Entries of the Hessian are about 50 times as large as forces.
            loss = (own_slope - slope).square().mean() + 1e-3 * (own_curvature - curvature).square().mean()
        else:
            place = chosen.clone().requires_grad_()
            (own_slope,) = torch.autograd.grad(model(place).sum(), place, create_graph=True)
            loss = (own_slope - slope).square().mean()
        optimizer.zero_grad()
        loss.backward()
        spent += time.process_time() - begun
        optimizer.step()
        schedule.step()
        if (step + 1) % max(steps // CURVE, 1) == 0:
            look(step + 1)
    return 1e3 * spent / steps


def gradient_cost(model: Potential, x: Tensor) -> float:
    """Return the milliseconds of one gradient of the energies by the weights."""
    best = float("inf")
    for _ in range(20):
        begun = time.process_time()
        for _ in range(5):
            torch.autograd.grad(model(x[:16]).sum(), list(model.parameters()))
        best = min(best, (time.process_time() - begun) / 5)
    return 1e3 * best


def errors(model: Energy, x: Tensor) -> tuple[float, float, float]:
    """Return relative errors of forces and Hessians, and the mean error of frequencies, for masses of 1."""

    def of(energy: Energy) -> tuple[Tensor, Tensor, Tensor]:
        H = hodiff.atoms.hessian(energy, x)
        squares = torch.linalg.eigvalsh(H.double().view(len(x), 3 * ATOMS, 3 * ATOMS))
        gradient, *_ = torch.autograd.grad(energy(place := x.clone().requires_grad_()).sum(), place)
        return gradient, H, squares.abs().sqrt() * squares.sign()

    (slope, H, frequencies), (own_slope, own_H, own_frequencies) = of(lennard_jones), of(model)
    relative = [((a - b).norm() / b.norm()).item() for a, b in ((own_slope, slope), (own_H, H))]
    return relative[0], relative[1], (own_frequencies - frequencies).abs().mean().item()


def check() -> str:
    """Run hodiff's check on the energy of a network, in the positions: all routes, gradgradcheck, SciPy's Hessian."""
    torch.manual_seed(0)
    model = Potential(4).double().requires_grad_(False)
    somewhere = sample(1, torch.Generator().manual_seed(0)).double()
    few = along_directions(lambda x: model(x).sum(), somewhere, size=0.1)
    return hodiff.assert_differentiable(few, torch.zeros(2, dtype=torch.float64), vmap=False).summary


def main(arguments: Sequence[str] | None = None) -> None:
    """Train both models, and compare them."""
    parser = argparse.ArgumentParser(description="Training of a potential with Hessian-vector products.")
    parser.add_argument("--steps", type=int, default=3000, help="number of steps of Adam")
    parser.add_argument("--count", type=int, default=64, help="number of training configurations")
    parser.add_argument("--quick", action="store_true", help="take 400 steps, without the check")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and configurations")
    options = parser.parse_args(arguments)
    steps = 400 if options.quick else options.steps
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(options.seed)
    x, held_out = sample(options.count, generator), sample(50, generator)
    curves: dict[bool, dict[int, tuple[float, float, float]]] = {False: {}, True: {}}
    costs = {}
    for hessians, curve in curves.items():
        torch.manual_seed(options.seed)
        model = Potential(64)

        def look(step: int, model: Potential = model, curve: dict[int, tuple[float, float, float]] = curve) -> None:
            curve[step] = errors(model, held_out)

        costs[hessians] = train(model, x, steps, options.seed, hessians, look)
    print(f"{'':8}{'trained on forces':>30}{'on forces and products':>30}")
    print(f"{'steps':8}" + 2 * f"{'forces':>10}{'Hessian':>10}{'frequency':>10}")
    for step in curves[False]:
        rows = "".join(f"{each:10.4f}" for curve in curves.values() for each in curve[step])
        print(f"{step:<8}{rows}")
    unit = gradient_cost(Potential(64), x)
    for hessians, cost in costs.items():
        name = "forces and products" if hessians else "forces"
        print(f"{name}: {cost:.2f} ms a step, {cost / unit:.1f} gradients")
    if not options.quick:
        print(check())


if __name__ == "__main__":
    main()
