"""Derivatives of NumPy code by extrapolated central differences, with an estimate of their error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

# Maps the point to values and estimates of their errors.
Measured = Callable[..., tuple[Array, Array]]

_ROWS = 10
_SHRINK = 2.0


def rounded(f: Callable[..., Array]) -> Measured:
    """Wrap code whose values have rounding errors only."""

    def measured(*arrays: Array) -> tuple[Array, Array]:
        value = np.asarray(f(*arrays), np.float64)
        return value, np.finfo(np.float64).eps * np.abs(value)

    return measured


def extrapolated_difference(f: Measured, step: Array | float) -> tuple[Array, Array]:
    r"""Differentiate a function of one number at zero.

    $$ T_{i,0} = \frac{f(h_i) - f(-h_i)}{2 h_i}, \quad h_i = \frac{h}{2^i}, \qquad
       T_{i,j} = T_{i,j-1} + \frac{T_{i,j-1} - T_{i-1,j-1}}{4^j - 1} $$

    Each element takes the table entry with the least estimated error: the difference from its neighbours, plus the
    effect of the values' errors on the quotient. Short steps reveal the values' errors if the code is not exact to
    rounding. Steps that leave the domain of f (results that are not finite) are skipped.

    Args:
        f: A function of a shift; it returns values and their errors.
        step: The first step h, a number or an array that broadcasts with the output; f gets the steps as fractions of
            it.

    Returns:
        The derivative and the estimate of its error, in the shape of the output; NaN and infinity if every step leaves
        the domain.

    Source: C. J. F. Ridders, "Accurate computation of F'(x) and F'(x) F''(x)", Advances in Engineering Software 4
    (1982), 75-76.
    """
    table: list[list[Array]] = []
    widths, noises = [], []
    with np.errstate(all="ignore"):
        for i in range(_ROWS):
            fraction = _SHRINK**-i
            (upper, above_error), (lower, below_error) = f(fraction), f(-fraction)
            widths.append(2 * fraction * np.asarray(step, np.float64))
            noises.append(above_error + below_error)
            row = [(upper - lower) / widths[-1]]
            for j, previous in enumerate(table[-1] if table else [], start=1):
                row.append(row[-1] + (row[-1] - previous) / (_SHRINK ** (2 * j) - 1))
            table.append(row)
        unseen = _noise(table, widths)
        best, error = np.full_like(table[0][0], np.nan), np.full_like(table[0][0], np.inf)
        for i in range(1, _ROWS):
            noise = np.maximum(noises[i], unseen) / np.abs(widths[i])
            for j, value in enumerate(table[i][1:], start=1):
                change = np.maximum(np.abs(value - table[i][j - 1]), np.abs(value - table[i - 1][j - 1]))
                estimate = change + noise
                better = np.where(np.isfinite(estimate), estimate, np.inf) < error
                best, error = np.where(better, value, best), np.where(better, estimate, error)
    return best, error


def _noise(table: list[list[Array]], widths: list[Array]) -> Array:
    """Estimate undeclared errors of the values: at short steps, the third column holds nothing else."""
    noise = np.zeros_like(table[0][0])
    for i in range(_ROWS // 2, _ROWS):
        moved = np.abs(table[i][2] - table[i - 1][2]) * np.abs(widths[i])
        noise = np.fmax(noise, np.where(np.isfinite(moved), moved, 0))
    return noise


def jacobian(f: Measured, inputs: tuple[Array, ...], index: int) -> tuple[Array, Array]:
    """Differentiate NumPy code with respect to every element of one input.

    Args:
        f: Function of arrays that returns one array and its error.
        inputs: The point.
        index: Index of the input that is shifted.

    Returns:
        The Jacobian of shape (*output, *input) and the estimate of its error.
    """
    x = inputs[index]
    columns = []
    for place in np.ndindex(x.shape):
        step = first_step(x[place])

        def shifted(fraction: float, place: tuple[int, ...] = place, step: Array = step) -> tuple[Array, Array]:
            moved = x.copy()
            moved[place] += fraction * step
            return f(*inputs[:index], moved, *inputs[index + 1 :])

        columns.append(extrapolated_difference(shifted, step))
    if not columns:
        shape = (*f(*inputs)[0].shape, *x.shape)
        return np.zeros(shape), np.zeros(shape)
    value, error = (np.stack(each, -1) for each in zip(*columns, strict=True))
    shape = (*value.shape[:-1], *x.shape)
    return value.reshape(shape), error.reshape(shape)


def elementwise_derivative(f: Measured, x: Array) -> tuple[Array, Array]:
    """Differentiate an elementwise function at all elements at once; returns value and estimated error."""
    step = first_step(x)
    return extrapolated_difference(lambda fraction: f(x + fraction * step), step)


def first_step(x: Array | float) -> Array:
    """A step over which smooth functions change, exactly representable relative to x."""
    size = 0.1 * np.maximum(np.abs(x), 1.0)
    return np.asarray((x + size) - x)
