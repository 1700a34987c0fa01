"""Cost of Hessian-vector products in eager torch, by composition of automatic differentiation.

python papers/dagreou-2024/reproduce.py
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import hodiff
from benchmarks import torch_ways
from benchmarks.objectives import NETWORKS, Objective, Transformer, digits
from benchmarks.reference import difference_product, relative_error
from benchmarks.workloads.hvp import direction, flatten
from papers.common import Claim, Reproduction, run, span, verdict
from papers.costs import costs

Costs = dict[str, dict[str, float]]
REVERSE, FORWARD, INSIDE = "reverse-over-reverse", "forward-over-reverse", "reverse-over-forward"
# The compositions as in the paper's code.
TORCH_FUNC = {REVERSE: torch_ways.grad_of_dot, FORWARD: torch_ways.jvp_of_grad, INSIDE: torch_ways.grad_of_jvp}
FAMILIES = ("torch.func", "hodiff")


def small_transformer() -> Objective:
    """Return a transformer with one layer of width 32, on 8 sequences of 16 tokens out of 32."""
    torch.manual_seed(0)
    module = Transformer(vocabulary=32, length=16, width=32, heads=2, layers=1)
    return Objective("transformer", module, torch.randint(32, (8, 16)), torch.randint(32, (8 * 16,)))


def costs_of(objective: Objective, rounds: int) -> dict[str, Costs]:
    """Measure costs by family and route; the unit is the gradient by torch.func or by autograd, respectively."""
    x = objective.parameters()
    v = direction(x)
    ways = {
        "torch.func": {route: partial(way, objective, x, v) for route, way in TORCH_FUNC.items()},
        "hodiff": {route: partial(hodiff.hvp, objective, x, v, route=route) for route in TORCH_FUNC},
    }
    units = {
        "torch.func": partial(torch.func.grad(objective), x),
        "hodiff": partial(torch_ways.gradient, objective, x),
    }
    expected = difference_product(objective, flatten(v))
    paid = {}
    for family in FAMILIES:
        paid[family] = costs(units[family], ways[family], rounds, f"{objective.name}, {family}")
        for route, way in ways[family].items():
            product: dict[str, Tensor] = way()
            paid[family][route]["relative error"] = relative_error(flatten(product), expected)
    return paid


def draw(paid: dict[str, dict[str, Costs]]) -> Figure:
    """Plot time and memory in gradients, by network."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    bars = [(family, route) for family in FAMILIES for route in TORCH_FUNC]
    colours = dict(zip(TORCH_FUNC, ("C3", "C0", "C2"), strict=True))
    for axes, cost in zip(figure.subplots(1, 2), ("time", "memory"), strict=True):
        for index, (family, route) in enumerate(bars):
            heights = [each[family][route][cost] for each in paid.values()]
            places = np.arange(len(paid)) + (index - 2.5) / (len(bars) + 1.5)
            style = {"hatch": "//", "alpha": 0.6} if family == "torch.func" else {}
            axes.bar(places, heights, 0.125, color=colours[route], label=f"{family}, {route}", **style)
        axes.set_xticks(range(len(paid)), list(paid))
        axes.set_title(f"{cost}, in gradients")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=7)
    return figure


def reproduce(quick: bool, progress: bool) -> Reproduction:
    """Measure all routes on all networks."""
    networks = [digits(64, 32, 10, samples=256), small_transformer()] if quick else [n() for n in NETWORKS.values()]
    bar = tqdm(networks, desc="networks", leave=False, disable=not progress)
    paid = {network.name: costs_of(network, 3 if quick else 12) for network in bar}

    def of(family: str, cost: str, *routes: str) -> list[float]:
        return [each[family][route][cost] for each in paid.values() for route in routes or TORCH_FUNC]

    times, memory = of("torch.func", "time"), of("torch.func", "memory")
    fastest = [min(each["hodiff"][route]["time"] for route in TORCH_FUNC) for each in paid.values()]
    transformer = paid["transformer"]["torch.func"]
    slower = transformer[FORWARD]["time"] / transformer[REVERSE]["time"]
    more, less = of("torch.func", "memory", FORWARD), of("torch.func", "memory", INSIDE)
    rr = of("torch.func", "memory", REVERSE)
    heavier = sum(a > b for a, b in zip(more, less, strict=True))
    largest = sum(a >= max(b, c) for a, b, c in zip(rr, more, less, strict=True))
    claims = [
        Claim(
            "A product takes 2 to 4 times as long as a gradient",
            "2 to 4; in PyTorch 4 to 5 on ViT and BERT",
            f"{span(times)} by torch.func's routes; {span(fastest)} by hodiff's fastest",
            verdict(max(times) < 4.2, min(times) > 1 and max(times) < 6),
        ),
        Claim(
            "In PyTorch, forward-over-reverse is slower than reverse-over-reverse on transformers",
            "qualitative, ViT and BERT",
            f"{transformer[FORWARD]['time']:.1f} against {transformer[REVERSE]['time']:.1f} gradients",
            # Times that differ by less than a tenth count as equal.
            verdict(slower > 1.1, slower > 0.9),
        ),
        Claim(
            "A product takes 2 to 3 times the memory of a gradient",
            "2 to 3",
            f"{span(memory)} by torch.func's routes; {span(of('hodiff', 'memory', REVERSE))} by hodiff's default",
            verdict(min(memory) > 1.8 and max(memory) < 3.2, min(memory) > 1 and max(memory) < 4.5),
        ),
        Claim(
            "In PyTorch, forward-over-reverse takes more memory than reverse-over-forward",
            "on all three networks",
            f"on {heavier} of {len(paid)}: {span(more)} against {span(less)} gradients",
            verdict(heavier == len(paid), heavier > 0),
        ),
        Claim(
            "Without compilation, reverse-over-reverse takes the most memory",
            "on all three networks in JAX; in PyTorch forward-over-reverse is about as high",
            f"on {largest} of {len(paid)} networks: {span(rr)} against {span(more)} gradients by forward-over-reverse",
            verdict(largest == len(paid), largest > 0),
        ),
    ]
    settings = {"networks": list(paid), "rounds": 3 if quick else 12}
    return Reproduction(claims, settings, {"costs": paid}, draw(paid))


if __name__ == "__main__":
    run(__file__, __doc__ or "", reproduce)
