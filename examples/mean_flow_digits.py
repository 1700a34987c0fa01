"""Mean flow: generate digits in one step, with a training target that is a forward derivative of the network.

    python examples/mean_flow_digits.py --quick
    python examples/mean_flow_digits.py

Noise e becomes an image x along the line z = (1 - t) x + t e, with velocity v = e - x. A network u(z, r, t) learns the
mean velocity of the flow between the times r and t. Then one step leads from noise to an image, x = e - u(e, 0, 1). The
loss is

    |u - target|^2,   target = v - (t - r) du/dt,   du/dt = v · du/dz + du/dt at fixed z, r,

where du/dt is one `torch.func.jvp` along (v, 0, 1), and the target is a constant to `backward`. The network is a
transformer over patches in plain `torch.nn`. Torch's fused attention has no forward mode; within `hodiff.corrected()`
it has one. `--through` also differentiates the target, which takes backward through jvp.

The same network with r = t is flow matching, which takes many steps. The script prints the Frechet distance between
Gaussians fitted to samples and to images, in pixels from -1 to 1. The distance between two halves of the images is the
best possible. Source: Z. Geng et al., "Mean flows for one-step generative modeling", NeurIPS 2025, equation 10.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib as mpl
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import functional_call
from tqdm import trange

import hodiff
from hodiff.checks import along_directions

mpl.use("Agg")
import matplotlib.pyplot as plt

Batch = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
Velocity = Callable[[Tensor, Tensor, Tensor], Tensor]

SIDE, PATCH = 8, 2
FREQUENCIES = 8  # frequencies of the time features


class Block(nn.Module):
    """Attention among the patches, then a perceptron, both with residual connections."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_perceptron = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, patches, width) to the same shape."""
        q, k, v = self.project(self.before_attention(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.output(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))
        return x + self.perceptron(self.before_perceptron(x))


class MeanVelocity(nn.Module):
    """Network u(z, r, t) for digits with known labels."""

    def __init__(self, width: int, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.patches = nn.Linear(PATCH**2, width)
        self.places = nn.Parameter(torch.randn((SIDE // PATCH) ** 2, width) / width**0.5)
        self.labels = nn.Embedding(10, width)
        self.times = nn.Sequential(nn.Linear(4 * FREQUENCIES, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)), nn.LayerNorm(width))
        self.read = nn.Linear(width, PATCH**2)

    def forward(self, z: Tensor, r: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        """Map noisy images (N, 64) at times (N, 1) to velocities (N, 64)."""
        grid = (SIDE // PATCH, PATCH)
        cut = z.unflatten(-1, (*grid, *grid)).transpose(-3, -2).reshape(len(z), -1, PATCH**2)
        angles = torch.cat([t, t - r], 1)[..., None] * math.pi * torch.arange(1, FREQUENCIES + 1) / 2
        known = self.times(torch.cat([angles.cos(), angles.sin()], -1).flatten(1)) + self.labels(labels)
        read = self.read(self.blocks(self.patches(cut) + self.places + known[:, None]))
        return read.unflatten(1, (grid[0], grid[0])).unflatten(-1, (PATCH, PATCH)).transpose(-3, -2).flatten(1)


def load_images() -> tuple[Tensor, Tensor]:
    """Return pixels (1797, 64) from -1 to 1, and labels."""
    pixels, labels = load_digits(return_X_y=True)
    return torch.from_numpy(pixels).float() / 8 - 1, torch.from_numpy(labels)


def draw_batch(images: Tensor, labels: Tensor, count: int, generator: torch.Generator) -> Batch:
    """Draw images, their labels, noise, and times r <= t, which are equal for half of them."""
    chosen = torch.randint(len(images), (count,), generator=generator)
    noise = torch.randn(count, images.shape[1], generator=generator, dtype=images.dtype)
    times = torch.rand(count, 2, generator=generator, dtype=images.dtype).sort(1).values
    r, t = times.split(1, 1)
    different = torch.rand(count, 1, generator=generator) < 0.5
    return images[chosen], labels[chosen], noise, torch.where(different, r, t), t


def loss(u: Velocity, batch: Batch, through: bool = False) -> Tensor:
    """Compute the mean squared distance of u from its target, over pixels."""
    x, _, noise, r, t = batch
    v, z = noise - x, (1 - t) * x + t * noise
    with hodiff.corrected():
        value, slope = torch.func.jvp(u, (z, r, t), (v, torch.zeros_like(r), torch.ones_like(t)))[:2]
        target = v - (t - r) * slope
        return (value - (target if through else target.detach())).square().mean()


def matching_loss(u: Velocity, batch: Batch) -> Tensor:
    """Compute the loss for r = t, which needs no derivative."""
    x, _, noise, _, t = batch
    return (u((1 - t) * x + t * noise, t, t) - (noise - x)).square().mean()


def velocity(model: nn.Module, labels: Tensor, weights: dict[str, Tensor] | None = None) -> Velocity:
    """Return the model with fixed labels, and with other weights if given."""
    return lambda z, r, t: functional_call(model, weights or {}, (z, r, t, labels))


def train(
    model: nn.Module, steps: int, size: int, mean: bool, through: bool, generator: torch.Generator
) -> tuple[list[float], float]:
    """Train by Adam with a falling rate; return losses, and processor seconds per step."""
    images, labels = load_images()
    optimizer, losses, begun = torch.optim.Adam(model.parameters(), lr=2e-3), [], time.process_time()
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    for _ in trange(steps, desc="mean flow" if mean else "flow matching", leave=False, disable=None):
        batch = draw_batch(images, labels, size, generator)
        optimizer.zero_grad()
        u = velocity(model, batch[1])
        value = loss(u, batch, through) if mean else matching_loss(u, batch)
        value.backward()
        optimizer.step()
        schedule.step()
        losses.append(value.item())
    return losses, (time.process_time() - begun) / steps


@torch.no_grad()
def sample(model: nn.Module, labels: Tensor, steps: int, mean: bool, generator: torch.Generator) -> Tensor:
    """Integrate from noise to images, in steps of equal length."""
    z = torch.randn(len(labels), SIDE**2, generator=generator)
    for step in range(steps, 0, -1):
        t, r = (torch.full((len(z), 1), each / steps) for each in (step, step - 1))
        z = z - model(z, r if mean else t, t, labels) / steps
    return z


def frechet(a: Tensor, b: Tensor) -> float:
    """Compute |m - n|^2 + tr(S + T - 2 (S T)^(1/2)) of means and covariances in float64."""
    a, b = a.double(), b.double()
    S, T = a.T.cov(), b.T.cov()
    root = torch.linalg.eigvals(S @ T).real.clamp(min=0).sqrt().sum()
    return ((a.mean(0) - b.mean(0)).square().sum() + S.trace() + T.trace() - 2 * root).item()


def check() -> str:
    """Run hodiff's check on u, in weights and along the path: all routes, gradgradcheck, SciPy's Hessian."""
    torch.manual_seed(0)
    model = MeanVelocity(4, heads=2, layers=1).double()
    images, labels = load_images()
    x, labels, noise, r, t = draw_batch(images.double(), labels, 2, torch.Generator().manual_seed(0))

    def of_weights_and_time(both: tuple[dict[str, Tensor], Tensor]) -> Tensor:
        weights, time = both
        u = velocity(model, labels, weights)
        return u((1 - t - time) * x + (t + time) * noise, r, t + time).square().mean()

    weights = {name: each.detach() for name, each in model.named_parameters()}
    few = along_directions(of_weights_and_time, (weights, torch.zeros((), dtype=torch.float64)), size=0.1)
    return hodiff.assert_differentiable(few, torch.zeros(2, dtype=torch.float64), vmap=False).summary


def draw(samples: dict[str, Tensor], losses: dict[str, list[float]], path: Path) -> None:
    """Draw fifty samples of each kind, and the losses."""
    figure, axes = plt.subplots(1, len(samples) + 1, figsize=(3 * len(samples) + 4, 3.2), layout="constrained")
    for axis, (name, images) in zip(axes, samples.items(), strict=False):
        rows = images[:50].reshape(5, 10, SIDE, SIDE).transpose(1, 2).reshape(5 * SIDE, 10 * SIDE)
        axis.imshow(rows.numpy(), cmap="gray_r", vmin=-1, vmax=1)
        axis.set(title=name, xticks=[], yticks=[])
    for name, values in losses.items():
        axes[-1].semilogy(values, label=name, linewidth=0.8)
    axes[-1].set(title="loss", xlabel="step")
    axes[-1].legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=88)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train both, draw samples, and compare them with the images."""
    parser = argparse.ArgumentParser(description="One-step digits by a mean flow.")
    parser.add_argument("--steps", type=int, default=400, help="number of steps of Adam")
    parser.add_argument("--size", type=int, default=128, help="images per step")
    parser.add_argument("--width", type=int, default=64, help="width of the transformer")
    parser.add_argument("--through", action="store_true", help="also differentiate the target")
    parser.add_argument("--quick", action="store_true", help="take 40 steps with width 16, without the check")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, batches and samples")
    parser.add_argument("--output", type=Path, default=Path("figures/mean_flow_digits.png"), help="path of the figure")
    options = parser.parse_args(arguments)
    if options.quick:
        options.steps, options.width = 40, 16
    torch.set_num_threads(1)  # the network is small
    images, _ = load_images()
    wanted, losses, samples = torch.arange(1000) % 10, {}, {}
    print(f"{sum(each.numel() for each in MeanVelocity(options.width).parameters()):,} parameters, float32")
    print(f"{'':28}{'loss':>8}{'distance':>10}{'ms per training step':>23}")
    for name, mean, counts in (("mean flow", True, (1,)), ("flow matching", False, (1, 32))):
        torch.manual_seed(options.seed)
        generator, model = torch.Generator().manual_seed(options.seed), MeanVelocity(options.width)
        losses[name], seconds = train(model, options.steps, options.size, mean, options.through, generator)
        last = sum(losses[name][-20:]) / 20
        for count in counts:
            label = f"{name}, {count} step" + "s" * (count > 1)
            found = samples[label] = sample(model, wanted, count, mean, generator)
            print(f"{label:28}{last:8.3f}{frechet(found, images):10.2f}{1e3 * seconds:23.1f}", flush=True)
    half = torch.randperm(len(images), generator=torch.Generator().manual_seed(options.seed))
    print(f"{'half of the images':28}{'':8}{frechet(images[half[::2]], images[half[1::2]]):10.2f}")
    draw(samples, losses, options.output)
    print(f"Figure: {options.output}")
    if not options.quick:
        print(check())


if __name__ == "__main__":
    main()
