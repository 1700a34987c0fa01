"""Effect of residual connections and batch norm on the Hessian's trace and largest eigenvalue, by depth.

python papers/yao-2020-pyhessian/reproduce.py
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch.func import functional_call
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import hodiff
from benchmarks.objectives import Objective
from hodiff.estimators import eigsh, trace
from papers.common import OURS, Claim, Reproduction, run, verdict
from papers.networks import digit_images, residual_network

COMPLETE, NO_RESIDUAL, NO_NORM = "complete", "without residual connections", "without batch norm"
KINDS = {COMPLETE: (True, True), NO_RESIDUAL: (True, False), NO_NORM: (False, True)}


@dataclass(frozen=True)
class Size:
    """Blocks, channels and images, training steps, steps at which the Hessian is measured, and products per trace."""

    depths: tuple[int, ...]
    channels: int
    images: int
    steps: int
    looks: tuple[int, ...]
    products: int


FULL = Size((2, 6), 4, 64, 150, (0, 75, 150), 20)
QUICK = Size((1, 2), 3, 64, 15, (15,), 4)


def followed(size: Size, blocks: int, kind: str, seed: int) -> list[dict[str, float]]:
    """Train by SGD with momentum; return trace, largest eigenvalue and loss over all images at the steps in `looks`."""
    torch.manual_seed(seed)
    batch_norm, residual = KINDS[kind]
    (images, labels), _ = digit_images(size.images)
    network = residual_network(blocks, size.channels, batch_norm, residual)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.02, momentum=0.9)
    found = []
    for step in range(size.steps + 1):
        if step in size.looks:
            found.append({"step": step, **look(Objective("", network, images, labels), size)})
        batch = torch.randint(size.images, (64,))
        optimizer.zero_grad()
        F.cross_entropy(functional_call(network, {}, (images[batch],)), labels[batch]).backward()
        optimizer.step()
    return found


def look(objective: Objective, size: Size) -> dict[str, float]:
    """Return the Hessian's trace and largest eigenvalue, and the loss."""
    x = objective.parameters()
    A = hodiff.HessianOperator(objective, x)
    return {
        "trace": trace(A, method="hutchinson", products=size.products).value,
        "largest": eigsh(A, 1, which="LA", tol=1e-2).eigenvalues.item(),
        "loss": objective(x).item(),
    }


def against_dense() -> dict[str, float]:
    """Compare estimates with a small network's dense Hessian: trace in standard errors, eigenvalue relative."""
    torch.manual_seed(0)
    (images, labels), _ = digit_images(64)
    objective = Objective("", residual_network(1, 3), images, labels).double()
    A = hodiff.HessianOperator(objective, objective.parameters())
    # torch's own Hessian of the loss as a function of all parameters in a vector.
    x = torch.cat([each.flatten() for each in objective.parameters().values()])
    dense = torch.func.jacrev(torch.func.grad(objective.flat))(x)
    estimate = trace(A, method="hutchinson", products=200)
    largest = eigsh(A, 1, which="LA", tol=1e-8).eigenvalues.item()
    return {
        "parameters": len(x),
        "trace": abs(estimate.value - dense.trace().item()) / estimate.standard_error,
        "largest": abs(largest / torch.linalg.eigvalsh(dense)[-1].item() - 1),
    }


def draw(curves: dict[str, dict[str, list[list[dict[str, float]]]]]) -> Figure:
    """Plot trace and largest eigenvalue during training, one column per depth."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    panels = figure.subplots(2, len(curves), squeeze=False)
    for column, (depth, kinds) in enumerate(curves.items()):
        for row, what in enumerate(("trace", "largest")):
            for index, (kind, runs) in enumerate(kinds.items()):
                for seed, found in enumerate(runs):
                    label = None if seed else kind
                    values = [abs(each[what]) for each in found]
                    panels[row][column].semilogy([e["step"] for e in found], values, f"C{index}", label=label)
            panels[row][column].set(xlabel="step", ylabel=what)
        panels[0][column].set_title(f"{depth} blocks")
    panels[0][0].legend(fontsize=7)
    return figure


def reproduce(quick: bool, progress: bool) -> Reproduction:
    """Follow the three kinds of network at both depths."""
    torch.set_num_threads(1)
    size = QUICK if quick else FULL
    seeds = range(1 if quick else 2)
    curves: dict[str, dict[str, list[list[dict[str, float]]]]] = {
        str(depth): {kind: [] for kind in KINDS} for depth in size.depths
    }
    work = [(depth, kind, seed) for depth in size.depths for kind in KINDS for seed in seeds]
    for depth, kind, seed in tqdm(work, desc="networks", leave=False, disable=not progress):
        curves[str(depth)][kind].append(followed(size, depth, kind, seed))
    dense = against_dense()

    def at_end(depth: int, kind: str, what: str) -> float:
        """Return the mean over starts at the end of training."""
        return sum(found[-1][what] for found in curves[str(depth)][kind]) / len(seeds)

    shallow, deep = size.depths

    def ratios(depth: int, kind: str) -> tuple[float, float]:
        """Return trace and largest eigenvalue, relative to the complete network's."""
        found = [at_end(depth, kind, what) / at_end(depth, COMPLETE, what) for what in ("trace", "largest")]
        return found[0], found[1]

    residual, norm = ({depth: ratios(depth, kind) for depth in size.depths} for kind in (NO_RESIDUAL, NO_NORM))

    def shown(found: dict[int, tuple[float, float]]) -> str:
        return "; ".join(f"{d} blocks: trace {a:.2g}, eigenvalue {b:.2g} times" for d, (a, b) in found.items())

    claims = [
        Claim(
            "Without residual connections the loss is less smooth: trace and largest eigenvalue are larger",
            "qualitative",
            shown(residual),
            verdict(min(min(each) for each in residual.values()) > 1.2, min(residual[deep]) > 1.2),
        ),
        Claim(
            "Batch norm does not make the loss of shallow networks smoother",
            "qualitative (abstract)",
            f"without it, {shown({shallow: norm[shallow]})}",
            verdict(max(norm[shallow]) < 1.2, min(norm[shallow]) < 1.2),
        ),
        Claim(
            "Batch norm makes the loss of deep networks smoother",
            "qualitative",
            f"without it, {shown({deep: norm[deep]})}",
            verdict(min(norm[deep]) > 1.2, max(norm[deep]) > 1.2),
        ),
        Claim(
            "Estimates compared with the dense Hessian of a small network",
            "not in the paper",
            f"trace off by {dense['trace']:.1f} standard errors, largest eigenvalue by {dense['largest']:.0e}",
            OURS,
        ),
    ]
    settings = {"blocks": size.depths, "channels": size.channels, "images": size.images, "steps": size.steps}
    data: dict[str, Any] = {"training": curves, "dense": dense}
    return Reproduction(claims, settings, data, draw(curves))


if __name__ == "__main__":
    run(__file__, __doc__ or "", reproduce)
