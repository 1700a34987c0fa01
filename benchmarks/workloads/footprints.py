"""Memory of products with operators, and memory and time of derivatives through inner loops."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import hodiff
from benchmarks.memory import peak_bytes
from benchmarks.objectives import NETWORKS, Objective
from benchmarks.race import Contestant, median_ratio, race
from benchmarks.report import table
from benchmarks.workloads.meta import Episode, digits_cnn, sinusoid
from hodiff.meta import SGD, adapt
from hodiff.operators import GaussNewtonOperator, HessianOperator

Parameters = dict[str, Tensor]
Loss = Callable[[Parameters, Any], Tensor]
PRODUCTS = """\
Peaks of a product beyond what was there before it, over the peak of a gradient of the same function: what torch hands
out at once. The first product of an operator linearizes, and keeps that for later ones."""
LOOPS = """\
Peaks of a meta-gradient through {steps} steps of `SGD` on 64 images, a CNN of 16 and 32 channels for digits."""
ROUTES = """\
The time of a meta-gradient through 5 steps of `SGD` with `route="forward-over-reverse"`, over that with
`"reverse-over-reverse"`: medians of rounds in which both ran in turn."""
WAYS: dict[str, dict[str, Any]] = {
    "as recorded": {},
    "`checkpoint=14`": {"checkpoint": 14},
    '`route="forward-over-reverse"`': {"route": "forward-over-reverse"},
    "`first_order=True`": {"first_order": True},
}


def products(objective: Objective) -> dict[str, float]:
    """Measure the peaks of products in units of a gradient's peak, by operator."""
    x = objective.parameters()
    v = {name: torch.ones_like(each) for name, each in x.items()}
    operators: dict[str, Callable[[], Any]] = {
        "Hessian": lambda: HessianOperator(objective, x),
        "Gauss-Newton": lambda: GaussNewtonOperator(
            objective.module, F.cross_entropy, x, objective.inputs, objective.targets
        ),
    }
    peaks = {"`hodiff.hvp`": peak_bytes(lambda: hodiff.hvp(objective, x, v))}
    for name, make in operators.items():
        peaks[f"{name}, first"] = peak_bytes(lambda make=make: make() @ v)  # type: ignore[misc]  # mypy cannot type defaults of a lambda
        A = make()
        peaks[f"{name}, later"] = peak_bytes(lambda A=A: A @ v)  # type: ignore[misc]  # nor these
    unit = peak_bytes(partial(gradient, objective, x))
    return {name: peak / unit for name, peak in peaks.items()}


def gradient(objective: Objective, x: Parameters) -> tuple[Tensor, ...]:
    """Compute the gradient, the unit of memory."""
    leaves = {name: each.detach().requires_grad_() for name, each in x.items()}
    return torch.autograd.grad(objective(leaves), list(leaves.values()))


def meta_gradient(loss: Loss, x: Parameters, batch: Any, steps: int, options: dict[str, Any]) -> tuple[Tensor, ...]:
    """Compute the gradient of the loss after the inner steps, with respect to the start."""
    leaves = {name: each.detach().requires_grad_() for name, each in x.items()}
    adapted = adapt(loss, leaves, batch, SGD(0.01), steps, **options)
    return torch.autograd.grad(loss(adapted, batch), list(leaves.values()))


def of_episode(episode: Episode) -> tuple[Loss, Parameters, Any]:
    """Return the loss of an episode's first task, its start and its data."""
    x, y = (each[0] for each in episode.tasks[:2])
    start = {name: each.detach() for name, each in episode.parameters().items()}
    return lambda parameters, batch: episode.value(parameters, *batch), start, (x, y)


def of_objective(objective: Objective) -> tuple[Loss, Parameters, Any]:
    """Return the loss of a network on fixed data, its start and a placeholder for data."""
    return lambda parameters, _: objective(parameters), objective.parameters(), torch.zeros(())


def routes(quick: bool) -> dict[str, float]:
    """Measure the ratio of the mixed route's time to double reverse's, by network."""
    problems = {
        "sine waves, 1-40-40-1, 5 points": of_episode(sinusoid(tasks=1)),
        "digits, CNN of 16 and 32 channels, 32 images": of_episode(digits_cnn(tasks=1)),
        **{name: of_objective(make()) for name, make in NETWORKS.items() if not quick},
    }
    found = {}
    for name, (loss, x, batch) in problems.items():
        both = [
            Contestant(route, "route", partial(meta_gradient, loss, x, batch, 5, {"route": route}))
            for route in ("reverse-over-reverse", "forward-over-reverse")
        ]
        double, mixed = race(both, 3 if quick else 15, name).values()
        found[name] = median_ratio(mixed, double)
    return found


def sections(quick: bool) -> Iterator[tuple[str, str, Any]]:
    """Yield heading, text and data of every part of the page."""
    by_network = {name: products(make()) for name, make in NETWORKS.items() if not quick or name == "mlp"}
    header = ["", *next(iter(by_network.values()))]
    rows = [[name, *(f"{each:.1f}" for each in peaks.values())] for name, peaks in by_network.items()]
    yield "Products", f"{PRODUCTS}\n\n{table(header, rows)}", by_network

    steps = 20 if quick else 200
    loss, x, batch = of_episode(digits_cnn(tasks=1, images=64))
    mebibytes = {
        way: peak_bytes(partial(meta_gradient, loss, x, batch, steps, options)) / 2**20 for way, options in WAYS.items()
    }
    lines = table(["", "MiB"], [[way, f"{peak:.3g}"] for way, peak in mebibytes.items()])
    yield "Inner loops", f"{LOOPS.format(steps=steps)}\n\n{lines}", mebibytes

    ratios = routes(quick)
    yield (
        "Routes",
        f"{ROUTES}\n\n{table(['', 'ratio'], [[name, f'{each:.1f}'] for name, each in ratios.items()])}",
        ratios,
    )
