"""Memory of Laplacians with and without a graph to the parameters, and a step in very many dimensions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.func import hessian, vmap

import hodiff
from benchmarks.memory import peak_bytes
from benchmarks.report import table, target_table
from benchmarks.targets import Target, judged
from benchmarks.workloads import taylor_dimensions
from benchmarks.workloads.taylor import OURS, TRACE, WIDTHS, network

TITLE = "Memory of a Laplacian"
TEXT = """\
The Laplacian of a network {title} of tanh at {points} points, float32: peaks beyond what was there before, over that of
the trace of `torch.func.hessian` under `vmap`, with a graph to the parameters, as in training, and without."""
POINTS = 8
DENSE = "hodiff.laplacian(sparse=False)"
# Whether parameters require a gradient.
KINDS = {"with a graph": True, "without": False}
TARGETS = {"with a graph": 0.5, "without": 0.45}


def sections(quick: bool) -> Iterator[tuple[str, str, Any]]:
    """Yield heading, text and data of every part."""
    widths = (5, 16, 16, 1) if quick else WIDTHS
    found = {kind: peaks(widths, requires_grad) for kind, requires_grad in KINDS.items()}
    ratios = {kind: {way: peak / each[TRACE] for way, peak in each.items()} for kind, each in found.items()}
    rows = [[way, *(f"{ratios[kind][way]:.2f}" for kind in KINDS)] for way in found["without"]]
    parts = [TEXT.format(title="-".join(map(str, widths)), points=POINTS), table(["", *KINDS], rows)]
    if not quick:
        verdicts = [
            judged(Target(f"{way}, {kind}", TRACE, bound), ratios[kind][way])
            for way in (OURS, DENSE)
            for kind, bound in TARGETS.items()
        ]
        parts.append(target_table(verdicts))
    yield TITLE, "\n\n".join(parts), found
    yield from taylor_dimensions.sections(quick)


def peaks(widths: tuple[int, ...], requires_grad: bool) -> dict[str, int]:
    """Measure the peak bytes, by way."""
    net = network(widths, torch.float32).requires_grad_(requires_grad)
    x = torch.randn(POINTS, widths[0])

    def trace(x: Tensor) -> Tensor:
        return torch.trace(hessian(lambda y: net(y).squeeze(-1))(x))

    ways: dict[str, Callable[[], Tensor]] = {
        TRACE: lambda: vmap(trace)(x),
        OURS: lambda: hodiff.laplacian(net, batched=True)(x),
        DENSE: lambda: hodiff.laplacian(net, batched=True, sparse=False)(x),
    }
    return {name: peak_bytes(way) for name, way in ways.items()}
