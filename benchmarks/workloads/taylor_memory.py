"""Memory of Laplacians with and without a graph to the parameters, and a step in very many dimensions."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import hessian, vmap

import hodiff
from benchmarks.machine import one_core
from benchmarks.memory import peak_bytes
from benchmarks.report import table
from benchmarks.workloads.taylor import WIDTHS, network

MEMORY = """\
The Laplacian of a network {title} of tanh at 8 points, float32: peaks beyond what was there before, over
that of the trace of `torch.func.hessian` under `vmap`. Differentiable: with a graph to the parameters, as in training.
Targets: 0.5 with a graph, 0.45 without."""
STEP = """\
The gradient, by the parameters of a network D-128-128-1 of tanh, of the squared residual of Allen-Cahn's equation,
Δu + u - u³, at {points} points, float32, one core. By the estimate: two draws of 16 coordinates of the Laplacian, whose
product is the square without bias."""
POINTS = 8


def sections(quick: bool) -> Iterator[tuple[str, str, Any]]:
    """Heading, text and data of each part."""
    widths = (5, 16, 16, 1) if quick else WIDTHS
    peaks = {name: _peaks(widths, requires_grad) for name, requires_grad in (("differentiable", True), ("not", False))}
    ways = list(peaks["not"])
    rows = [[way, *(f"{peaks[kind][way] / peaks[kind][ways[0]]:.2f}" for kind in peaks)] for way in ways]
    text = f"{MEMORY.format(title='-'.join(map(str, widths)))}\n\n{table(['', *peaks], rows)}"
    yield "Memory of a Laplacian", text, peaks

    sizes = (100, 1000) if quick else (1000, 4000, 10_000, 100_000)
    found: dict[str, dict[str, float]] = {}
    with one_core():
        for size in sizes:
            for way, laplacian in (("in full", _in_full), ("by the estimate", _by_the_estimate)):
                found[f"{size:,} {way}"] = _step(size, laplacian)
    rows = [[name, f"{each['seconds']:.3g}", f"{each['mebibytes']:.4g}"] for name, each in found.items()]
    text = f"{STEP.format(points=POINTS)}\n\n{table(['dimensions', 's', 'MiB'], rows)}"
    yield "A step in very many dimensions", text, found


def _peaks(widths: tuple[int, ...], requires_grad: bool) -> dict[str, int]:
    net = network(widths, torch.float32).requires_grad_(requires_grad)
    x = torch.randn(8, widths[0])

    def trace(x: Tensor) -> Tensor:
        return torch.trace(hessian(lambda y: net(y).squeeze(-1))(x))

    ways: dict[str, Callable[[], Tensor]] = {
        "trace of torch.func.hessian": lambda: vmap(trace)(x),
        "hodiff.laplacian": lambda: hodiff.laplacian(net, batched=True)(x),
        "hodiff.laplacian(sparse=False)": lambda: hodiff.laplacian(net, batched=True, sparse=False)(x),
    }
    return {name: peak_bytes(way) for name, way in ways.items()}


def _in_full(net: nn.Module, x: Tensor, _: torch.Generator) -> tuple[Tensor, Tensor]:
    found = hodiff.laplacian(net, batched=True)(x)
    return found, found


def _by_the_estimate(net: nn.Module, x: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    estimate = hodiff.laplacian(net, batched=True, randomised="coordinates", samples=16, generator=generator)
    return estimate(x).value, estimate(x).value


def _step(size: int, laplacian: Callable[..., tuple[Tensor, Tensor]]) -> dict[str, float]:
    net = network((size, 128, 128, 1), torch.float32).requires_grad_()
    x, generator = torch.randn(POINTS, size) / size**0.5, torch.Generator().manual_seed(0)

    def step() -> tuple[Tensor, ...]:
        first, second = laplacian(net, x, generator)
        u = net(x)
        rest = u - u**3
        return torch.autograd.grad(((first + rest) * (second + rest)).mean(), list(net.parameters()))

    step()
    start = time.process_time()
    step()
    return {"seconds": time.process_time() - start, "mebibytes": peak_bytes(step) / 2**20}
