"""K-th derivatives along a line: series against nested forward mode, until that takes too long."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import mpmath as mp
import torch
from torch import Tensor, nn
from torch.func import jvp

from benchmarks.machine import one_core
from benchmarks.report import number, table
from benchmarks.workloads.taylor import network
from hodiff.taylor import jet

# Seconds of a call: nested forward mode skips orders that would take longer.
PATIENCE = 10.0
TEXT = """\
A network 10-64-64-1 of tanh in float64, at one point; milliseconds of the processor, on one core, medians of up to nine
calls. `growth` is the exponent p of K^p between half the order and it. Nested forward mode is asked as long as
a call is to take less than {patience:g} s. Relative errors are those to mpmath's derivatives of the same network, by
differences with 60 digits."""


def nested(f: Callable[[Tensor], Tensor], x: Tensor, v: Tensor, order: int) -> Tensor:
    """Compute D^K f(x)[v, ..., v] by `torch.func.jvp`, nested K times."""

    def tower(height: int) -> Callable[[Tensor], Tensor]:
        if height == 0:
            return lambda t: f(x + t * v)
        return lambda t: jvp(tower(height - 1), (t,), (torch.ones_like(t),))[1]

    return tower(order)(torch.zeros((), dtype=x.dtype))


def exact(net: nn.Sequential, x: Tensor, v: Tensor, order: int) -> list[mp.mpf]:
    """Compute the value and the derivatives along the line up to an order, by differences with 60 digits."""
    with mp.workdps(60):
        layers = [
            (mp.matrix(layer.weight.tolist()), mp.matrix(layer.bias.tolist()))
            for layer in net
            if isinstance(layer, nn.Linear)
        ]
        start, direction = mp.matrix(x.tolist()), mp.matrix(v.tolist())

        def along(t: mp.mpf) -> mp.mpf:
            found = start + t * direction
            for weight, bias in layers[:-1]:
                found = (weight * found + bias).apply(mp.tanh)
            weight, bias = layers[-1]
            return (weight * found + bias)[0]

        return list(mp.diffs(along, 0, order))


def seconds(run: Callable[[], Any]) -> float:
    """Return the median time of a call; slower calls are repeated less often."""
    found: list[float] = []
    while len(found) < 9 and sum(found) < 2:
        start = time.process_time()
        run()
        found.append(time.process_time() - start)
    return median(found)


def sections(quick: bool) -> Iterator[tuple[str, str, Any]]:
    """Yield one table of orders and times, with their growth."""
    net = network((10, 64, 64, 1), torch.float64)
    x, v = torch.randn(2, 10, dtype=torch.float64)
    orders = range(1, 5 if quick else 21)
    truth = exact(net, x, v, orders[-1])
    series: dict[int, float] = {}
    by_nesting: dict[int, float] = {}
    errors: dict[int, float] = {}
    with one_core():
        for order in orders:
            run = partial(_last, net, x, v, order)
            series[order], errors[order] = seconds(run), _error(run(), truth[order])
            if _expected(by_nesting, order) < (0.1 if quick else PATIENCE):
                by_nesting[order] = seconds(partial(nested, net, x, v, order))
    rows = [
        [
            str(k),
            number(1e3 * series[k], ".3g"),
            _growth(series, k),
            number(errors[k], ".0e"),
            number(1e3 * by_nesting[k] if k in by_nesting else None, ".3g"),
        ]
        for k in orders
    ]
    header = ["order", "hodiff.taylor.jet", "growth", "relative error", "nested"]
    text = f"{TEXT.format(patience=PATIENCE)}\n\n{table(header, rows)}"
    yield "Derivatives along a line", text, {"series": series, "nested": by_nesting, "errors": errors}


def _last(net: nn.Sequential, x: Tensor, v: Tensor, order: int) -> Tensor:
    derivative: Tensor = jet(net, (x,), ([v, *[torch.zeros_like(v)] * (order - 1)],))[1][-1]
    return derivative


def _error(found: Tensor, truth: mp.mpf) -> float:
    return float(abs(found.item() / truth - 1))


def _expected(times: dict[int, float], order: int) -> float:
    """Extrapolate the time of an order from the two orders before; infinite where they were skipped."""
    if order < 3:
        return 0.0
    if order - 1 not in times:
        return math.inf
    return times[order - 1] ** 2 / times[order - 2]


def _growth(times: dict[int, float], order: int) -> str:
    if order % 2 or order < 4:
        return ""
    return f"{math.log2(times[order] / times[order // 2]):.1f}"


def draw(data: dict[str, Any], directory: Path) -> None:
    """Plot both curves, and K² through the last point of the series."""
    import matplotlib.pyplot as plt

    found = data["Derivatives along a line"]
    figure, axes = plt.subplots(figsize=(5, 3.4), layout="constrained")
    for name, label in (("nested", "nested forward mode"), ("series", "hodiff.taylor.jet")):
        orders: Sequence[int] = list(found[name])
        axes.loglog(orders, [1e3 * found[name][k] for k in orders], "o-", markersize=3, label=label)
    last = max(found["series"])
    orders = range(2, last + 1)
    axes.loglog(orders, [1e3 * found["series"][last] * (k / last) ** 2 for k in orders], ":", color="gray", label="K²")
    axes.set(xlabel="order K", ylabel="milliseconds", title="The K-th derivative along a line")
    axes.legend(frameon=False)
    figure.savefig(directory / "taylor-orders.png", dpi=120)
    plt.close(figure)
