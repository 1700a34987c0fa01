r"""Mixed derivatives as combinations of derivatives along lines, with exact rational factors.

Along the line of s the derivative of order d is a form of degree d, $F(s) = D^d f[s, \dots, s]$; mixed derivatives are
its coefficients, and follow from its values. The scheme in which all derivatives of an order share lines is from A.
Griewank, J. Utke & A. Walther, "Evaluating higher derivative tensors by forward propagation of univariate Taylor
series", Math. Comp. 69, 2000.

Execution of plans for mixed derivatives: directions of the lines, and sums of coefficients along the lines.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import product
from typing import Any

import torch
from torch import Tensor

from hodiff.taylor.differential.operand import Operand, groups
from hodiff.taylor.jets import tensor_of

# Order of differentiation with respect to each coordinate that occurs.
Exponents = tuple[int, ...]
# Factor of F by direction. The components of a direction are integers without a common factor, and the first nonzero
# component is positive.
Factors = dict[tuple[int, ...], Fraction]


@lru_cache(maxsize=256)
def polarised(exponents: Exponents) -> Factors:
    """Factors of the fewest lines that give one derivative: at most half of the product of all (exponent + 1)."""
    # 2^d d! times the derivative is the sum of (-1)^|m| (i over m) F(i - 2m) over m from 0 to i.
    d = sum(exponents)
    found: Factors = {}
    for m in _up_to(exponents):
        factor = Fraction((-1) ** sum(m) * _binomials(exponents, m), 2**d * math.factorial(d))
        _add(found, [i - 2 * each for i, each in zip(exponents, m, strict=True)], d, factor)
    return {line: factor for line, factor in found.items() if factor}


@lru_cache(maxsize=256)
def interpolated(exponents: Exponents) -> Factors:
    """Factors of lines that all derivatives of an order share: nonnegative integers with the order as their sum."""
    # d! times the derivative is the sum over such j of F(j), times the sum over k from 0 to i of
    # (-1)^|i - k| (i over k) (d k / |k| over j) (|k| / d)^d.
    d = sum(exponents)
    found: Factors = {}
    for j in _up_to((d,) * len(exponents)):
        if sum(j) != d:
            continue
        factor = Fraction(0)
        for k in _up_to(exponents):
            if total := sum(k):
                weight = (-1) ** (d - total) * _binomials(exponents, k) * Fraction(total, d) ** d
                factor += weight * math.prod(_binomial(Fraction(d * a, total), b) for a, b in zip(k, j, strict=True))
        _add(found, j, d, factor / math.factorial(d))
    return {line: factor for line, factor in found.items() if factor}


def _up_to(exponents: Exponents) -> product[tuple[int, ...]]:
    return product(*(range(each + 1) for each in exponents))


def _binomials(n: Sequence[int], k: Sequence[int]) -> int:
    return math.prod(map(math.comb, n, k))


def _binomial(x: Fraction, k: int) -> Fraction:
    return math.prod((x - i for i in range(k)), start=Fraction(1)) / math.factorial(k)


def _add(found: Factors, direction: Sequence[int], d: int, factor: Fraction) -> None:
    """Add a term along the shortest direction of its line; F is homogeneous of degree d."""
    length = math.gcd(*direction)
    if length:
        length *= next(1 if each > 0 else -1 for each in direction if each)
        line = tuple(each // length for each in direction)
        found[line] = found.get(line, Fraction(0)) + factor * length**d


@dataclass(frozen=True)
class Plan:
    """Several derivatives as combinations of Taylor coefficients along lines.

    Attributes:
        lines: Nonzero components of each line, as pairs (name of the coordinate, component).
        terms: Terms of each derivative, as pairs (number of the line, factor).
    """

    lines: tuple[tuple[tuple[int, int], ...], ...]
    terms: tuple[tuple[tuple[int, float], ...], ...]


def planned(derivatives: Sequence[Sequence[int]], *schemes: Callable[[Exponents], Factors]) -> Plan:
    """Plan for derivatives by names of coordinates, from the scheme that needs the fewest lines."""
    return min((_plan(derivatives, scheme) for scheme in schemes), key=lambda plan: len(plan.lines))


def _plan(derivatives: Sequence[Sequence[int]], scheme: Callable[[Exponents], Factors]) -> Plan:
    numbers: dict[tuple[tuple[int, int], ...], int] = {}
    terms = []
    for coordinates in derivatives:
        counted = sorted(Counter(coordinates).items())
        own = []
        for direction, factor in scheme(tuple(count for _, count in counted)).items():
            line = tuple((name, part) for (name, _), part in zip(counted, direction, strict=True) if part)
            number = numbers.setdefault(line, len(numbers))
            own.append((number, float(factor * math.factorial(len(coordinates)))))
        terms.append(tuple(own))
    return Plan(tuple(numbers), tuple(terms))


def directions(operand: Operand, plan: Plan, numbers: Sequence[int], chunk_size: int | None) -> Iterator[list[Tensor]]:
    """Yield the lines of a plan as groups of directions; `numbers` maps the plan's names to coordinates."""
    for start, stop in groups(len(plan.lines), chunk_size):
        lines = plan.lines[start:stop]
        at = torch.tensor([i for i, line in enumerate(lines) for _ in line], dtype=torch.long, device="cpu")
        to = torch.tensor([numbers[name] for line in lines for name, _ in line], dtype=torch.long, device="cpu")
        parts = torch.tensor([part for line in lines for _, part in line], dtype=torch.float64, device="cpu")
        # Two names may refer to the same coordinate.
        rows = torch.zeros(stop - start, operand.size, dtype=torch.float64, device="cpu").index_put(
            (at, to), parts, accumulate=True
        )
        yield operand.spread(rows)


def combined(terms: Sequence[Sequence[tuple[int, float]]], coefficients: Any) -> Any:
    """Sum coefficients along lines (R, ...) with the factors of the terms: a product with a sparse matrix."""
    like = tensor_of(coefficients)
    flat = [(i, number, factor) for i, own in enumerate(terms) for number, factor in own]
    rows, lines, factors = zip(*flat, strict=True) if flat else ((), (), ())
    at = torch.tensor(lines, dtype=torch.long, device=like.device)
    to = torch.tensor(rows, dtype=torch.long, device=like.device)
    weights = torch.tensor(factors, dtype=torch.float64, device="cpu").to(like.device, like.dtype)
    picked = torch.index_select(coefficients, 0, at) * weights.reshape(-1, *[1] * (like.ndim - 1))
    zero = torch.zeros(len(terms), *like.shape[1:], dtype=like.dtype, device=like.device)
    return torch.index_add(zero, 0, to, picked)
