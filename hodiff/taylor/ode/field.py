"""The right-hand side of an equation, as series see it: flat leaves in and out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hodiff.common.options import require_callable, require_int
from hodiff.common.randomness import RandomState
from hodiff.common.trees import PyTree, describe, leaf_names, unflatten
from hodiff.errors import InputError
from hodiff.taylor.jets import Jet, new_jet, tensor_of
from hodiff.taylor.memory import Memory
from hodiff.taylor.passes import framed, primal_leaves, through
from hodiff.taylor.series import Coefficient, RecallRefused

# For each leaf of the state its Taylor coefficients.
Columns = list[list[Coefficient]]


@dataclass(frozen=True)
class Field:
    """The function f of y' = f(t, y).

    Attributes:
        caller: The public function, for the error messages.
        f: Function `f(t, y, *args)` as the user wrote it.
        args: Its further arguments.
        spec: The structure of the state.
        correct: As in `hodiff.hvp`.
        state: Of random generators, as each call of f finds them, so that all see one function.
    """

    caller: str
    f: Callable[..., Any]
    args: tuple[Any, ...]
    spec: Any
    correct: bool
    state: RandomState

    def series(self, t: Any, y: Columns, order: int, memory: Memory | None = None) -> Columns:
        """The coefficients of f(t + s, y(s)) in s, to an order that those of y reach."""
        self.state.rewind()
        if memory is not None:
            memory.begin()
        with framed(order, correct=self.correct, memory=memory) as frame:
            time = new_jet(frame, [t, torch.ones_like(tensor_of(t)), *[None] * order][: order + 1])
            # Of coefficients that depend on each other a gradient inside is to see each alone.
            given = y if memory is not None else [[_apart(each) for each in column] for column in y]
            curves = [new_jet(frame, column[: order + 1]) for column in given]
            found, spec = through(frame, self.f, (time, unflatten(curves, self.spec), *self.args))
        self._require_like_state(y, [column[0] for column in found], spec)
        return found

    def value(self, t: Any, y: Sequence[Any]) -> list[Any]:
        """F itself, by a series of order 0, so that corrections hold and the rules' own derivatives."""
        return [column[0] for column in self.series(t, [[each] for each in y], 0)]

    def growing(self, t: Any, y: Sequence[Any], slope: Sequence[Any], order: int) -> Columns:
        """The coefficients of the solution through y, whose slope is known."""
        # Coefficient k of f depends on those of y to k alone, so that each pass is longer by one and finds the next. It
        # goes on from what the one before computed.
        columns: Columns = [[value, first] for value, first in zip(y, slope, strict=True)]
        memory: Memory | None = Memory()
        for k in range(1, order):
            try:
                terms = self.series(t, columns, k, memory)
            except RecallRefused:
                memory = None
                terms = self.series(t, columns, k)
            for column, found in zip(columns, terms, strict=True):
                column.append(None if found[k] is None else found[k] / (k + 1))
        return columns

    def _require_like_state(self, y: Columns, found: Sequence[Any], spec: Any) -> None:
        if spec != self.spec:
            raise InputError(
                f"{self.caller}: f: expected a result in the structure of y0, {self.spec}, got {spec}; "
                "f takes (t, y, *args) and returns the derivative of y."
            )
        names = leaf_names(unflatten([tensor_of(each) for each in found], spec))
        for name, column, each in zip(names, y, found, strict=True):
            state, got = tensor_of(column[0]), tensor_of(each)
            if got.shape != state.shape or got.dtype != state.dtype:
                raise InputError(
                    f"{self.caller}: f: expected a result{name} like y0{name}, {describe(state)}, got {describe(got)}; "
                    "f takes (t, y, *args) and returns the derivative of y."
                )


def bound_field(
    caller: str, f: Callable[..., Any], y0: PyTree, args: tuple[Any, ...], correct: bool
) -> tuple[Field, list[Any]]:
    """The field, and the leaves of the state."""
    require_callable(caller, f=f)
    leaves, spec = primal_leaves(y0, caller, "y0")
    return Field(caller, f, args, spec, correct, RandomState(map(tensor_of, leaves))), leaves


def time_like(t: Any, leaves: Sequence[Any]) -> Any:
    """A time as a tensor with the precision and on the device of a state."""
    state = tensor_of(leaves[0])
    if not isinstance(t, (Tensor, Jet)):
        t = torch.as_tensor(t)
    return t.to(device=state.device, dtype=state.dtype.to_real())


def require_order(caller: str, order: Any, least: int, *, optional: bool = False) -> None:
    """Refuse what is no order of a series."""
    require_int(caller, "order", order, least, optional=optional)


def _apart(coefficient: Any) -> Any:
    """A coefficient as a node of its own in the graph."""
    recorded = isinstance(coefficient, torch.Tensor) and coefficient.requires_grad
    return coefficient.view_as(coefficient) if recorded else coefficient
