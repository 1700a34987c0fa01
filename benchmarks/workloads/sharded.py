"""Bytes, memory and time of products of a GPT whose parameters are sharded over ranks, and a model of their costs."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.memory import ROOT
from benchmarks.report import table

LAYERS, WIDTH, BATCH = 6, 128, 1
RANKS = (1, 2, 4)
# Billions of parameters, layers and width of language models.
MODELS = {"1 billion": (1.2e9, 24, 2048), "7 billion": (6.7e9, 32, 4096), "70 billion": (69e9, 80, 8192)}
GPUS = (8, 64)
GIB, GB = 2**30, 1e9


@dataclass(frozen=True)
class Cost:
    """Multiples of all parameters (P) and of the factors of products (M) that one product moves or holds.

    Attributes:
        gathered: Multiples of P and of M that are gathered.
        scattered: Multiple of P that is scattered.
        whole: Multiple of P in memory that every rank holds whole at the peak.
        shards: Multiple of the rank's part of P in memory at the peak, without x and v.
    """

    gathered: tuple[int, int]
    scattered: int
    whole: float
    shards: float

    def moved(self, parameters: float, factors: float) -> tuple[float, float]:
        """Return how many numbers are gathered and scattered."""
        return self.gathered[0] * parameters + self.gathered[1] * factors, self.scattered * parameters

    def held(self, parameters: float, ranks: int) -> float:
        """Return how many numbers a rank holds at the peak, besides activations."""
        return (self.whole + self.shards / ranks) * parameters


COSTS = {
    "gradient": Cost((2, 0), 1, 0, 1),
    "`hvp`": Cost((2, 3), 2, 1, 2),
    '`hvp`, `"forward-over-reverse"`': Cost((2, 0), 2, 2, 2),
    "`HessianOperator`, later": Cost((1, 2), 1, 1, 2),
    "`GaussNewtonOperator`, later": Cost((1, 2), 1, 1, 2),
}
BYTES = """\
Bytes of whole tensors that collectives gather and scatter in one product, in multiples of the parameters' bytes,
counted by a `TorchDispatchMode`; and the formula's. A GPT of {layers} layers of width {width}, {ranks} ranks of gloo.
"gradient" is a forward and a backward pass of `fully_shard` alone. Each rank sends and receives (n - 1) / n of these
bytes."""
MEMORY = """\
Peak memory of a product in multiples of the parameters' bytes, beyond what was there before it: what torch hands out
at once. The formula has no activations; sequences are short here."""
TIME = "Milliseconds of a product, medians of 3; ranks share two cores. One rank is not sharded."
SCALED = """\
Gigabytes in bfloat16, by the formula: bytes that a GPU receives in a product, and memory of the product without
activations. A forward difference of gradients needs one gradient more than the gradient itself, and has an error of
about 0.1 in bfloat16 (see [bfloat16](bfloat16.md))."""


def measured(ranks: int, layers: int, width: int, batch: int) -> dict[str, Any]:
    """Run all ranks, and return what the first one measured."""
    with tempfile.TemporaryDirectory() as folder:
        numbers = map(str, (ranks, layers, width, batch))
        rest = [str(Path(folder) / "rendezvous"), *numbers]
        commands = [[sys.executable, "-m", "benchmarks.sharded_ranks", str(rank), *rest] for rank in range(ranks)]
        others = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) for command in commands[1:]]
        first = subprocess.run(commands[0], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
        for each in others:
            each.wait()
    found: dict[str, Any] = json.loads(first.stdout.splitlines()[-1])
    return found


def sections(quick: bool) -> Iterator[tuple[str, str, Any]]:
    """Yield heading, text and data of every part of the page."""
    sizes = (2, 32, 1) if quick else (LAYERS, WIDTH, BATCH)
    found = {ranks: measured(ranks, *sizes) for ranks in (RANKS[:2] if quick else RANKS)}
    yield from pages(found, *sizes[:2])


def pages(found: dict[int, dict[str, Any]], layers: int, width: int) -> Iterator[tuple[str, str, Any]]:
    """Yield the sections of measurements by number of ranks."""
    most = max(found)
    parameters, factors = found[most]["parameters"], found[most]["weights"]
    unit = 4 * parameters
    rows, data = [], {}
    for name, cost in COSTS.items():
        way = found[most]["ways"][name]
        counts = [way["gathered"] / unit, way["scattered"] / unit]
        formula = [each / parameters for each in cost.moved(parameters, factors)]
        data[name] = {"gathered": counts[0], "scattered": counts[1], "formula": formula}
        cells = zip(counts, formula, strict=True)
        rows.append([name, *(f"{each:.3f}" for pair in cells for each in pair)])
    text = BYTES.format(layers=layers, width=width, ranks=most)
    header = ["", "gathered", "formula", "scattered", "formula"]
    yield "Bytes of collectives", f"{text}\n\n{table(header, rows)}", data

    peaks = {name: {str(n): each["ways"][name]["peak"] / unit for n, each in found.items()} for name in COSTS}
    rows = [
        [name, *(f"{peaks[name][str(n)]:.2f}" for n in found), *(f"{cost.held(1, n):.2f}" for n in found if n > 1)]
        for name, cost in COSTS.items()
    ]
    header = ["", *(f"{n} rank{'s' * (n > 1)}" for n in found), *(f"formula, {n}" for n in found if n > 1)]
    yield "Peak memory of a rank", f"{MEMORY}\n\n{table(header, rows)}", peaks

    times = {name: {str(n): 1e3 * each["ways"][name]["seconds"] for n, each in found.items()} for name in COSTS}
    rows = [[name, *(f"{each:.3g}" for each in row.values())] for name, row in times.items()]
    yield "Time", f"{TIME}\n\n{table(['', *(f'{n} rank' + 's' * (n > 1) for n in found)], rows)}", times

    scaled = {name: _scaled(cost) for name, cost in COSTS.items()}
    header = ["", *next(iter(scaled.values()))]
    rows = [[name, *row.values()] for name, row in scaled.items()]
    yield "Larger models", f"{SCALED}\n\n{table(header, rows)}", scaled


def _scaled(cost: Cost) -> dict[str, str]:
    """Return the gigabytes that a GPU receives and holds, by model and number of GPUs."""
    cells = {}
    for model, (parameters, *_) in MODELS.items():
        for gpus in GPUS:
            received = 2 * sum(cost.moved(parameters, parameters)) * (gpus - 1) / gpus
            held = 2 * cost.held(parameters, gpus)
            cells[f"{model}, {gpus} GPUs"] = f"{received / GB:.3g}; {held / GB:.3g}"
    return cells
