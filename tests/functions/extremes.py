"""Errors in ulps of a function of numbers and its derivatives, against mpmath."""

import json
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from functions.case import Extremes, FunctionCase
from functions.catalogue import CASES
from mpmath import mp
from torch import Tensor

EPS = torch.finfo(torch.float64).eps
TINY = torch.finfo(torch.float64).tiny
DIGITS = 50
ORDERS = range(4)
# mpmath's results, written by `python tests/functions/write_truths.py`; GELU alone takes half a minute.
TRUTHS = Path(__file__).with_name("truths.json")

# Magnitudes at which rounding, cancellation, underflow and overflow occur.
POINTS = [
    sign * size
    for size in (1e-300, 1e-30, 1e-16, 1e-8, 1e-4, 0.01, 0.3, 0.5, 1.0, 1.5, 3.0, 8.0, 20.0, 37.0, 100.0, 710.0, 1e4)
    for sign in (1.0, -1.0)
]


def derivatives(case: FunctionCase, extremes: Extremes, point: float) -> list[float]:
    """Compute the value and the first three derivatives at one number, in float64, in reverse mode."""
    return [float(f(torch.tensor(point, dtype=torch.float64))) for f in tower(_along(case, extremes))]


def tower(f: Callable[[Tensor], Tensor]) -> list[Callable[[Tensor], Tensor]]:
    """Return functions that compute the function and its first three derivatives."""
    functions = [f]
    for _ in range(3):
        functions.append(torch.func.grad(functions[-1]))
    return functions


def _along(case: FunctionCase, extremes: Extremes) -> Callable[[Tensor], Tensor]:
    def f(x: Tensor) -> Tensor:
        arguments: list[Any] = [x] * (len(extremes.others) + 1)
        for position, value in extremes.others.items():
            arguments[position] = torch.tensor(value, dtype=torch.float64)
        return case.function(*arguments)

    return f


def truth(extremes: Extremes, point: float) -> list[Any]:
    """Compute the value and the first four derivatives to about 50 digits by mpmath's differences."""

    def f(x: Any) -> Any:
        arguments = [x] * (len(extremes.others) + 1)
        for position, value in extremes.others.items():
            arguments[position] = mp.mpf(value)
        return extremes.exact(*arguments)

    # Differences of order k lose k times the digits of the step, and exp(-1e4) alone has 4,343 leading zeros.
    with mp.workdps(DIGITS):
        return [_difference(f, point, order) for order in range(5)]


def _difference(f: Callable[[Any], Any], point: float, order: int) -> Any:
    x = mp.mpf(point)
    if order == 0:
        return f(x)
    # Use central differences. The squared step is below the smallest float, and the step is far below the point's
    # scale. The precision is far above the digits that the step loses.
    step_digits = 330 + (max(0, -math.floor(math.log10(abs(point)))) if point else 0)
    with mp.workdps(step_digits * (order + 2) + 2 * DIGITS + 40):
        h = mp.mpf(10) ** -step_digits
        x = mp.mpf(point)
        terms = [(-1) ** k * mp.binomial(order, k) * f(x + (mp.mpf(order) / 2 - k) * h) for k in range(order + 1)]
        return mp.fsum(terms) / h**order


def each_extremes() -> Iterator[tuple[str, FunctionCase, Extremes]]:
    """Yield all extremes of the catalogue, with their names and cases."""
    for case in CASES:
        for position, extremes in enumerate(case.extremes):
            yield f"{case.name}-argument-{extremes.argnum}-{position}", case, extremes


def points(name: str, extremes: Extremes) -> list[float]:
    """Return the stored points: the list above restricted to the domain, and a few random magnitudes."""
    rng = random.Random(name)
    drawn = [rng.choice((1, -1)) * float(f"{10 ** rng.uniform(-6, 4):.6g}") for _ in range(12)]
    domain = tuple(tuple(pair) for pair in extremes.domain)
    return [*points_in(domain), *(p for p in drawn if any(low < p < high for low, high in domain))]


@cache
def truths() -> dict[str, Mapping[float, list[Any]]]:
    """Read the stored value and first four derivatives for each name and point."""
    table = json.loads(TRUTHS.read_text(encoding="utf-8"))
    return {
        name: {float(point): [mp.mpf(each) for each in values] for point, values in rows.items()}
        for name, rows in table.items()
    }


def errors_in_ulps(case: FunctionCase, extremes: Extremes, point: float, exact: list[Any]) -> list[float]:
    """Compute errors of orders 0 to 3 in units of `eps * max(|f^(k)|, max(|x|, scale) |f^(k+1)|)`."""
    got = derivatives(case, extremes, point)
    distance = max(abs(point), extremes.scale)
    return [_ulps(got[k], exact[k], distance * exact[k + 1], TINY * max(1.0, abs(point))) for k in ORDERS]


def _ulps(got: float, exact: Any, change: Any, flushed: float) -> float:
    # float64 cannot hold these results: they are flushed to zero or overflow to the correct infinity.
    if abs(exact) > torch.finfo(torch.float64).max:
        return 0.0 if got == math.copysign(math.inf, exact) else math.inf
    if not math.isfinite(got):
        return math.inf
    # Factors below the smallest normal number are flushed to zero, and their products are zero.
    unit = max(EPS * max(abs(exact), abs(change)), mp.mpf(flushed))
    return float(abs(mp.mpf(got) - exact) / unit)


@cache
def points_in(domain: tuple[tuple[float, float], ...]) -> list[float]:
    """Return the points of the list that lie in a domain."""
    return [p for p in POINTS if any(low < p < high for low, high in domain)]


def worst_ulps(case: FunctionCase) -> Sequence[float]:
    """Return the largest error by order over all stored points and arguments of a case."""
    rows = [
        errors_in_ulps(each, extremes, point, exact)
        for name, each, extremes in each_extremes()
        if each is case
        for point, exact in truths()[name].items()
    ]
    return [max(column) for column in zip(*rows, strict=True)]
