"""Training steps with a Laplacian in very many dimensions: in full, and by random directions."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import hodiff
from benchmarks.machine import one_core
from benchmarks.memory import peak_bytes
from benchmarks.report import table
from benchmarks.workloads.taylor import network

# Largest memory and time that a step may take, or is expected to take, in MiB and seconds.
MEBIBYTES, SECONDS = 4096, 20.0
SIZES, QUICK_SIZES = (1000, 3000, 10_000, 30_000, 100_000), (100, 300)
POINTS, SAMPLES = 8, 16
TITLE = "A step in very many dimensions"
TEXT = f"""\
The gradient, by the parameters of a network D-128-128-1 of tanh, of the squared residual of Allen-Cahn's equation,
Δu + u - u³, at {POINTS} points, float32, one core; peaks are beyond what was there before. By the estimate: two draws
of {SAMPLES} coordinates of the Laplacian, whose product is the square without bias. A way is left out where a step is
expected to take more than {MEBIBYTES // 1024} GiB or {SECONDS:g} s, by how it grew before. The last column is Δu at the
first point, with the standard error of one draw."""

Laplacian = Callable[[nn.Module, Tensor, torch.Generator], tuple[Tensor, Tensor, Tensor | None]]


def in_full(net: nn.Module, x: Tensor, _: torch.Generator) -> tuple[Tensor, Tensor, None]:
    """Compute the Laplacian once, and return it as both factors of the square."""
    found = hodiff.laplacian(net, batched=True)(x)
    return found, found, None


def all_directions(net: nn.Module, x: Tensor, _: torch.Generator) -> tuple[Tensor, Tensor, None]:
    """Compute the Laplacian with unit directions as numbers before the first layer, D² of them at a point."""
    found = hodiff.laplacian(net, batched=True, sparse=False)(x)
    return found, found, None


def by_the_estimate(net: nn.Module, x: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Compute two independent estimates, and the standard error of the first."""
    laplacian = hodiff.laplacian(net, batched=True, randomised="coordinates", samples=SAMPLES, generator=generator)
    first, second = laplacian(x), laplacian(x)
    return first.value, second.value, first.standard_error


WAYS: dict[str, Laplacian] = {
    "in full": in_full,
    "in full, sparse=False": all_directions,
    "by the estimate": by_the_estimate,
}


def sections(quick: bool) -> Iterator[tuple[str, str, Any]]:
    """Yield one table of dimensions and ways with time, memory and the Laplacian."""
    found: dict[str, dict[str, Any]] = {}
    with one_core():
        for name, laplacian in WAYS.items():
            steps: list[dict[str, Any]] = []
            for size in QUICK_SIZES if quick else SIZES:
                if fits(steps):
                    steps.append(measured(size, laplacian))
                    found[f"{size:,}, {name}"] = steps[-1]
    rows = [[name, f"{s['seconds']:.3g}", f"{s['mebibytes']:.4g}", _shown(s)] for name, s in found.items()]
    yield TITLE, f"{TEXT}\n\n{table(['dimensions', 's', 'MiB', 'Δu'], rows)}", found


def fits(steps: list[dict[str, Any]]) -> bool:
    """Extrapolate the cost of the next step from the last two; True if it stays within the bounds."""
    bounds = {"seconds": SECONDS, "mebibytes": MEBIBYTES}
    if len(steps) < 2:
        return True
    return all(steps[-1][kind] ** 2 / steps[-2][kind] <= bound for kind, bound in bounds.items())


def measured(size: int, laplacian: Laplacian) -> dict[str, Any]:
    """Measure time and peak, and compute the Laplacian at the first point with its standard error, if any."""
    net = network((size, 128, 128, 1), torch.float32).requires_grad_()
    x = torch.randn(POINTS, size, generator=torch.Generator().manual_seed(1)) / size**0.5
    generator = torch.Generator().manual_seed(0)

    def step() -> tuple[Tensor, ...]:
        first, second, _ = laplacian(net, x, generator)
        u = net(x)
        rest = u - u**3
        return torch.autograd.grad(((first + rest) * (second + rest)).mean(), list(net.parameters()))

    step()
    start = time.process_time()
    step()
    seconds = time.process_time() - start
    value, _, error = laplacian(net, x, generator.manual_seed(0))
    return {
        "seconds": seconds,
        "mebibytes": peak_bytes(step) / 2**20,
        "value": value[0].item(),
        "standard error": None if error is None else error[0].item(),
    }


def _shown(step: dict[str, Any]) -> str:
    error = step["standard error"]
    return f"{step['value']:.2e}" + ("" if error is None else f" ± {error:.0e}")
