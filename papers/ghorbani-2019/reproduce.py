"""Density of Hessian eigenvalues during training, with batch norm and without.

python papers/ghorbani-2019/reproduce.py
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import nn
from torch.func import functional_call
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import hodiff
from benchmarks.objectives import Objective, digits
from benchmarks.torch_ways import gradient
from benchmarks.workloads.hvp import flatten
from hodiff.estimators import SpectralDensity, eigsh, spectral_density
from papers.common import OURS, Claim, Reproduction, run, span, verdict
from papers.networks import digit_images, residual_network

CLASSES = 10
SIGMA = 1e-5**0.5  # the paper's value, for the comparison with the exact spectrum
KINDS = {"without batch norm": False, "with batch norm": True}


@dataclass(frozen=True)
class Size:
    """Size of a run: images, channels, training steps, and the steps at which the spectrum is computed."""

    images: int
    channels: int
    steps: int
    looks: tuple[int, ...]
    samples: int
    lanczos: int
    blocks: int = 0  # blocks of a residual network; 0 means three convolutions


FULL = Size(256, 12, 1000, (0, 200, 300, 400, 600, 1000), 3, 50)
QUICK = Size(128, 6, 400, (0, 400), 2, 30)
RESIDUAL = Size(512, 8, 500, (0, 100, 250, 500), 2, 30, blocks=3)


def convolutional(channels: int, batch_norm: bool) -> nn.Sequential:
    """Return three 3x3 convolutions and a linear layer for 8x8 images; batch norm uses batch statistics."""
    layers: list[nn.Module] = []
    for index in range(3):
        layers.append(nn.Conv2d(channels if index else 1, channels, 3, padding=1, bias=not batch_norm))
        if batch_norm:
            layers.append(nn.BatchNorm2d(channels, track_running_stats=False))
        layers += [nn.ReLU(), *([nn.AvgPool2d(2)] if index else [])]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * channels, CLASSES))


def trained(size: Size, batch_norm: bool, progress: bool) -> Iterator[tuple[int, Objective]]:
    """Train by SGD with momentum on batches of 64; yield the objective over all images at the steps in `looks`."""
    torch.manual_seed(0)
    network: nn.Sequential
    if size.blocks:
        (images, labels), _ = digit_images(size.images)
        network = residual_network(size.blocks, size.channels, batch_norm)
    else:
        flat = digits(64, CLASSES, samples=size.images)
        images, labels = flat.inputs.view(-1, 1, 8, 8), flat.targets
        network = convolutional(size.channels, batch_norm)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.02, momentum=0.9)
    generator = torch.Generator().manual_seed(0)
    for step in tqdm(range(size.steps + 1), desc="training", leave=False, disable=not progress):
        if step in size.looks:
            yield step, Objective("cnn", network, images, labels)
        batch = torch.randint(size.images, (64,), generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(functional_call(network, {}, (images[batch],)), labels[batch]).backward()
        optimizer.step()


def look(objective: Objective, size: Size) -> tuple[dict[str, float], SpectralDensity]:
    """Return the outliers, the share of the gradient in their space, and the density."""
    x = objective.parameters()
    A = hodiff.HessianOperator(objective, x)
    top = eigsh(A, CLASSES, which="LA", tol=1e-3)
    slope = flatten(gradient(objective, x))
    share = (top.eigenvectors.T.to(slope) @ slope).norm() / slope.norm()
    found = {
        "loss": objective(x).item(),
        "largest": top.eigenvalues.max().item(),
        "ratio": (top.eigenvalues.max() / top.eigenvalues.min()).item(),
        "gradient in their space": share.square().item(),
    }
    return found, spectral_density(A, samples=size.samples, steps=size.lanczos)


def distance_from_exact(quick: bool) -> dict[str, Any]:
    """Return the L1 distance of the estimated density of a small network's Hessian from the exact density."""
    objective = digits(64, 8 if quick else 32, CLASSES, samples=256 if quick else 1797).double()
    optimizer = torch.optim.Adam(objective.module.parameters(), lr=0.01)
    for _ in range(200):
        optimizer.zero_grad()
        objective(dict(objective.module.named_parameters())).backward()
        optimizer.step()
    A = hodiff.HessianOperator(objective, objective.parameters())
    estimate, exact = spectral_density(A, samples=10, steps=90), spectral_density(A.to_dense(), method="exact")
    low, high = exact.ritz_values.min().item() - 6 * SIGMA, exact.ritz_values.max().item() + 6 * SIGMA
    grid = torch.linspace(low, high, round(6 * (high - low) / SIGMA), dtype=torch.float64)
    curves = [density.density(grid, sigma=SIGMA) for density in (estimate, exact)]
    return {
        "parameters": A.shape[0],
        "L1 distance": torch.trapezoid((curves[0] - curves[1]).abs(), grid).item(),
        "largest, estimated": estimate.ritz_values.max().item(),
        "largest, exact": exact.ritz_values.max().item(),
    }


def draw(densities: dict[str, list[SpectralDensity]], looks: dict[str, list[dict[str, float]]]) -> Figure:
    """Plot densities before, during and after training over the tenth largest eigenvalue, and the outliers' ratio."""
    figure = Figure(figsize=(11, 3.2), layout="constrained")
    *panels, right = figure.subplots(1, 3)
    most = max(each["ratio"] for kind in looks.values() for each in kind)
    for axes, (name, found) in zip(panels, looks.items(), strict=True):
        for index in sorted({0, len(found) // 2, len(found) - 1}):
            unit = found[index]["largest"] / found[index]["ratio"]
            grid = torch.linspace(-3, 1.1 * most, 1500, dtype=torch.float64)
            heights = unit * densities[name][index].density(grid * unit, sigma=0.1 * unit)
            axes.semilogy(grid, heights, linewidth=1, label=f"step {found[index]['step']:.0f}")
        axes.set(title=name, xlabel="eigenvalue / tenth largest", ylabel="density", ylim=(1e-6, 10))
        axes.legend(fontsize=7)
        right.semilogy([each["step"] for each in found], [each["ratio"] for each in found], marker=".", label=name)
    right.set(xlabel="step", title="largest / tenth largest eigenvalue")
    right.legend(fontsize=7)
    return figure


Looks = dict[str, list[dict[str, float]]]


def follow(size: Size, progress: bool) -> tuple[Looks, dict[str, list[SpectralDensity]]]:
    """Train both networks; return the measurements and densities at the steps in `looks`."""
    looks: Looks = {name: [] for name in KINDS}
    densities: dict[str, list[SpectralDensity]] = {name: [] for name in KINDS}
    for name, batch_norm in KINDS.items():
        for step, objective in trained(size, batch_norm, progress):
            found, density = look(objective, size)
            densities[name].append(density)
            looks[name].append({"step": step, **found})
    return looks, densities


def outliers(looks: Looks) -> list[float]:
    """Return the largest ratios, without batch norm and with it."""
    return [max(each["ratio"] for each in kind) for kind in looks.values()]


def shares(looks: Looks) -> list[list[float]]:
    """Return the gradient's shares at losses below half of the first: outliers appear only as the loss falls."""
    return [
        [each["gradient in their space"] for each in kind if each["loss"] < kind[0]["loss"] / 2]
        for kind in looks.values()
    ]


def in_words(looks: Looks) -> tuple[str, str]:
    """Describe the measured outliers and the gradient's shares."""
    plain, normed = outliers(looks)
    first = looks["without batch norm"][0]["ratio"]
    without, within = shares(looks)
    return (
        f"largest over tenth largest: {first:.1f} at the start, up to {plain:.0f} without; "
        f"{normed:.1f} at most with batch norm",
        f"share of its squared norm, below half the first loss: {span(without, 2)} without, {span(within, 2)} with",
    )


def reproduce(quick: bool, progress: bool) -> Reproduction:
    """Follow both networks through training, and compare the estimate with an exact spectrum."""
    size = QUICK if quick else FULL
    looks, densities = follow(size, progress)
    exact = distance_from_exact(quick)
    plain, normed = outliers(looks)
    without, within = shares(looks)
    ratios, concentration = in_words(looks)
    claims = [
        Claim(
            "Without batch norm, large isolated eigenvalues appear in training; with it, they are almost absent",
            "qualitative",
            ratios,
            verdict(plain > 10 and normed < 5, plain > 2 * normed),
        ),
        Claim(
            "Without batch norm, the gradient concentrates in their eigenspace; with batch norm, it hardly does",
            "qualitative",
            concentration,
            verdict(min(without) > 0.5 > max(within), min(without) > max(within)),
        ),
        Claim(
            "Stochastic Lanczos quadrature reproduces the exact density of a small network",
            "the two curves coincide (10 vectors, 90 steps, variance 1e-5)",
            f"L1 distance {exact['L1 distance']:.1e}; the largest eigenvalue to "
            f"{abs(exact['largest, estimated'] / exact['largest, exact'] - 1):.0e}",
            verdict(exact["L1 distance"] < 0.02, exact["L1 distance"] < 0.1),
        ),
    ]
    data: dict[str, Any] = {"training": looks, "exact": exact}
    if not quick:
        data["residual networks"], _ = follow(RESIDUAL, progress)
        for what, measured in zip(("outliers", "gradient's share"), in_words(data["residual networks"]), strict=True):
            claims.append(Claim(f"Residual networks, nearer to the paper's: the {what}", "qualitative", measured, OURS))
    settings = {"images": size.images, "channels": size.channels, "steps": size.steps, "batch": 64, "rate": 0.02}
    return Reproduction(claims, settings, data, draw(densities, looks))


if __name__ == "__main__":
    run(__file__, __doc__ or "", reproduce)
