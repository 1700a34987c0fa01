"""Sparse Hessians by star and acyclic coloring: numbers of colors, seconds of every step, and accuracy.

python papers/gebremedhin-2009/reproduce.py
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse
import torch
from matplotlib.figure import Figure
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import hodiff
from hodiff.sparse.coloring import Coloring, color
from hodiff.sparse.coloring.vertex_orders import ORDERS
from papers.common import OURS, Claim, Reproduction, run, span, verdict
from papers.patterns import matrices

METHODS = ("star", "acyclic")
# Distance-2 coloring of columns ignores symmetry.
ALL_METHODS = (*METHODS, "columns")


def function_of(pattern: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a sum over the pattern's pairs and points, whose Hessian has this pattern."""
    upper = scipy.sparse.triu(pattern, 1).tocoo()
    i, j = torch.from_numpy(upper.row.astype(np.int64)), torch.from_numpy(upper.col.astype(np.int64))
    return lambda x: (x[i] * x[j]).sin().sum() + (x**4).sum()


def exact_entries(pattern: Any, x: torch.Tensor) -> np.ndarray:
    """Compute the Hessian of `function_of` in closed form, in the pattern's order."""
    upper = scipy.sparse.triu(pattern, 1).tocoo()
    values = x.numpy()
    a, b = values[upper.row], values[upper.col]
    n = pattern.shape[0]
    half = scipy.sparse.coo_array((np.cos(a * b) - a * b * np.sin(a * b), (upper.row, upper.col)), shape=(n, n))
    diagonal = 12 * values**2 - np.bincount(upper.row, b**2 * np.sin(a * b), n)
    diagonal -= np.bincount(upper.col, a**2 * np.sin(a * b), n)
    whole = (half + half.T + scipy.sparse.diags_array(diagonal)).tocsr()
    whole.sort_indices()
    return whole.data


def evaluate(pattern: Any, method: str) -> dict[str, float]:
    """Measure seconds of coloring, products and recovery, and the largest error relative to the largest entry."""
    x = torch.rand(pattern.shape[0], dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    operator = hodiff.HessianOperator(function_of(pattern), x)
    seconds = {}
    seconds["coloring"], coloring = _timed(lambda: color(pattern, method))
    _timed(lambda: operator @ torch.from_numpy(coloring.seeds(colors=slice(0, 2))))  # records the gradient
    seconds["products"], products = _timed(lambda: (operator @ torch.from_numpy(coloring.seeds())).numpy())
    seconds["recovery"], values = _timed(lambda: coloring.decompress(products))
    exact = exact_entries(pattern, x)
    return {**seconds, "error": float(np.abs(values - exact).max() / np.abs(exact).max()), "depth": depth(coloring)}


def depth(coloring: Coloring) -> float:
    """Return the rounds of the substitution; a direct recovery has none."""
    return float(getattr(coloring.plan, "doublings", 0))


def _timed(compute: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    found = compute()
    return time.perf_counter() - start, found


def draw(counts: dict[str, Any], steps: dict[str, Any]) -> Figure:
    """Plot colors by method, and seconds by step."""
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    places = np.arange(len(counts))
    for k, method in enumerate(ALL_METHODS):
        left.bar(places + 0.27 * (k - 1), [counts[name]["best"][method] for name in counts], 0.25, label=method)
    left.set(ylabel="colors", title="products for all entries")
    bottom = np.zeros(2 * len(steps))
    for step in ("coloring", "products", "recovery"):
        heights = np.array([steps[name][method][step] for name in steps for method in METHODS])
        bars = np.repeat(places, 2) + np.tile([-0.2, 0.2], len(steps))
        right.bar(bars, heights, 0.35, bottom, label=step)
        bottom += heights
    right.set(ylabel="seconds", title="a Hessian: star (left), acyclic (right)")
    for axes in (left, right):
        axes.set_xticks(places, list(counts), rotation=30, ha="right", fontsize=7)
        axes.legend(fontsize=7)
    return figure


def reproduce(quick: bool, progress: bool) -> Reproduction:
    """Color all matrices by all methods and orders, and compute a Hessian of every pattern."""
    n = 2_000 if quick else 100_000
    counts: dict[str, Any] = {}
    steps: dict[str, Any] = {}
    for name, pattern in tqdm(matrices(n).items(), desc="patterns", leave=False, disable=not progress):
        by_order = {
            order: {method: color(pattern, method, order).num_colors for method in ALL_METHODS} for order in ORDERS
        }
        best = {method: color(pattern, method).num_colors for method in ALL_METHODS}
        counts[name] = {"n": pattern.shape[0], "entries": pattern.nnz, "best": best, "by order": by_order}
        steps[name] = {method: evaluate(pattern, method) for method in METHODS}
    data = {"colors": counts, "steps": steps}
    return Reproduction(claims_of(counts, steps), {"n": n}, data, draw(counts, steps))


def claims_of(counts: dict[str, Any], steps: dict[str, Any]) -> list[Claim]:
    """Compare the measurements with the claims of the abstract and the analysis of banded matrices."""
    bands = {rho: counts[f"banded, {rho}"]["best"] for rho in (10, 20)}
    right = all(each["star"] == 2 * (rho // 2) + 1 and each["acyclic"] == rho // 2 + 1 for rho, each in bands.items())
    best = [each["best"] for each in counts.values()]
    savings = [each["n"] / each["best"]["star"] for each in counts.values()]
    fewer = [each["star"] / each["acyclic"] for each in best]
    symmetry = [each["columns"] / each["star"] for each in best]
    totals = {
        name: [sum(step[method][part] for part in ("coloring", "products", "recovery")) for method in METHODS]
        for name, step in steps.items()
    }
    ratios = [star / acyclic for star, acyclic in totals.values()]
    errors = {method: max(step[method]["error"] for step in steps.values()) for method in METHODS}
    apart = max(step["acyclic"]["error"] / max(step["star"]["error"], 1e-16) for step in steps.values())
    return [
        Claim(
            "A band with rho entries beside the diagonal takes 2 floor(rho / 2) + 1 colors by stars, and "
            "floor(rho / 2) + 1 by trees",
            "11 and 6 for rho = 10, 21 and 11 for rho = 20",
            "; ".join(f"{each['star']} and {each['acyclic']} for rho = {rho}" for rho, each in bands.items()),
            verdict(right),
        ),
        Claim(
            "Coloring saves enormously, and makes very large Hessians feasible",
            "enormous savings in runtime (abstract)",
            f"{span(savings, 0)} times fewer products than columns",
            verdict(min(savings) > 20),
        ),
        Claim(
            "A Hessian by substitution is often faster than by direct recovery",
            "often (abstract)",
            f"on {sum(ratio > 1 for ratio in ratios)} of {len(ratios)} patterns; direct takes {span(ratios)} times as "
            f"long; {span(fewer)} times as many products",
            verdict(sum(ratio > 1 for ratio in ratios) > len(ratios) / 2, max(ratios) > 1),
        ),
        Claim(
            "Substitution does not compromise numerical accuracy",
            "qualitative (abstract)",
            f"relative error {errors['star']:.0e} direct, {errors['acyclic']:.0e} by substitution, at most "
            f"{apart:.0f} times",
            verdict(errors["acyclic"] < 1e-12, errors["acyclic"] < 1e-9),
        ),
        Claim(
            "Use of symmetry",
            "",
            f"columns of which none share a row take {span(symmetry)} times the products of stars",
            OURS,
        ),
    ]


if __name__ == "__main__":
    run(__file__, __doc__ or "", reproduce)
