"""Fast exact multiplication by the Hessian: accuracy and speed.

The reference is the paper's own method by hand: R{} applied to backpropagation through a network with one hidden
layer, in NumPy's extended precision, without automatic differentiation.

    python papers/pearlmutter-1994/reproduce.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import hodiff
from benchmarks import torch_ways
from benchmarks.objectives import Objective, digits, mlp
from benchmarks.workloads.hvp import ROUTES, direction, flatten
from papers.common import Claim, Reproduction, run, span, verdict
from papers.costs import costs

Parameters = dict[str, Tensor]
Array = np.ndarray[Any, Any]
DTYPES = {"float64": torch.float64, "float32": torch.float32}
LINEARIZED = "at a linearized point"


def hand_written_product(objective: Objective, x: Parameters, v: Parameters) -> Array:
    """Compute R{gradient} of the cross-entropy of a tanh network with one hidden layer, in extended precision."""
    inputs, *leaves = (tensor.numpy().astype(np.longdouble) for tensor in (objective.inputs, *x.values(), *v.values()))
    (w1, b1, w2, b2), (v1, c1, v2, c2) = leaves[:4], leaves[4:]
    # Forward: every quantity with its R{}.
    h = np.tanh(inputs @ w1.T + b1)
    rh = (1 - h**2) * (inputs @ v1.T + c1)
    z, rz = h @ w2.T + b2, rh @ w2.T + h @ v2.T + c2
    e = np.exp(z - z.max(1, keepdims=True))
    p = e / e.sum(1, keepdims=True)
    # Backward.
    dz = (p - np.eye(p.shape[1])[objective.targets.numpy()]) / len(p)
    rdz = p * (rz - (p * rz).sum(1, keepdims=True)) / len(p)
    dh, rdh = dz @ w2, rdz @ w2 + dz @ v2
    rda = rdh * (1 - h**2) - 2 * dh * h * rh
    return np.concatenate([(rda.T @ inputs).ravel(), rda.sum(0), (rdz.T @ h + dz.T @ rh).ravel(), rdz.sum(0)])


def one_sided(gradient: Callable[[float], Tensor], r: float) -> Tensor:
    """Compute the one-sided difference quotient, from which the paper starts."""
    return (gradient(r) - gradient(0.0)) / r


def central(gradient: Callable[[float], Tensor], r: float) -> Tensor:
    """Compute the central difference quotient, whose error is of second order."""
    return (gradient(r) - gradient(-r)) / (2 * r)


QUOTIENTS = {"one-sided differences": one_sided, "central differences": central}


def errors_of(samples: int, steps: list[float]) -> dict[str, dict[str, Any]]:
    """Return relative errors of the exact product by route, and of the quotients by step, in both dtypes."""
    single = digits(64, 32, 10, samples=samples)
    objective = single.double()
    x, v = objective.parameters(), {name: tensor.double() for name, tensor in direction(single.parameters()).items()}
    length = torch.linalg.vector_norm(flatten(x)) / torch.linalg.vector_norm(flatten(v))
    v = {name: (tensor * length).float().double() for name, tensor in v.items()}  # the same numbers in both dtypes
    expected = hand_written_product(objective, x, v)
    found = {}
    for name, dtype in DTYPES.items():
        f = objective if dtype == torch.float64 else single
        point, tangent = ({key: tensor.to(dtype) for key, tensor in tree.items()} for tree in (x, v))

        def gradient(r: float, f: Any = f, point: Parameters = point, tangent: Parameters = tangent) -> Tensor:
            return flatten(torch_ways.gradient(f, {key: point[key] + r * tangent[key] for key in point}))

        found[name] = {
            "exact": {
                route: relative_error(flatten(hodiff.hvp(f, point, tangent, route=route)), expected)
                for route in hodiff.ROUTES
            },
            **{kind: [relative_error(way(gradient, r), expected) for r in steps] for kind, way in QUOTIENTS.items()},
        }
    return found


def relative_error(product: Tensor, expected: Array) -> float:
    """Return the relative error of the whole vector, in the Euclidean norm."""
    return float(np.linalg.norm(product.numpy().astype(np.longdouble) - expected) / np.linalg.norm(expected))


def costs_of(objective: Objective, rounds: int) -> dict[str, dict[str, float]]:
    """Measure the cost of a product by route, and at a linearized point, where the gradient is already recorded."""
    x = objective.parameters()
    v = direction(x)
    operator = hodiff.HessianOperator(objective, x)
    products = {route: partial(hodiff.hvp, objective, x, v, route=route) for route in ROUTES}
    products[LINEARIZED] = partial(operator.__matmul__, v)
    return costs(partial(torch_ways.gradient, objective, x), products, rounds, objective.name)


def draw(steps: list[float], errors: dict[str, dict[str, Any]]) -> Figure:
    """Plot error against step."""
    figure = Figure(figsize=(6.5, 4), layout="constrained")
    axes = figure.subplots()
    for (dtype, found), colour in zip(errors.items(), ("C0", "C1"), strict=True):
        for kind, style in zip(QUOTIENTS, ("--", "-"), strict=True):
            axes.loglog(steps, found[kind], style, color=colour, label=f"{kind}, {dtype}")
        axes.axhline(max(found["exact"].values()), color=colour, linestyle=":", label=f"exact product, {dtype}")
    axes.set(xlabel="step, relative to the parameters", ylabel="relative error of the product", ylim=(1e-20, 1e2))
    axes.legend(fontsize=7, ncols=2)
    return figure


def reproduce(quick: bool, progress: bool) -> Reproduction:
    """Measure errors and costs."""
    steps = np.logspace(0, -14, 15 if quick else 57).tolist()
    samples = 256 if quick else 1797
    networks = [digits(64, 32, 10, samples=samples), *([] if quick else [mlp()])]
    errors = errors_of(samples, steps)
    paid = {
        each.name: costs_of(each, 5 if quick else 40)
        for each in tqdm(networks, desc="costs", leave=False, disable=not progress)
    }

    worst = {dtype: max(found["exact"].values()) for dtype, found in errors.items()}
    best = {dtype: min(min(found[kind]) for kind in QUOTIENTS) for dtype, found in errors.items()}
    exact = all(worst[dtype] < 100 * torch.finfo(DTYPES[dtype]).eps for dtype in DTYPES)
    again = [each[LINEARIZED]["operations"] for each in paid.values()]
    fresh = [each[route]["operations"] for each in paid.values() for route in ROUTES]
    times_again = [each[LINEARIZED]["time"] for each in paid.values()]
    times_fresh = [min(each[route]["time"] for route in ROUTES) for each in paid.values()]
    claims = [
        Claim(
            "The product is exact",
            "qualitative",
            f"relative error {worst['float64']:.0e} in float64, {worst['float32']:.0e} in float32 (worst of 4 routes)",
            verdict(exact),
        ),
        Claim(
            "The product is numerically stable; differences of gradients are not",
            "qualitative",
            f"best of {len(steps)} steps: {best['float64']:.0e} in float64, {best['float32']:.0e} in float32",
            verdict(all(best[dtype] > 30 * worst[dtype] for dtype in DTYPES)),
        ),
        Claim(
            "The product takes about as much computation as a gradient",
            '"about as much"',
            f"{span(again)} gradients of arithmetic and {span(times_again)} of time where the gradient is recorded "
            f"already; {span(fresh)} and {span(times_fresh)} (fastest route) with that gradient",
            verdict(max(again) < 2, max(again) < 3),
        ),
    ]
    settings = {"network": "digits 64-32-10, tanh", "samples": samples, "steps": [steps[0], steps[-1], len(steps)]}
    return Reproduction(claims, settings, {"steps": steps, "errors": errors, "costs": paid}, draw(steps, errors))


if __name__ == "__main__":
    run(__file__, __doc__ or "", reproduce)
