"""Operand of a differential operator: a function at its arguments, and its passes along groups of directions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hodiff.common.module_state import untouched
from hodiff.common.options import require_bools, require_callable, require_int
from hodiff.common.randomness import RandomState
from hodiff.common.trees import describe, unflatten, unit_rows
from hodiff.errors import InputError
from hodiff.recompute.contents import numbers_in, require_same
from hodiff.recompute.reachable import modules_in
from hodiff.taylor.jets import Jet, new_jet, tensor_of
from hodiff.taylor.passes import framed, primal_leaves, through
from hodiff.taylor.plain_tensors import comparison_due, note_compared
from hodiff.taylor.series import Coefficient, Frame, filled
from hodiff.taylor.sparsity import support
from hodiff.torch_internals.autograd.grad_mode import saving_unhooked
from hodiff.torch_internals.autograd.wrapped_tensors import any_holds
from hodiff.torch_internals.tensors import in_trace

# A tensor for each leaf of the argument; its first axis is the axis of directions.
Directions = Sequence[Any]


class Pass(NamedTuple):
    """Coefficients of each output, with zeros instead of None, and the structure of the function's output."""

    outputs: list[Any]
    structure: Any


@dataclass(frozen=True)
class Operand:
    """A function of the leaves of one of its arguments, at a point.

    Attributes:
        caller: The public function, for errors.
        f: The function, keyword arguments bound.
        args: The positional arguments.
        argnums: Which argument is differentiated.
        leaves: The leaves of that argument.
        spec: The structure of that argument.
        batched: Whether the leaves have a leading dimension of points.
        correct: As in `hodiff.hvp`.
    """

    caller: str
    f: Callable[..., Any]
    args: tuple[Any, ...]
    argnums: int
    leaves: list[Any]
    spec: Any
    batched: bool
    correct: bool

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of leaves at one point."""
        return [tuple(leaf.shape[1:] if self.batched else leaf.shape) for leaf in self.leaves]

    @property
    def sizes(self) -> list[int]:
        """Number of coordinates of each leaf at a point."""
        return [torch.Size(shape).numel() for shape in self.shapes]

    @property
    def size(self) -> int:
        """Number of coordinates at a point."""
        return sum(self.sizes)

    @property
    def points(self) -> tuple[int, ...]:
        """Leading shape of the result: (N,) with `batched`, else ()."""
        return tuple(self.leaves[0].shape[:1]) if self.batched else ()

    def spread(self, rows: Tensor) -> list[Tensor]:
        """Directions from flat rows (R, n), the same at all points."""
        found = []
        for part, leaf, shape in zip(rows.split(self.sizes, 1), self.leaves, self.shapes, strict=True):
            plain = tensor_of(leaf)
            part = part.to(plain.device, plain.dtype).reshape(len(rows), *[1] * self.batched, *shape)
            found.append(part.expand(len(rows), *leaf.shape))
        return found

    def units(self, chunk_size: int | None) -> Iterator[list[Tensor]]:
        """Yield the unit directions in groups, and create only one group at a time."""
        for start, stop in groups(self.size, chunk_size):
            device = tensor_of(self.leaves[0]).device
            yield self.spread(unit_rows(start, stop, self.size, torch.get_default_dtype(), device))

    @property
    def may_be_sparse(self) -> bool:
        """Whether a pass in slots is possible: slots have NumPy indices, and need tensors and no compiler."""
        plain = not torch.compiler.is_compiling() and not any(isinstance(leaf, Jet) for leaf in self.leaves)
        return plain and self.size > 0

    def pass_in_slots(self, *, slopes: bool) -> Pass:
        """Collapsed series of order 2 along unit directions, stored where it may be nonzero."""
        with framed(2, self.size, collapsed=True, correct=self.correct, sparse=True) as frame:
            parts, structure = self.through(frame, list(self._in_own_directions(frame)), slots=not slopes)
            outputs = [
                [part[0], filled(frame, part, 1, part[0]) if slopes else None, filled(frame, part, 2, part[0])]
                for part in parts
            ]
        return Pass(outputs, structure)

    def through(self, frame: Frame, jets: list[Jet], *, slots: bool = False) -> tuple[list[list[Coefficient]], Any]:
        """Run the function on jets for the leaves."""
        given = list(self.args)
        given[self.argnums] = unflatten(jets, self.spec)
        return through(frame, self.f, given, slots=slots)

    def _in_own_directions(self, frame: Frame) -> Iterator[Jet]:
        """Yield a jet for each leaf; each coordinate moves in its own direction, with one slot of ones."""
        start = 0
        for leaf, shape, size in zip(self.leaves, self.shapes, self.sizes, strict=True):
            index = np.arange(start, start + size).reshape(1, *[1] * self.batched, *shape)
            yield new_jet(frame, [leaf, torch.ones_like(leaf).unsqueeze(0), None], support(index, self.size))
            start += size

    def passes(self, directions: Iterable[Directions], order: int, *, collapsed: bool = False) -> Iterator[Pass]:
        """Yield the function's series along groups of directions, with one pass for each group."""
        state = RandomState([tensor_of(leaf) for leaf in self.leaves])
        first: list[Tensor] = []
        for i, group in enumerate(directions):
            if i:
                # Every group of directions must see the same random numbers.
                state.rewind()
            none = len(group[0]) == 0
            if none:
                # Without directions, run the function along a direction of zeros and drop it from the result.
                group = [each.new_zeros((1, *each.shape[1:])) for each in group]
            with framed(order, len(group[0]), collapsed=collapsed, correct=self.correct) as frame:
                jets = [
                    new_jet(frame, [leaf, each, *[None] * (order - 1)])
                    for leaf, each in zip(self.leaves, group, strict=True)
                ]
                parts, structure = self.through(frame, jets)
                dense = [[filled(frame, part, k, part[0]) for k in range(order + 1)] for part in parts]
                if not torch.compiler.is_compiling() and not in_trace():
                    values = numbers_in([tensor_of(own[0]) for own in dense])
                    if i:
                        require_same(self.caller, first, values)
                    first = values
                if none:
                    dense = [[each[:0] if frame.has_axis(k) else each for k, each in enumerate(own)] for own in dense]
            yield Pass(dense, structure)

    def along_each(self, directions: Iterable[Directions], order: int, *, scaled: bool = True) -> Pass:
        """Derivative of an order, or its Taylor coefficient, along each direction (R, ...), for each output."""
        scale = math.factorial(order) if scaled else 1
        found: list[list[Any]] = []
        structure: Any = None
        for each in self.passes(directions, order):
            found.append([scale * output[order] for output in each.outputs])
            structure = each.structure
        return Pass([each[0] if len(each) == 1 else torch.cat(each) for each in zip(*found, strict=True)], structure)


def require_options(caller: str, f: Any, argnums: Any, chunk_size: Any = None, **switches: Any) -> None:
    """Raise an error for an invalid option."""
    require_callable(caller, f=f)
    remedy = f"{caller}(f, ...) returns a function of the arguments of f: write {caller}(f, ...)(x)"
    require_int(caller, "argnums", argnums, remedy=remedy)
    require_int(caller, "chunk_size", chunk_size, 1, optional=True)
    require_bools(caller, **switches)


def bound(
    caller: str,
    f: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    argnums: int,
    *,
    batched: bool = False,
    correct: bool = True,
) -> Operand:
    """Return the operand; raise an error if the differentiated argument is not real."""
    if not -len(args) <= argnums < len(args):
        raise InputError(f"{caller}: argnums: expected one of {len(args)} positional arguments, got {argnums}.")
    leaves, spec = primal_leaves(args[argnums], caller, f"argument {argnums}")
    for leaf in leaves:
        if tensor_of(leaf).is_complex() or (batched and leaf.ndim == 0):
            kind = "a real tensor with a leading dimension of points" if batched else "a real tensor"
            raise InputError(f"{caller}: argument {argnums}: expected {kind}, got {describe(tensor_of(leaf))}.")
    function = partial(f, **kwargs) if kwargs else f
    operand = Operand(caller, function, args, argnums, leaves, spec, batched, correct)
    if batched and leaves[0].shape[0] > 1:
        _require_apart(operand)
    return operand


def _require_apart(operand: Operand) -> None:
    """Raise an error if outputs at a point depend on other points: one product, once for each code."""
    due = comparison_due(operand.f, operand.args, ("points", operand.argnums, operand.correct))
    if due is None:
        return
    tensors = [tensor_of(leaf) for leaf in operand.leaves]
    state, count = RandomState(tensors, foreign=True), operand.points[0]
    # Move about half of the points, in no pattern that a function could follow, such as the reversed order.
    moved = torch.frac(torch.arange(count, dtype=torch.float64, device="cpu") * 2**0.5) < 0.5
    moved[-1] = False
    with framed(1, correct=operand.correct) as frame, untouched(modules_in(operand.f)), saving_unhooked():
        jets = [new_jet(frame, [leaf, _some_points(leaf, moved)]) for leaf in operand.leaves]
        parts, _ = operand.through(frame, jets)
    state.rewind()
    for part in parts:
        if part[1] is None:
            continue
        if part[0].shape[:1] != (count,):
            raise InputError(
                f"{operand.caller}: f: expected one row for each of {count} points along dimension 0 with "
                f"batched=True, got {describe(tensor_of(part[0]))}; keep that dimension, or omit batched."
            )
        slopes = tensor_of(part[1]).detach().nan_to_num().abs()
        if not slopes.numel():
            continue
        size = slopes.reshape(count, -1).amax(1)
        if any_holds(size[~moved] > torch.finfo(size.dtype).eps ** 0.5 * size.amax()):
            raise InputError(
                f"{operand.caller}: f: expected outputs that depend only on their own point with batched=True, got "
                "some that depend on other points, such as with batch norm in training mode or means over the batch; "
                "call eval() on the model, or omit batched and differentiate the sum."
            )
    note_compared(due)


def _some_points(leaf: Any, moved: Tensor) -> Tensor:
    """A direction that moves some points, by numbers that do not cancel."""
    plain = tensor_of(leaf)
    numbers = torch.cos(1 + 1.7 * torch.arange(plain.numel(), dtype=torch.float64, device="cpu")).reshape(plain.shape)
    numbers[~moved] = 0
    return numbers.to(plain.device, plain.dtype)


def groups(count: int, chunk_size: int | None) -> Iterator[tuple[int, int]]:
    """Yield groups `(start, stop)` of directions; one empty group if there are no directions."""
    size = chunk_size or max(count, 1)
    for start in range(0, max(count, 1), size):
        yield start, min(start + size, count)


def grouped(directions: Directions, chunk_size: int | None) -> Iterator[list[Any]]:
    """Yield directions in groups."""
    for start, stop in groups(len(directions[0]), chunk_size):
        yield [each[start:stop] for each in directions]
