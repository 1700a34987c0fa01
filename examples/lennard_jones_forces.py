"""Learn the forces of a cluster of seven atoms by a potential with attention over the atoms.

    python examples/lennard_jones_forces.py --quick
    python examples/lennard_jones_forces.py

A potential gives an energy, and its forces are minus the gradient with respect to the positions. Fitting forces
differentiates this gradient with respect to the weights. The model is a transformer of plain `torch.nn` whose tokens
are atoms. Its features are distances, so the energy is invariant under rotations, translations and exchanges of atoms.
A mask adds distances to the attention scores, and is differentiated twice, like queries, keys and values. Torch's fused
attention has no second derivative; within `hodiff.corrected()` it has one.

The truth is the potential of Lennard and Jones, the sum over pairs of 4 (d^-12 - d^-6), at configurations around its
minimum, which SciPy finds. The script prints the error of held-out forces during training, compared with the same model
trained on energies alone. At the end it prints the true energy at the minimum of each learned potential.

Source: K. Schutt et al., "SchNet: a continuous-filter convolutional neural network for modeling quantum interactions",
NeurIPS 2017, equation 5, for training by forces.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
import torch
import torch.nn.functional as F
from scipy.optimize import OptimizeResult, minimize
from torch import Tensor, nn
from torch.func import functional_call
from tqdm import trange

import hodiff
from hodiff.checks import along_directions

mpl.use("Agg")
import matplotlib.pyplot as plt

Energy = Callable[[Tensor], Tensor]
Data = tuple[Tensor, ...]  # configurations, energies, forces

ATOMS, RADIAL = 7, 16  # atoms, and features of a distance
ROWS = 5  # rows of the table


class Potential(nn.Module):
    """Energy as a function of distances, invariant under exchanges of atoms."""

    centres: Tensor

    def __init__(self, width: int, scale: float = 1.0, heads: int = 2) -> None:
        super().__init__()
        self.scale, self.heads = scale, heads
        self.register_buffer("centres", torch.linspace(0.8, 2.4, RADIAL))
        self.embed = nn.Sequential(nn.Linear(RADIAL, width), nn.SiLU(), nn.Linear(width, width))
        self.scores = nn.Linear(RADIAL, heads)
        self.norm, self.project, self.output = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.read = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Map atoms (N, ATOMS, 3) to energies (N,)."""
        features = torch.exp(-((distances(x)[..., None] - self.centres) ** 2) / (2 * 0.15**2))
        others = 1 - torch.eye(x.shape[1], dtype=x.dtype)
        h = (self.embed(features) * others[..., None]).sum(-2)
        q, k, v = self.project(self.norm(h)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=self.scores(features).permute(0, 3, 1, 2))
        h = h + self.output(attended.transpose(1, 2).flatten(-2))
        return self.scale * self.read(h).sum((1, 2))


def distances(x: Tensor) -> Tensor:
    """Compute distances of atoms (N, ATOMS, 3), with 1 on the diagonal, where a root of 0 would have no slope."""
    squares = (x[:, :, None] - x[:, None]).square().sum(-1)
    return (squares + torch.eye(x.shape[1], dtype=x.dtype)).sqrt()


def lennard_jones(x: Tensor) -> Tensor:
    """Compute the true energies (N,) of atoms (N, ATOMS, 3)."""
    one, other = torch.triu_indices(x.shape[1], x.shape[1], 1)
    inverse = distances(x)[:, one, other] ** -6
    return 4 * (inverse**2 - inverse).sum(-1)


def forces(energy: Energy, x: Tensor, create_graph: bool = False) -> Tensor:
    """Compute minus the gradient in the positions; `create_graph` makes it differentiable."""
    x = x.detach().requires_grad_()
    with hodiff.corrected():
        (slopes,) = torch.autograd.grad(energy(x).sum(), x, create_graph=create_graph)
    return -slopes


def force_loss(model: Energy, batch: Data) -> Tensor:
    """Compute the mean squared error of forces."""
    x, _, right = batch
    return (forces(model, x, create_graph=True) - right).square().mean()


def energy_loss(model: Energy, batch: Data) -> Tensor:
    """Compute the mean squared error of energies."""
    x, right, _ = batch
    return (model(x) - right).square().mean()


LOSSES = {"energies": energy_loss, "forces": force_loss}


def relax(energy: Energy, start: Tensor) -> OptimizeResult:
    """Find the next minimum from a configuration (1, ATOMS, 3)."""

    def value_and_slopes(flat: np.ndarray) -> tuple[float, np.ndarray]:
        x = torch.from_numpy(flat).reshape(start.shape).to(start.dtype)
        return energy(x).item(), -forces(energy, x).flatten().double().numpy()

    return minimize(value_and_slopes, start.flatten().double().numpy(), jac=True, method="BFGS", options={"gtol": 1e-4})


def find_minimum(starts: int = 20) -> Tensor:
    """Return the lowest of the minima from random starts, (1, ATOMS, 3) in float64."""
    generator = torch.Generator().manual_seed(0)
    places = 1.2 * torch.randn(starts, 1, ATOMS, 3, generator=generator, dtype=torch.float64)
    best = min((relax(lennard_jones, each) for each in places), key=lambda found: found.fun)
    return torch.from_numpy(best.x).reshape(1, ATOMS, 3)


def sample(minimum: Tensor, count: int, generator: torch.Generator, dtype: torch.dtype = torch.float32) -> Data:
    """Draw configurations around the minimum, with energies above it and forces."""
    x = minimum + 0.06 * torch.randn(count, ATOMS, 3, generator=generator, dtype=torch.float64)
    found = x, lennard_jones(x) - lennard_jones(minimum), forces(lennard_jones, x)
    return tuple(each.detach().to(dtype) for each in found)


def force_error(model: Energy, data: Data) -> float:
    """Return the error relative to the forces, by root mean squares."""
    x, _, right = data
    return ((forces(model, x) - right).norm() / right.norm()).item()


def train(kind: str, model: nn.Module, data: Data, held_out: Data, steps: int, seed: int) -> dict[int, float]:
    """Train by Adam with a falling rate, on energies or forces; return errors of held-out forces by step."""
    generator = torch.Generator().manual_seed(seed)
    optimizer, errors = torch.optim.Adam(model.parameters(), lr=5e-3), {0: force_error(model, held_out)}
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    for step in trange(1, steps + 1, desc=kind, leave=False, disable=None):
        chosen = torch.randint(len(data[0]), (32,), generator=generator)
        optimizer.zero_grad()
        LOSSES[kind](model, tuple(each[chosen] for each in data)).backward()
        optimizer.step()
        schedule.step()
        if step % max(steps // (4 * ROWS), 1) == 0 or step == steps:
            errors[step] = force_error(model, held_out)
    return errors


def check() -> str:
    """Run hodiff's check on the energy, in weights and positions: all routes, gradgradcheck, SciPy's Hessian."""
    torch.manual_seed(0)
    model = Potential(4).double()
    x, _, _ = sample(find_minimum(1), 1, torch.Generator().manual_seed(0), torch.float64)

    def of_weights_and_places(both: tuple[dict[str, Tensor], Tensor]) -> Tensor:
        weights, x = both
        return functional_call(model, weights, (x,)).sum()

    few = along_directions(of_weights_and_places, ({name: w.detach() for name, w in model.named_parameters()}, x))
    return hodiff.assert_differentiable(few, torch.zeros(2, dtype=torch.float64), vmap=False).summary


def draw(errors: dict[str, dict[int, float]], models: dict[str, Potential], held_out: Data, path: Path) -> None:
    """Plot errors by step, and learned forces against true forces."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    x, _, truth = held_out
    for kind, by_step in errors.items():
        left.semilogy(list(by_step), list(by_step.values()), label=f"trained by {kind}")
        right.plot(truth.flatten(), forces(models[kind], x).flatten(), ".", markersize=2, label=f"trained by {kind}")
    left.set(title="relative error of held-out forces", xlabel="step")
    right.set(title="forces of held-out configurations", xlabel="true", ylabel="learned")
    right.axline((0, 0), slope=1, color="gray", linewidth=0.8)
    for axes in (left, right):
        axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=88)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    """Find the minimum, train in both ways, and compare."""
    parser = argparse.ArgumentParser(description="Forces of a Lennard-Jones cluster by an attention potential.")
    parser.add_argument("--steps", type=int, default=1500, help="number of steps of Adam")
    parser.add_argument("--count", type=int, default=500, help="number of training configurations")
    parser.add_argument("--width", type=int, default=32, help="width of the potential")
    parser.add_argument("--quick", action="store_true", help="take 150 steps with width 16, without the check")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and configurations")
    parser.add_argument(
        "--output", type=Path, default=Path("figures/lennard_jones_forces.png"), help="path of the figure"
    )
    options = parser.parse_args(arguments)
    if options.quick:
        options.steps, options.width = 150, 16
    torch.set_num_threads(1)  # the network is small
    minimum, generator = find_minimum(), torch.Generator().manual_seed(options.seed)
    print(f"{ATOMS} atoms, minimum {lennard_jones(minimum).item():.6f}")
    data, held_out = (sample(minimum, count, generator) for count in (options.count, 200))
    errors, models, seconds, scale = {}, {}, {}, data[2].square().mean().sqrt().item()
    for kind in LOSSES:
        torch.manual_seed(options.seed)
        models[kind], begun = Potential(options.width, scale), time.process_time()
        errors[kind] = train(kind, models[kind], data, held_out, options.steps, options.seed)
        seconds[kind] = (time.process_time() - begun) / options.steps
    print(f"\n{'relative error of forces, by step':36}{'by energies':>14}{'by forces':>14}")
    noted = list(errors["forces"])
    for step in sorted({*noted[:: max(len(noted) // ROWS, 1)], noted[-1]}):
        print(f"{step:36}{errors['energies'][step]:14.4f}{errors['forces'][step]:14.4f}")
    print(f"{'ms per step':36}" + "".join(f"{1e3 * each:14.1f}" for each in seconds.values()))
    ends = [relax(each, held_out[0][:1]).x.reshape(1, ATOMS, 3) for each in models.values()]
    above = [(lennard_jones(torch.from_numpy(each)) - lennard_jones(minimum)).item() for each in ends]
    print(f"{'excess of true energy at minimum':36}" + "".join(f"{each:14.6f}" for each in above))
    draw(errors, models, held_out, options.output)
    print(f"Figure: {options.output}")
    if not options.quick:
        print(check())


if __name__ == "__main__":
    main()
