"""Cost of a Hessian-vector product in gradients: seconds, floating-point operations, bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.utils.flop_counter import FlopCounterMode

from benchmarks.memory import peak_bytes
from benchmarks.race import Contestant, median_ratio, race

Run = Callable[[], Any]


def costs(gradient: Run, products: Mapping[str, Run], rounds: int, label: str) -> dict[str, dict[str, float]]:
    """Measure costs in multiples of one gradient's cost.

    Args:
        gradient: Function that computes the gradient, the unit.
        products: Functions to compare with the gradient, by name.
        rounds: Number of rounds of timing.
        label: Label of the progress bar.

    Returns:
        "time", "operations" and "memory" by name.
    """
    contestants = [Contestant("", "unit", gradient), *(Contestant(name, "route", go) for name, go in products.items())]
    seconds = race(contestants, rounds, label)
    operations, memory = flops(gradient), peak_bytes(gradient)
    return {
        name: {
            "time": median_ratio(seconds[name], seconds[""]),
            "operations": flops(product) / operations,
            "memory": peak_bytes(product) / memory,
        }
        for name, product in products.items()
    }


def flops(run: Run) -> int:
    """Count floating-point operations of matrix products and convolutions, the same on every machine."""
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()
