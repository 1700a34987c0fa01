"""Right-hand side of a differential equation, as a function of the flat leaves of the state's series."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hodiff.common.options import require_callable
from hodiff.common.randomness import RandomState
from hodiff.common.trees import PyTree, describe, leaf_names, unflatten
from hodiff.errors import InputError
from hodiff.taylor.jets import Jet, new_jet, tensor_of
from hodiff.taylor.kept_coefficients import Memory
from hodiff.taylor.passes import framed, primal_leaves, through
from hodiff.taylor.series import Coefficient, RecallRefused

# Taylor coefficients of each leaf of the state.
Columns = list[list[Coefficient]]


@dataclass(frozen=True)
class Field:
    """The function f of y' = f(t, y).

    Attributes:
        caller: The public function, for the error messages.
        f: Function `f(t, y, *args)` as the user wrote it.
        args: Further arguments of f.
        spec: The structure of the state.
        correct: As in `hodiff.hvp`.
        state: Random state at the start of each call of f, so that all calls see one function.
    """

    caller: str
    f: Callable[..., Any]
    args: tuple[Any, ...]
    spec: Any
    correct: bool
    state: RandomState

    def series(self, t: Any, y: Columns, order: int, memory: Memory | None = None) -> Columns:
        """Coefficients of f(t + s, y(s)) in s up to an order, which the coefficients of y reach."""
        self.state.rewind()
        if memory is not None:
            memory.begin()
        with framed(order, correct=self.correct, memory=memory) as frame:
            time = new_jet(frame, [t, torch.ones_like(tensor_of(t)), *[None] * order][: order + 1])
            # A gradient inside f must treat coefficients that depend on each other as independent.
            given = y if memory is not None else [[_apart(each) for each in column] for column in y]
            curves = [new_jet(frame, column[: order + 1]) for column in given]
            found, spec = through(frame, self.f, (time, unflatten(curves, self.spec), *self.args))
        self._require_like_state(y, [column[0] for column in found], spec)
        return found

    def value(self, t: Any, y: Sequence[Any]) -> list[Any]:
        """Value of f, from a series of order 0, so that corrections and the rules' own derivatives apply."""
        return [column[0] for column in self.series(t, [[each] for each in y], 0)]

    def growing(self, t: Any, y: Sequence[Any], slope: Sequence[Any], order: int) -> Columns:
        """Coefficients of the solution through y, given its slope."""
        # Coefficient k of f depends only on the coefficients of y up to k, so each pass is longer by one and finds the
        # next coefficient. It continues from the results of the previous pass.
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
    """Return the field and the leaves of the state."""
    require_callable(caller, f=f)
    leaves, spec = primal_leaves(y0, caller, "y0")
    return Field(caller, f, args, spec, correct, RandomState(map(tensor_of, leaves))), leaves


def time_like(t: Any, leaves: Sequence[Any]) -> Any:
    """Convert a time to a tensor with the precision and device of a state."""
    state = tensor_of(leaves[0])
    if not isinstance(t, (Tensor, Jet)):
        t = torch.as_tensor(t, device="cpu")
    return t.to(device=state.device, dtype=state.dtype.to_real())


def _apart(coefficient: Any) -> Any:
    """Give a coefficient its own node in the graph."""
    recorded = isinstance(coefficient, torch.Tensor) and coefficient.requires_grad
    return coefficient.view_as(coefficient) if recorded else coefficient
