"""A physics-informed network for Poisson's equation, with the Laplacian in one line.

    python examples/pinn_poisson.py

The network is a `torch.nn.Module` that maps points (N, 2) to u (N,), and the residual of Poisson's equation

    Laplacian u = g on the unit square,   u = 0 on its edge,   with the solution u = exp(x) sin(pi x) sin(2 pi y),

is `hodiff.laplacian(model, batched=True)(points) - g`, which `backward` differentiates with respect to the weights. One
forward pass computes value, slopes and Laplacian together. The usual method computes a gradient, and a gradient of each
of its components, and records all of them for `backward`. The script times both methods. In two dimensions the overhead
of torch's calls dominates; in more dimensions `hodiff.laplacian` is faster. It also computes the right-hand side, the
Laplacian of the solution.

A run with the defaults, in processor seconds, one core of an AMD EPYC:

    relative error 7e-4 after 4,000 steps of Adam, 32 s

    milliseconds per loss with gradient, 256 points, two layers of 128
    dimensions  hodiff.laplacian  gradients of gradients
             2               8.8                     6.4
             8              15.1                    21.4
            32              44.5                    80.3

`poisson_network.py` shows how a quasi-Newton method gets more digits.

Source: M. Raissi, P. Perdikaris & G. Karniadakis, J. Comput. Phys. 378 (2019).
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib as mpl
import torch
from torch import Tensor, nn
from torch.func import functional_call

import hodiff
from hodiff.checks import along_directions

mpl.use("Agg")
import matplotlib.pyplot as plt


class Solution(nn.Module):
    """Network that is zero on the edge of the square, or of a cube in more dimensions."""

    def __init__(self, width: int, generator: torch.Generator, dimensions: int = 2) -> None:
        super().__init__()
        self.network = nn.Sequential(
            *(nn.Linear(dimensions, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)),
        )
        for name, each in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(each)
            else:
                nn.init.xavier_normal_(each, generator=generator)

    def forward(self, points: Tensor) -> Tensor:
        """Compute u at points (N, dimensions)."""
        return (4 * points * (1 - points)).prod(-1) * self.network(points).squeeze(-1)


def truth(points: Tensor) -> Tensor:
    """Compute the solution."""
    x, y = points.unbind(-1)
    return torch.exp(x) * torch.sin(math.pi * x) * torch.sin(2 * math.pi * y)


def source(points: Tensor) -> Tensor:
    """Compute the Laplacian of the solution."""
    found: Tensor = hodiff.laplacian(truth, batched=True)(points)
    return found


def laplacian_by_gradients(u: Callable[[Tensor], Tensor], points: Tensor) -> Tensor:
    """Compute the Laplacian in the usual way: a gradient of each component of a gradient."""
    points = points.detach().requires_grad_()
    (slopes,) = torch.autograd.grad(u(points).sum(), points, create_graph=True)
    columns = [
        torch.autograd.grad(slopes[:, i].sum(), points, create_graph=True)[0][:, i] for i in range(points.shape[1])
    ]
    return torch.stack(columns).sum(0)


def loss(u: Callable[[Tensor], Tensor], points: Tensor) -> Tensor:
    """Compute the mean square of the residual."""
    return (hodiff.laplacian(u, batched=True)(points) - source(points)).square().mean()


def error(model: nn.Module, count: int = 51) -> tuple[float, Tensor]:
    """Return the relative error in the L2 norm of a grid, and the error at each of its points."""
    side = torch.linspace(0, 1, count)
    points = torch.cartesian_prod(side, side)
    with torch.no_grad():
        off = model(points) - truth(points)
    return float(off.norm() / truth(points).norm()), off.reshape(count, count)


def train(model: nn.Module, steps: int, points: int, generator: torch.Generator) -> tuple[list[int], list[float]]:
    """Train by Adam at new random points in each step; return the recorded steps and errors."""
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (1 - step / steps) ** 2)
    noted, errors = [], []
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        loss(model, torch.rand(points, 2, generator=generator)).backward()
        optimizer.step()
        schedule.step()
        if step % max(steps // 50, 1) == 0 or step == steps:
            noted.append(step)
            errors.append(error(model)[0])
    return noted, errors


def milliseconds(compute: Callable[[], Tensor], rounds: int) -> float:
    """Return the milliseconds of a loss with its gradient."""
    compute().backward()
    begun = time.process_time()
    for _ in range(rounds):
        compute().backward()
    return 1e3 * (time.process_time() - begun) / rounds


def costs(dimensions: int, points: int, rounds: int) -> tuple[float, float]:
    """Return the milliseconds of a larger network's loss and gradient, by both ways."""
    generator = torch.Generator().manual_seed(0)
    model = Solution(128, generator, dimensions)
    x = torch.rand(points, dimensions, generator=generator)
    ours = milliseconds(lambda: hodiff.laplacian(model, batched=True)(x).square().mean(), rounds)
    return ours, milliseconds(lambda: laplacian_by_gradients(model, x).square().mean(), rounds)


def check() -> str:
    """Run hodiff's check on the loss: all routes, gradgradcheck, SciPy's Hessian."""
    model = Solution(4, torch.Generator().manual_seed(0)).double()
    points = torch.rand(6, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def of_weights(weights: dict[str, Tensor]) -> Tensor:
        return loss(lambda x: functional_call(model, weights, (x,)), points)

    few = along_directions(of_weights, {name: each.detach() for name, each in model.named_parameters()}, size=0.1)
    return hodiff.assert_differentiable(few, torch.zeros(2, dtype=torch.float64), vmap=False).summary


def draw(steps: Sequence[int], errors: Sequence[float], model: nn.Module, path: Path) -> None:
    """Plot the error by steps, the learned solution, and its error at each point."""
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    left.semilogy(steps, errors)
    left.set(title="Poisson's equation", xlabel="step", ylabel="relative L2 error")
    _, off = error(model)
    count = len(off)
    side = torch.linspace(0, 1, count)
    with torch.no_grad():
        learned = model(torch.cartesian_prod(side, side)).reshape(count, count)
    for axes, title, values in ((middle, "u", learned), (right, "error of u", off)):
        most = float(values.abs().max())
        image = axes.imshow(
            values.T.numpy(),
            origin="lower",
            extent=(0, 1, 0, 1),
            cmap="RdBu",
            vmin=-most,
            vmax=most,
            interpolation="bilinear",
        )
        axes.set(title=title, xlabel="x", ylabel="y")
        figure.colorbar(image, ax=axes)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=88)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, compare with the solution, and time both ways."""
    parser = argparse.ArgumentParser(description="Poisson's equation by a physics-informed network.")
    parser.add_argument("--steps", type=int, default=4000, help="number of steps of Adam")
    parser.add_argument("--points", type=int, default=256, help="random points per step")
    parser.add_argument("--quick", action="store_true", help="take 200 steps, without the check")
    parser.add_argument("--output", type=Path, default=Path("figures/pinn_poisson.png"), help="path of the figure")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and points")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # the network is small
    generator = torch.Generator().manual_seed(options.seed)
    model = Solution(32, generator)
    begun = time.process_time()
    steps, errors = train(model, min(options.steps, 200) if options.quick else options.steps, options.points, generator)
    print(f"relative error {errors[-1]:.1e} after {steps[-1]:,} steps, {time.process_time() - begun:.1f} s")

    print(f"{'dimensions':>10}{'hodiff.laplacian':>18}{'gradients of gradients':>24}   (ms per loss with gradient)")
    for dimensions in (2, 8) if options.quick else (2, 8, 32):
        ours, usual = costs(dimensions, options.points, 2 if options.quick else 20)
        print(f"{dimensions:>10}{ours:>18.1f}{usual:>24.1f}")
    draw(steps, errors, model, options.output)
    print(f"Figure: {options.output}")
    if not options.quick:
        print(check())


if __name__ == "__main__":
    main()
