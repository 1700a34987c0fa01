"""Result of an integration: states at the requested times, and the series of each step."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hodiff.common.trees import PyTree, describe, unflatten
from hodiff.errors import InputError
from hodiff.taylor.jets import Jet, tensor_of
from hodiff.taylor.ode.field import Columns, time_like
from hodiff.taylor.series import Coefficient


@dataclass(frozen=True)
class Step:
    """The series of a step.

    Attributes:
        start: Start of the step, relative to the first time.
        size: Size of the step; negative backwards.
        order: Order of the series.
        columns: Coefficients of each leaf of the state; empty if they are not kept.
    """

    start: float
    size: float
    order: int
    columns: Columns = field(repr=False)


@dataclass(frozen=True)
class OdeSolution:
    """The solution of an ordinary differential equation by Taylor series.

    Attributes:
        t: The times, (T,).
        y: The states there, in the structure of y0, each leaf with a leading dimension T.
        step_sizes: The sizes of all steps; negative backwards.
        orders: The orders of their series.
        rejected: Number of steps that were tried and shortened.
        evaluations: Number of calls of f: one for each coefficient of a series, and one for each step tried.
    """

    t: torch.Tensor
    y: PyTree = field(repr=False)
    step_sizes: list[float] = field(repr=False)
    orders: list[int] = field(repr=False)
    rejected: int
    evaluations: int
    _steps: list[Step] = field(repr=False)
    _spec: Any = field(repr=False)

    @property
    def steps(self) -> int:
        """Number of steps taken."""
        return len(self.step_sizes)

    def __call__(self, t: torch.Tensor) -> PyTree:
        """Evaluate the state at times between the first and the last, by the series of the steps.

        Args:
            t: Times of any shape.

        Returns:
            The states, in the structure of y0, with the dimensions of `t` before those of each leaf.

        Raises:
            InputError: If a time is outside, or the series were not kept.
        """
        if not self._steps or not self._steps[0].columns:
            raise InputError(
                "OdeSolution: expected a solution with its steps; call odeint_taylor(..., full_output=True)."
            )
        time = time_like(t, [column[0] for column in self._steps[0].columns])
        first = tensor_of(self.t[0])
        last = self._steps[-1].start + self._steps[-1].size
        places = (tensor_of(time).detach() - first.detach()).reshape(-1).tolist()
        low, high = sorted((0.0, last))
        slack = 1e-6 * (high - low)
        if not all(low - slack <= place <= high + slack for place in places):
            start = float(first)
            raise InputError(
                f"OdeSolution: t: expected times between {start + low:g} and {start + high:g}, "
                f"got {describe(tensor_of(time))} with times outside; integrate over a longer interval."
            )
        found = at_places(self._steps, time.reshape(-1) - self.t[0], places)
        shape = tuple(time.shape)
        return unflatten([each.reshape(*shape, *each.shape[1:]) for each in found], self._spec)


def at_places(steps: Sequence[Step], offsets: Any, places: Sequence[float]) -> list[Any]:
    """Evaluate each leaf at times relative to the first, given both as a tensor and as numbers."""
    sign = -1 if steps[0].size < 0 else 1
    starts = [sign * step.start for step in steps]
    groups: dict[int, list[int]] = {}
    for i, place in enumerate(places):
        groups.setdefault(max(bisect_right(starts, sign * place) - 1, 0), []).append(i)
    parts = [evaluate(steps[number].columns, offsets[rows] - steps[number].start) for number, rows in groups.items()]
    order = torch.tensor([i for rows in groups.values() for i in rows], device="cpu").argsort()
    return [torch.cat(pieces)[order.to(offsets.device)] for pieces in zip(*parts, strict=True)]


def evaluate(columns: Columns, s: Any) -> list[Any]:
    """Evaluate each leaf's polynomial at a number, or at times (T,), which become the first dimension."""
    return [horner(column, s) for column in columns]


def horner(column: Sequence[Coefficient], s: Any) -> Any:
    """Evaluate a polynomial by Horner's rule."""
    value = column[0]
    if isinstance(s, (torch.Tensor, Jet)):
        s = s.reshape(-1, *[1] * value.ndim)
        total = torch.zeros_like(s) * torch.zeros_like(value)
    else:
        total = torch.zeros_like(value)
    for coefficient in reversed(column):
        total = total * s
        if coefficient is not None:
            total = total + coefficient
    return total


def slopes(columns: Columns) -> Columns:
    """The coefficients of the derivative."""
    return [
        [None if each is None else k * each for k, each in enumerate(column[1:], start=1)] or [None]
        for column in columns
    ]
