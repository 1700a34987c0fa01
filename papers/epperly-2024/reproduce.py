"""XTrace: error of a trace against the number of products, for four spectra and for the Hessian of a network.

python papers/epperly-2024/reproduce.py
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import hodiff
from benchmarks.objectives import digits
from hodiff.estimators import trace
from papers.common import OURS, Claim, Reproduction, run, verdict

METHODS = ("hutchinson", "hutch++", "xtrace")
HESSIAN = "Hessian"
# All methods draw their vectors from the same distribution, so that only the methods differ.
PROBES = "sphere"


def spectra(n: int) -> dict[str, Tensor]:
    """Return the paper's four spectra, by name."""
    index = torch.arange(n, dtype=torch.float64)
    return {
        "flat": 3 - 2 * index / (n - 1),
        "poly": (index + 1) ** -2,
        "exp": 0.7**index,
        "step": torch.where(index < n // 20, 1.0, 1e-3).double(),
    }


def rotated(eigenvalues: Tensor, generator: torch.Generator) -> Tensor:
    """Return a symmetric matrix with these eigenvalues and random eigenvectors."""
    n = len(eigenvalues)
    basis = torch.linalg.qr(torch.randn(n, n, dtype=torch.float64, generator=generator))[0]
    return (basis * eigenvalues) @ basis.T


def network_hessian(samples: int, width: int) -> Tensor:
    """Return the Hessian of a tanh network on digits after 200 steps of Adam, in float64."""
    objective = digits(64, width, 10, samples=samples).double()
    optimizer = torch.optim.Adam(objective.module.parameters(), lr=0.01)
    for _ in range(200):
        optimizer.zero_grad()
        objective(dict(objective.module.named_parameters())).backward()
        optimizer.step()
    return hodiff.HessianOperator(objective, objective.parameters()).to_dense()


def mean_error(A: Tensor, method: str, products: int, trials: int, generator: torch.Generator) -> float:
    """Return the mean over trials of the absolute error, relative to the trace."""
    exact = A.trace().item()
    estimates = [
        trace(A, method=method, products=products, probes=PROBES, generator=generator).value for _ in range(trials)
    ]
    return sum(abs(estimate - exact) for estimate in estimates) / trials / abs(exact)


def draw(products: list[int], errors: dict[str, dict[str, list[float]]]) -> Figure:
    """Plot error against products, one panel per matrix."""
    figure = Figure(figsize=(11, 2.8), layout="constrained")
    for axes, (name, curves) in zip(figure.subplots(1, len(errors)), errors.items(), strict=True):
        for method, curve in curves.items():
            axes.semilogy(products, curve, marker=".", label=method)
        axes.set(title=name, xlabel="products")
    figure.axes[0].set_ylabel("mean relative error")
    figure.axes[0].legend(fontsize=7)
    return figure


def reproduce(quick: bool, progress: bool) -> Reproduction:
    """Measure all methods on all matrices."""
    n, trials, width, samples = (300, 10, 8, 128) if quick else (1000, 100, 32, 512)
    products = [20, 60, 100] if quick else [20, 40, 60, 100, 140, 180, 220, 260, 300]
    generator = torch.Generator().manual_seed(0)
    matrices = {name: rotated(values, generator) for name, values in spectra(n).items()}
    matrices[HESSIAN] = network_hessian(samples, width)
    errors: dict[str, dict[str, list[float]]] = {name: {method: [] for method in METHODS} for name in matrices}
    work = [(name, method, m) for name in matrices for method in METHODS for m in products]
    for name, method, m in tqdm(work, desc="traces", leave=False, disable=not progress):
        # The Hessian is larger than the other matrices; fewer trials show the same curve.
        count = trials if name != HESSIAN else max(trials // 4, 10)
        errors[name][method].append(mean_error(matrices[name], method, m, count, generator))
    settings = {"n": n, "trials": trials, "probes": PROBES, "Hessian of": f"digits 64-{width}-10 on {samples}"}
    data = {"products": products, "errors": errors, "size of the Hessian": len(matrices[HESSIAN])}
    return Reproduction(claims_of(products, errors), settings, data, draw(products, errors))


def claims_of(products: list[int], errors: dict[str, Any]) -> list[Claim]:
    """Compare the errors with the claims of the abstract and of the figure of synthetic matrices."""

    def at(name: str, m: int) -> list[float]:
        return [errors[name][method][products.index(m)] for method in METHODS]

    # More than twice the fifty large eigenvalues of the step: with so many products XTrace captures them all.
    m = 140 if 140 in products else products[-1]
    gains = {name: at(name, m)[1] / at(name, m)[2] for name in errors}
    total = {name: at(name, m)[0] / at(name, m)[2] for name in errors}
    ratios = [error / at("flat", m)[0] for error in at("flat", m)]
    everywhere = all(gains[name] > 1 for name in ("poly", "exp", "step"))
    return [
        Claim(
            "XTrace's error is orders of magnitude smaller than that of Hutchinson and Hutch++",
            "orders of magnitude (abstract)",
            f"{m} products, exp: {total['exp']:.0e} times less than Hutchinson, {gains['exp']:.0e} than Hutch++; "
            f"poly: {total['poly']:.0f} and {gains['poly']:.1f} times; step: {total['step']:.0f} and "
            f"{gains['step']:.1f} times",
            verdict(everywhere and min(total["exp"], gains["exp"]) > 100, everywhere),
        ),
        Claim(
            "For a flat spectrum, all errors are of the same order",
            "qualitative",
            f"{m} products: Hutch++ {ratios[1]:.1f}, XTrace {ratios[2]:.1f} times the error of Hutchinson",
            verdict(max(ratios) < 3, max(ratios) < 10),
        ),
        Claim(
            "XTrace's error on the Hessian of a network",
            "not in the paper",
            f"{m} products: {total[HESSIAN]:.0f} times less than Hutchinson, {gains[HESSIAN]:.1f} than Hutch++",
            OURS,
        ),
    ]


if __name__ == "__main__":
    run(__file__, __doc__ or "", reproduce)
