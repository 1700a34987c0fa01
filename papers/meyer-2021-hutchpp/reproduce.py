"""Hutch++: error of a trace against the number of products, by the decay of the eigenvalues.

python papers/meyer-2021-hutchpp/reproduce.py
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from hodiff.estimators import trace
from papers.common import Claim, Reproduction, run, span, verdict

HUTCHINSON, HUTCHPP = "hutchinson", "hutch++"
POWERS = (0.5, 1.0, 1.5, 2.0)  # eigenvalues i^-c
TRIANGLES, ESTRADA = "graph, cubed", "graph, exponential"


def power_law(n: int, c: float, generator: torch.Generator) -> Tensor:
    """Return a positive definite matrix with eigenvalues 1, 2^-c, ..., n^-c and random eigenvectors."""
    basis = torch.linalg.qr(torch.randn(n, n, dtype=torch.float64, generator=generator))[0]
    return (basis * torch.arange(1, n + 1, dtype=torch.float64) ** -c) @ basis.T


def graph(n: int, generator: torch.Generator) -> Tensor:
    """Return the adjacency matrix of a random graph whose degrees follow a power law, as in social networks."""
    weights = torch.arange(1, n + 1, dtype=torch.float64) ** -0.6
    chances = (10 * n * torch.outer(weights, weights) / weights.sum() ** 2).clamp(max=1)
    edges = (torch.rand(n, n, dtype=torch.float64, generator=generator) < chances).double().triu(1)
    return edges + edges.T


def exponential(A: Tensor) -> Tensor:
    """Compute the exponential of a matrix, over the exponential of its largest eigenvalue."""
    values, vectors = torch.linalg.eigh(A)
    return (vectors * (values - values[-1]).exp()) @ vectors.T


def quartiles(A: Tensor, method: str, products: int, trials: int, generator: torch.Generator) -> list[float]:
    """Return the quartiles of the error relative to the trace; the middle quartile is the median."""
    exact = A.trace().item()
    errors = [
        abs(trace(A, method=method, products=products, probes="rademacher", generator=generator).value / exact - 1)
        for _ in range(trials)
    ]
    return [float(np.quantile(errors, q)) for q in (0.25, 0.5, 0.75)]


def draw(products: list[int], errors: dict[str, dict[str, list[list[float]]]]) -> Figure:
    """Plot the median error with its quartiles against products, one panel per matrix."""
    figure = Figure(figsize=(12, 2.8), layout="constrained")
    for axes, (name, curves) in zip(figure.subplots(1, len(errors)), errors.items(), strict=True):
        for method, curve in curves.items():
            low, middle, high = np.transpose(curve)
            axes.loglog(products, middle, marker=".", label=method)
            axes.fill_between(products, low, high, alpha=0.2)
        axes.set_title(name, fontsize=9)
        axes.set(xlabel="products")
    figure.axes[0].set_ylabel("relative error")
    figure.axes[0].legend(fontsize=7)
    return figure


def reproduce(quick: bool, progress: bool) -> Reproduction:
    """Measure both methods on all matrices."""
    n, trials = (300, 30) if quick else (1000, 60)
    products = [12, 24, 48, 96] if quick else [12, 24, 48, 96, 192]
    generator = torch.Generator().manual_seed(0)
    matrices = {f"c = {c}": power_law(n, c, generator) for c in POWERS}
    adjacency = graph(n, generator)
    matrices |= {TRIANGLES: adjacency @ adjacency @ adjacency, ESTRADA: exponential(adjacency)}
    errors: dict[str, dict[str, list[list[float]]]] = {name: {HUTCHINSON: [], HUTCHPP: []} for name in matrices}
    work = [(name, method, m) for name in matrices for method in (HUTCHINSON, HUTCHPP) for m in products]
    for name, method, m in tqdm(work, desc="traces", leave=False, disable=not progress):
        errors[name][method].append(quartiles(matrices[name], method, m, trials, generator))
    rates = {
        name: {method: rate(products, curve) for method, curve in curves.items()} for name, curves in errors.items()
    }
    triangles = round(matrices[TRIANGLES].trace().item() / 6)
    settings = {"n": n, "trials": trials, "probes": "rademacher", "edges": round(adjacency.sum().item() / 2)}
    data = {"products": products, "errors": errors, "rates": rates, "triangles": triangles}
    return Reproduction(claims_of(products, errors, rates), settings, data, draw(products, errors))


def rate(products: list[int], curve: list[list[float]]) -> float:
    """Fit the exponent of the number of products in the median error."""
    return float(np.polyfit(np.log(products), np.log([middle for _, middle, _ in curve]), 1)[0])


def claims_of(products: list[int], errors: dict[str, Any], rates: dict[str, dict[str, float]]) -> list[Claim]:
    """Compare the errors with the claims of the abstract and the experiments."""

    def gain(name: str) -> float:
        """Return the ratio of Hutchinson's error to that of Hutch++, with the most products."""
        return float(errors[name][HUTCHINSON][-1][1] / errors[name][HUTCHPP][-1][1])

    laws = [f"c = {c}" for c in POWERS]
    decaying = [name for name, c in zip(laws, POWERS, strict=True) if c >= 1]
    old, new = [rates[name][HUTCHINSON] for name in laws], [rates[name][HUTCHPP] for name in decaying]
    gains = [gain(name) for name in laws]
    grows = all(a < b for a, b in itertools.pairwise(gains))
    return [
        Claim(
            "The error falls as 1/m in the number m of products, or faster; Hutchinson's error falls as 1/√m",
            "O(1/ε) products against O(1/ε²)",
            f"as m to the {span(new, 2)}, for c of 1 and more; {span(old, 2)} for Hutchinson",
            # The exponents of medians over sixty trials are known to about 0.1.
            verdict(max(new) < -0.85 and all(abs(each + 0.5) < 0.15 for each in old), max(new) < max(old) - 0.2),
        ),
        Claim(
            "Hutch++ gains more if eigenvalues decay faster",
            "qualitative",
            f"{products[-1]} products: "
            + ", ".join(f"{each:.2g}" for each in gains)
            + f" times less error for c = {', '.join(map(str, POWERS))}",
            verdict(grows and gains[-1] > 10, gains[-1] > 3),
        ),
        Claim(
            "Hutch++ also gains on matrices that are not definite: triangles of a graph",
            "qualitative",
            f"{gain(TRIANGLES):.1f} times less error with {products[-1]} products",
            verdict(gain(TRIANGLES) > 2, gain(TRIANGLES) > 1),
        ),
        Claim(
            "Hutch++ gains on a graph's exponential, whose eigenvalues decay fast",
            "qualitative",
            f"{gain(ESTRADA):.0e} times less error with {products[-1]} products",
            verdict(gain(ESTRADA) > 10, gain(ESTRADA) > 1),
        ),
    ]


if __name__ == "__main__":
    run(__file__, __doc__ or "", reproduce)
