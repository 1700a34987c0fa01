"""What a Hessian-vector product costs, in gradients: seconds, floating-point operations, bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.utils.flop_counter import FlopCounterMode

from benchmarks.memory import peak_bytes
from benchmarks.race import Contestant, median_ratio, race

Run = Callable[[], Any]


def costs(gradient: Run, products: Mapping[str, Run], rounds: int, label: str) -> dict[str, dict[str, float]]:
    """Multiples of one gradient's cost.

    Args:
        gradient: Computes the unit.
        products: What to compare with it, by name.
        rounds: How many rounds of timing.
        label: What the progress bar says.

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
    """Floating-point operations of matrix products and convolutions, the same on every machine."""
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()
