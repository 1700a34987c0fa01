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
# Parameters and width of language models.
MODELS = {"1 billion": (1e9, 2048), "7 billion": (7e9, 4096), "70 billion": (70e9, 8192)}
GPUS = (8, 64)
GB = 1e9


@dataclass(frozen=True)
class Cost:
    """Multiples of all parameters (P) and of the factors of products (M) that one product moves or holds.

    Attributes:
        gathered: Multiples of P and of M that are gathered.
        scattered: Multiple of P that is scattered.
        whole: Multiple of P in memory that every rank holds whole at the peak.
        shards: Multiple of the rank's part of P in memory at the peak, without x and v.
        tensors: Number of gathered tensors in memory at the peak, of the size of the largest.
    """

    gathered: tuple[int, int]
    scattered: int
    whole: float
    shards: float
    tensors: int

    def moved(self, parameters: float, factors: float) -> tuple[float, float]:
        """Return how many numbers are gathered and scattered."""
        return self.gathered[0] * parameters + self.gathered[1] * factors, self.scattered * parameters

    def held(self, parameters: float, largest: float, ranks: int) -> float:
        """Return how many numbers a rank holds at the peak, besides activations."""
        return (self.whole + self.shards / ranks) * parameters + self.tensors * largest


COSTS = {
    "`hvp`": Cost((2, 3), 2, 1, 0, 4),
    '`hvp`, `"forward-over-reverse"`': Cost((2, 0), 2, 2.5, 1.8, 0),
    "`HessianOperator`, later": Cost((1, 2), 1, 1, 1, 4),
    "`GaussNewtonOperator`, later": Cost((1, 2), 1, 0, 3, 1),
}
# A forward and a backward pass of `fully_shard` alone, whose memory depends on the sizes of its units.
GRADIENT = Cost((2, 0), 1, 0, 1, 0)
BYTES = """\
Bytes that a rank receives in one product, in multiples of the parameters' bytes, counted by a `TorchDispatchMode`
beside those of the formulas of the [guide](../../docs/guides/large_models.md#costs). A GPT of {layers} layers of width
{width} under `fully_shard`, on ranks of gloo. "gradient" is a forward and a backward pass of `fully_shard` alone. A
single rank receives nothing."""
MEMORY = """\
Peak memory of a product in multiples of the parameters' bytes, beyond what was there before it: what torch hands out
at once, the least of 3. The formulas are those of several ranks: on one rank, nothing is gathered. They add the
activations and recorded graphs A, by which the peak grows if the batch is doubled."""
TIME = """\
Milliseconds of a product, medians of 3. Ranks share two cores, and gloo sends each tensor through sockets, so that
times on GPUs are others."""
SCALED = """\
Gigabytes that a GPU receives in a product, and, after the semicolon, gigabytes of its memory in the product besides
parameters, vector and activations, in float32, by the formulas. A forward difference of gradients takes one gradient
more; in bfloat16, its error is a tenth ([bfloat16](bfloat16.md))."""


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
    most, ways = max(found), {"gradient": GRADIENT, **COSTS}
    parameters, factors = found[most]["parameters"], found[most]["weights"]
    unit, largest = 4 * parameters, 4 * width**2 / parameters

    received: dict[str, dict[str, tuple[float, float]]] = {}
    data: dict[str, Any] = {}
    for name, cost in ways.items():
        formula = [each / parameters for each in cost.moved(parameters, factors)]
        for ranks in (each for each in found if each > 1):
            way, share = found[ranks]["ways"][name], (ranks - 1) / ranks
            counts = [way["gathered"] / unit, way["scattered"] / unit]
            received.setdefault(name, {})[_ranks(ranks)] = share * sum(counts), share * sum(formula)
        data[name] = {"gathered": counts[0], "scattered": counts[1], "formula": formula}
    yield "Bytes of collectives", f"{BYTES.format(layers=layers, width=width)}\n\n{_compared(received)}", data

    peaks: dict[str, dict[str, tuple[float, ...]]] = {name: {} for name in ways}
    data = {name: {} for name in ways}
    for ranks, each in found.items():
        for name, cost in ways.items():
            peak, activations = (each["ways"][name][key] / unit for key in ("peak", "activations"))
            formula_of_peak = cost.held(1, largest, ranks) + activations
            data[name] |= {str(ranks): peak, f"formula, {ranks}": formula_of_peak, f"A, {ranks}": activations}
            # The memory of the gradient depends on the units of `fully_shard`.
            peaks[name][_ranks(ranks)] = (peak, formula_of_peak) if name in COSTS else (peak,)
    yield "Peak memory of a rank", f"{MEMORY}\n\n{_compared(peaks)}", data

    times = {name: {str(n): 1e3 * each["ways"][name]["seconds"] for n, each in found.items()} for name in ways}
    rows = [[name, *(f"{each:.0f}" for each in row.values())] for name, row in times.items()]
    yield "Time", f"{TIME}\n\n{table(['', *map(_ranks, found)], rows)}", times

    scaled = {f"{model}, {gpus} GPUs": _scaled(model, gpus) for model in MODELS for gpus in GPUS}
    rows = [[name, *row.values()] for name, row in scaled.items()]
    yield "Larger models", f"{SCALED}\n\n{table(['', 'gradient', *COSTS], rows)}", scaled


def _compared(numbers: dict[str, dict[str, Any]]) -> str:
    """Return a table of measured numbers, those of formulas where there are any, and the differences."""
    header = ["", *(word for each in next(iter(numbers.values())) for word in (each, "formula", "difference"))]
    rows = [
        [name, *(cell for measured, *formula in row.values() for cell in _cells(measured, *formula))]
        for name, row in numbers.items()
    ]
    return table(header, rows)


def _cells(measured: float, formula: float | None = None) -> list[str]:
    if formula is None:
        return [f"{measured:.2f}", "", ""]
    return [f"{measured:.2f}", f"{formula:.2f}", f"{100 * (measured / formula - 1):+.0f} %"]


def _ranks(count: int) -> str:
    return f"{count} rank" if count == 1 else f"{count} ranks"


def _scaled(model: str, gpus: int) -> dict[str, str]:
    """Return the gigabytes that a GPU receives and holds in each product."""
    parameters, width = MODELS[model]
    cells = {}
    for name, cost in {"gradient": GRADIENT, **COSTS}.items():
        received = 4 * sum(cost.moved(parameters, parameters)) * (gpus - 1) / gpus / GB
        held = 4 * cost.held(parameters, 4 * width**2, gpus) / GB
        cells[name] = f"{received:.0f}" if name == "gradient" else f"{received:.0f}; {held:.1f}"
    return cells
