"""Collapsed Taylor mode: costs of Laplacians and bilaplacians, compared with standard Taylor mode and nesting.

python papers/dangel-2025-collapsed/reproduce.py
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.func import grad, jvp, vmap
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import hodiff
from benchmarks.machine import one_core
from benchmarks.memory import peak_bytes
from benchmarks.race import Contestant, race
from hodiff.taylor.differential.bilaplacian import fourth_powers
from hodiff.taylor.jets import Jet
from hodiff.taylor.passes import framed, through
from papers.common import Claim, Reproduction, run, verdict

NESTED, STANDARD, COLLAPSED, TWICE = "nested", "standard Taylor", "collapsed", "Laplacian of Laplacian"
LAPLACIAN, BIHARMONIC = "Laplacian", "biharmonic"
SAMPLED = {LAPLACIAN: "Laplacian, sampled", BIHARMONIC: "biharmonic, sampled"}
TIME, RECORDED, UNRECORDED = "time", "memory, differentiable", "memory, not differentiable"
POINTS = 16  # points for the sampled operators
DIMENSIONS = {LAPLACIAN: 50, BIHARMONIC: 5}
Way = Callable[[Tensor], Tensor]
# Cost of one more point or sampled direction, by operator, way and kind of cost.
Slopes = dict[str, dict[str, dict[str, float]]]


def network(inputs: int, hidden: Sequence[int]) -> nn.Sequential:
    """Return linear layers with tanh between them, and one output."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for n, m in pairwise((inputs, *hidden, 1)):
        layers += [nn.Linear(n, m), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def along(net: nn.Module, x: Tensor, directions: Tensor, order: int, *, collapsed: bool) -> Tensor:
    """Sum the derivatives of an order along directions (R, D) or (R, N, D), at points (N, D)."""
    spread = directions if directions.ndim == 3 else directions[:, None].expand(-1, *x.shape)
    with framed(order, len(spread), collapsed=collapsed) as frame:
        ((*_, highest),), _ = through(frame, net, [Jet(frame, [x, spread, *[None] * (order - 1)])])
    return math.factorial(order) * (highest if collapsed else highest.sum(0))[:, 0]


def curvature(f: Callable[[Tensor], Tensor], x: Tensor, v: Tensor) -> Tensor:
    """Compute D^2 f[v, v] at one point, forward over reverse."""
    return jvp(grad(f), (x,), (v,))[1] @ v


def nested(net: nn.Module, x: Tensor, directions: Tensor, order: int) -> Tensor:
    """Compute the sum of `along` for order 2 or 4 by `torch.func`, batched over points and directions."""

    def of_one(y: Tensor, vectors: Tensor) -> Tensor:
        def along_one(v: Tensor) -> Tensor:
            def second(z: Tensor) -> Tensor:
                return curvature(lambda w: net(w)[0], z, v)

            return second(y) if order == 2 else curvature(second, y, v)

        return vmap(along_one)(vectors).sum()

    return vmap(of_one, in_dims=(0, None if directions.ndim == 2 else 1))(x, directions)


def nested_laplacian(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return the Laplacian of a function of one point, as the sum of curvatures along the coordinates."""
    return lambda x: vmap(partial(curvature, f, x))(torch.eye(len(x), dtype=x.dtype)).sum()


def exact_ways(operator: str, net: nn.Module) -> dict[str, Way]:
    """Return ways to compute an operator at points (N, D)."""
    dimension, dtype = DIMENSIONS[operator], next(net.parameters()).dtype
    if operator == LAPLACIAN:
        unit = torch.eye(dimension, dtype=dtype)
        return {
            NESTED: vmap(nested_laplacian(lambda y: net(y)[0])),
            STANDARD: lambda x: along(net, x, unit, 2, collapsed=False),
            COLLAPSED: lambda x: hodiff.laplacian(net, batched=True, sparse=False)(x)[:, 0],
        }
    signed = [(sign, directions.to(dtype)) for sign, directions in fourth_powers(dimension)]
    once = partial(hodiff.laplacian, batched=True, sparse=False)

    def standard(x: Tensor) -> Tensor:
        terms = [sign * along(net, x, directions, 4, collapsed=False) for sign, directions in signed]
        return torch.stack(terms).sum(0)

    return {
        NESTED: vmap(nested_laplacian(nested_laplacian(lambda y: net(y)[0]))),
        STANDARD: standard,
        COLLAPSED: lambda x: hodiff.bilaplacian(net, batched=True)(x)[:, 0],
        TWICE: lambda x: once(once(net))(x)[:, 0],
    }


def sampled_ways(operator: str, net: nn.Module, x: Tensor) -> dict[str, Way]:
    """Return ways to compute the sum over random directions (V, N, D), which are the same for all ways."""
    order = 2 if operator == LAPLACIAN else 4
    return {
        NESTED: lambda v: nested(net, x, v, order),
        STANDARD: lambda v: along(net, x, v, order, collapsed=False),
        COLLAPSED: lambda v: along(net, x, v, order, collapsed=True),
    }


@dataclass(frozen=True)
class Effort:
    """Size of the measurement: hidden widths, points and directions at once, rounds of timing."""

    hidden: tuple[int, ...] = (768, 768, 512, 512)
    sizes: tuple[int, ...] = (4, 8, 12, 16)
    rounds: int = 10


def measured(
    operator: str, ways: Mapping[str, Way], inputs: Sequence[Tensor], rounds: int
) -> dict[str, list[list[float]]]:
    """Measure seconds and bytes, differentiable and not, by way and size."""
    found: dict[str, list[list[float]]] = {name: [] for name in ways}
    for given in inputs:
        with torch.no_grad():
            racers = [Contestant(name, "route", partial(way, given)) for name, way in ways.items()]
            seconds = race(racers, rounds, operator, clock=time.process_time)
            unrecorded = {name: peak_bytes(partial(way, given)) for name, way in ways.items()}
        for name, way in ways.items():
            found[name].append([min(seconds[name]), peak_bytes(partial(way, given)), unrecorded[name]])
    return found


def slopes(sizes: Sequence[int], costs: Mapping[str, list[list[float]]]) -> dict[str, dict[str, float]]:
    """Fit the cost of one more point or direction: milliseconds and MiB, by a straight line through every cost."""
    units = {TIME: 1e3, RECORDED: 2**-20, UNRECORDED: 2**-20}
    return {
        name: {
            kind: unit * float(np.polyfit(sizes, [row[k] for row in rows], 1)[0])
            for k, (kind, unit) in enumerate(units.items())
        }
        for name, rows in costs.items()
    }


def error(operator: str, hidden: Sequence[int]) -> float:
    """Return the largest relative distance of the ways from nested differentiation, in float64."""
    net = network(DIMENSIONS[operator], hidden).double().requires_grad_(False)
    x = torch.randn(3, DIMENSIONS[operator], dtype=torch.float64)
    v = torch.randn(4, *x.shape, dtype=torch.float64)
    both = ((exact_ways(operator, net), x), (sampled_ways(operator, net, x), v))
    apart = [
        ((way(given) - ways[NESTED](given)).norm() / ways[NESTED](given).norm()).item()
        for ways, given in both
        for way in ways.values()
    ]
    return max(apart)


def draw(sizes: Sequence[int], costs: dict[str, dict[str, list[list[float]]]]) -> Figure:
    """Plot time and memory by size, one column per operator."""
    figure = Figure(figsize=(9.5, 4.2), layout="constrained")
    panels = figure.subplots(2, len(costs), sharex=True)
    for column, (operator, by_way) in enumerate(costs.items()):
        for colour, (name, rows) in enumerate(by_way.items()):
            seconds, recorded, unrecorded = zip(*rows, strict=True)
            style = {"color": f"C{colour}", "linewidth": 1.2}
            panels[0, column].plot(sizes, [1e3 * each for each in seconds], label=name, **style)
            panels[1, column].plot(sizes, [each / 2**20 for each in recorded], **style)
            panels[1, column].plot(sizes, [each / 2**20 for each in unrecorded], linestyle=":", **style)
        panels[0, column].set_title(operator)
        panels[1, column].set_xlabel("directions" if "sampled" in operator else "points")
    panels[0, 0].set_ylabel("ms")
    panels[1, 0].set_ylabel("MiB (dotted: not differentiable)")
    panels[0, 2].legend(fontsize=6)
    return figure


def claims_of(found: Slopes) -> list[Claim]:
    """Compare the paper's ratios with ours."""

    def ratio(operator: str, cost: str, over: str, way: str = COLLAPSED) -> float:
        return found[operator][way][cost] / found[operator][over][cost]

    def claim(text: str, parts: Sequence[tuple[float, float, str]]) -> Claim:
        """Return a claim on (published, ours, words): reproduced if no ratio is a fifth larger, partly if some are."""
        close = [0 < ours < 1.2 * published for published, ours, _ in parts]
        return Claim(
            text,
            ", ".join(f"{published:.2f} {words}" for published, _, words in parts),
            ", ".join(f"{ours:.2f} {words}" for _, ours, words in parts),
            verdict(all(close), any(close) or all(0 < ours < 1 for _, ours, _ in parts)),
        )

    of, nest = "of standard Taylor mode", "of nested differentiation"
    return [
        claim("The Laplacian takes half the time: 52 vectors are propagated, not 101", [
            (0.52, ratio(LAPLACIAN, TIME, STANDARD), of),
            (0.48, ratio(LAPLACIAN, TIME, NESTED), nest),
        ]),
        claim("The Laplacian takes half the memory, if it can be differentiated", [
            (0.45, ratio(LAPLACIAN, RECORDED, STANDARD), of),
            (0.47, ratio(LAPLACIAN, RECORDED, NESTED), nest),
        ]),
        claim("The Laplacian takes less memory, if it cannot be differentiated", [
            (0.75, ratio(LAPLACIAN, UNRECORDED, STANDARD), of),
            (0.41, ratio(LAPLACIAN, UNRECORDED, NESTED), nest),
        ]),
        claim("The biharmonic operator takes three quarters of the time", [
            (0.76, ratio(BIHARMONIC, TIME, STANDARD), of),
            (0.55, ratio(BIHARMONIC, TIME, NESTED), nest),
        ]),
        claim("The biharmonic operator takes less memory, if it can be differentiated", [
            (0.63, ratio(BIHARMONIC, RECORDED, STANDARD), of),
            (0.61, ratio(BIHARMONIC, RECORDED, NESTED), nest),
        ]),
        claim("The biharmonic operator takes less memory, if it cannot be differentiated", [
            (0.92, ratio(BIHARMONIC, UNRECORDED, STANDARD), of),
            (0.33, ratio(BIHARMONIC, UNRECORDED, NESTED), nest),
        ]),
        claim("The collapsed Laplacian of the collapsed Laplacian is best", [
            (0.33, ratio(BIHARMONIC, TIME, NESTED, TWICE), f"of the time {nest} (JAX)"),
            (0.29, ratio(BIHARMONIC, RECORDED, NESTED, TWICE), "of its memory"),
        ]),
        claim("A further random direction of the Laplacian takes half the time", [
            (0.51, ratio(SAMPLED[LAPLACIAN], TIME, STANDARD), of),
            (0.49, ratio(SAMPLED[LAPLACIAN], TIME, NESTED), nest),
        ]),
        claim("The same for the biharmonic operator: three quarters, a ninth of nested differentiation", [
            (0.74, ratio(SAMPLED[BIHARMONIC], TIME, STANDARD), of),
            (0.11, ratio(SAMPLED[BIHARMONIC], TIME, NESTED), nest),
        ]),
    ]  # fmt: skip


def reproduce(quick: bool, progress: bool) -> Reproduction:
    """Measure all operators by all ways."""
    effort = Effort((24,), (2, 8), 1) if quick else Effort()
    costs: dict[str, dict[str, list[list[float]]]] = {}
    found: Slopes = {}
    apart = {operator: error(operator, effort.hidden) for operator in DIMENSIONS}
    with one_core():
        for operator, dimension in tqdm(DIMENSIONS.items(), desc="operators", leave=False, disable=not progress):
            net = network(dimension, effort.hidden)
            points = [torch.randn(size, dimension) for size in effort.sizes]
            costs[operator] = measured(operator, exact_ways(operator, net), points, effort.rounds)
            x = torch.randn(POINTS, dimension)
            drawn = [torch.randn(size, *x.shape) for size in effort.sizes]
            name = SAMPLED[operator]
            costs[name] = measured(name, sampled_ways(operator, net, x), drawn, effort.rounds)
    found = {operator: slopes(effort.sizes, by_way) for operator, by_way in costs.items()}
    settings = {
        "hidden": effort.hidden, "dimensions": DIMENSIONS, f"points, or directions at {POINTS} points": effort.sizes,
        "rounds": effort.rounds, "dtype": "float32",
    }  # fmt: skip
    data = {"slopes, ms and MiB": found, "costs, s and bytes": costs, "largest relative distance": apart}
    return Reproduction(claims_of(found), settings, data, draw(effort.sizes, costs))


if __name__ == "__main__":
    run(__file__, __doc__ or "", reproduce)
