"""Right-hand side of a differential equation, as a function of the flat leaves of the state's series."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
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
from hodiff.torch_internals.autograd.wrapped_tensors import is_batched_by_any, numbers_in

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
        values = [column[0] for column in found]
        require_like_state(self.caller, self.spec, [column[0] for column in y], values, spec)
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


def _outline(spec: Any) -> str:
    """Write a structure with its keys in their order, and a dot for each leaf."""
    return str(spec.unflatten(["·"] * spec.num_leaves)).replace("'·'", "·")


def require_like_state(caller: str, spec: Any, y: Sequence[Any], found: Sequence[Any], found_spec: Any) -> None:
    """Raise if a result of f does not match the state."""
    if found_spec != spec:
        raise InputError(
            f"{caller}: f: expected a result in the structure of y0, {_outline(spec)}, got {_outline(found_spec)}; "
            "f takes (t, y, *args) and returns the derivative of y."
        )
    for i, (state, each) in enumerate(zip(map(tensor_of, y), map(tensor_of, found), strict=True)):
        if not isinstance(each, Tensor) or each.shape != state.shape or each.dtype != state.dtype:
            name = leaf_names(unflatten(list(y), spec))[i]
            raise InputError(
                f"{caller}: f: expected a result{name} like y0{name}, {describe(state)}, got {describe(each)}; "
                "f takes (t, y, *args) and returns the derivative of y, in tensors such as torch.ones_like(y)."
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


def require_times(caller: str, t: Any, leaves: Sequence[Any]) -> tuple[Any, list[float]]:
    """Validate the times; return them in the state's dtype, and their signed distances from the first time."""
    if not isinstance(t, (Tensor, Jet)) or t.ndim != 1 or not len(t) or tensor_of(t).is_complex():
        got = describe(t) if isinstance(t, Tensor) else type(t).__name__
        raise InputError(f"{caller}: t: expected a tensor of times (T,), beginning with the time of y0, got {got}.")
    times = time_like(t, leaves)
    if is_batched_by_any(tensor_of(times)):
        raise InputError(
            f"{caller}: t: expected no torch.func.vmap over the times, because step sizes depend on them; "
            "integrate over all times at once."
        )
    places = numbers_in(tensor_of(times)).astype("float64")
    distances = (places - places[0]).tolist()
    sign = -1.0 if distances[-1] < 0 else 1.0
    steps = [sign * (b - a) for a, b in pairwise(distances)]
    if not all(math.isfinite(each) for each in distances) or not all(step > 0 for step in steps):
        at = next((i for i, step in enumerate(steps) if not step > 0), 0)
        raise InputError(
            f"{caller}: t: expected finite times that increase, or decrease, strictly, got "
            f"{places[at]:g} and {places[min(at + 1, len(places) - 1)]:g} at {at} and {at + 1}; "
            "sort the times, and remove duplicates."
        )
    return times, distances


def _apart(coefficient: Any) -> Any:
    """Give a coefficient its own node in the graph."""
    recorded = isinstance(coefficient, torch.Tensor) and coefficient.requires_grad
    return coefficient.view_as(coefficient) if recorded else coefficient
