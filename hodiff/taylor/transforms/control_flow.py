"""torch's control flow operators in eager code, as plain Python that takes jets and tensors.

A predicate depends on the value alone, like a Python branch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from hodiff.errors import InputError
from hodiff.taylor.jets import Jet, tensor_of
from hodiff.taylor.running import is_running, knowing_no_jets
from hodiff.torch_internals.autograd.func_calls import linearize_of
from hodiff.torch_internals.autograd.wrapped_tensors import below_derivatives, is_batched


def cond(pred: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Sequence[Any] = ()) -> Any:
    """Run the branch that is taken; in a batch or in a graph, run both branches and select by the predicate."""
    if not _varies(pred):
        return true_fn(*operands) if pred else false_fn(*operands)
    taken, spec = pytree.tree_flatten(true_fn(*operands))
    other, _ = pytree.tree_flatten(false_fn(*operands))
    choice = tensor_of(pred).reshape(())
    return pytree.tree_unflatten([torch.where(choice, a, b) for a, b in zip(taken, other, strict=True)], spec)


def while_loop(cond_fn: Callable[..., Any], body_fn: Callable[..., Any], carried_inputs: Any) -> Any:
    """Run a loop; all rows of a batch take the same number of steps."""
    carried = tuple(carried_inputs)
    while True:
        goes_on = cond_fn(*carried)
        if _varies(goes_on):
            raise InputError(
                "jet: while_loop: cond_fn: expected one answer that is known when f is called, got one for each row "
                "of torch.func.vmap, or for each run of compiled code: run a fixed number of steps and freeze "
                "finished rows with torch.where."
            )
        if not goes_on:
            return carried
        carried = tuple(body_fn(*carried))


def scan(
    combine_fn: Callable[..., Any],
    init: Any,
    xs: Any = None,
    *,
    dim: int = 0,
    reverse: bool = False,
    length: int | None = None,
) -> tuple[Any, Any]:
    """Run a loop along a dimension, or for a number of steps, that carries a state and stacks its outputs."""
    has_rows = any(each is not None for each in pytree.tree_leaves(xs))
    if not has_rows and length is None:
        return init, []
    if length is not None and (type(length) is not int or length < 0):
        raise InputError(f"jet: scan: length: expected a number of steps, got {length!r}.")
    steps = _slices(xs, dim, reverse) if has_rows else [None] * (length or 0)
    if length not in (None, len(steps)):
        raise InputError(f"jet: scan: length: expected {len(steps)}, the size of xs along dim={dim}, got {length}.")
    carry, rows = init, []
    for x in steps:
        carry, row = combine_fn(carry, x)
        rows.append(row)
    if rows:
        return carry, _stacked(rows, dim, reverse)
    # Without steps, run one step on zeros to find the structure of the outputs.
    _, row = combine_fn(init, pytree.tree_map(lambda each: _zero_row(each, dim), xs) if has_rows else None)
    none_of_them = pytree.tree_map(
        lambda each: None if each is None else each.narrow(dim, 0, 0), _stacked([row], dim, reverse)
    )
    return init, none_of_them


def refuse_jets(tree: Any) -> None:
    """Raise an error for jets that torch would take for constants, as operators bound before hodiff's import do."""
    if is_running() and any(isinstance(each, Jet) for each in pytree.tree_leaves(tree)):
        raise TypeError("all leaves must be a Tensor")


def linearize(function: Callable[..., Any], *primals: Any) -> Any:
    """`torch.func.linearize` of tensors alone: its trace would keep the values of jets as constants."""
    refuse_jets(primals)
    with knowing_no_jets():
        return linearize_of(function, *primals)


def associative_scan(
    combine_fn: Callable[..., Any], xs: Any, dim: int, reverse: bool = False, *_: Any, **__: Any
) -> Any:
    """Combine each element with the result before it, and stack the results."""
    if not (rows := _slices(xs, dim, reverse)):
        return xs
    first, *rest = rows
    rows = [first]
    for x in rest:
        rows.append(combine_fn(rows[-1], x))
    return _stacked(rows, dim, reverse)


def map(f: Callable[..., Any], xs: Any, *args: Any) -> Any:
    """Run a loop over the first dimension, and stack the results."""
    rows = _slices(xs, 0, reverse=False)
    if not rows:
        raise InputError("jet: map: xs: expected at least one row, got none.")
    return _stacked([f(x, *args) for x in rows], 0, reverse=False)


def _varies(pred: Any) -> bool:
    """Whether a predicate may differ between rows of a batch, or between runs of a graph."""
    value = tensor_of(pred)
    if torch.compiler.is_compiling():
        return isinstance(value, torch.Tensor)
    return isinstance(value, torch.Tensor) and is_batched(below_derivatives(value))


def _slices(xs: Any, dim: int, reverse: bool) -> list[Any]:
    leaves, spec = pytree.tree_flatten(xs)
    rows = [pytree.tree_unflatten(list(row), spec) for row in zip(*(each.unbind(dim) for each in leaves), strict=True)]
    return rows[::-1] if reverse else rows


def _zero_row(x: Any, dim: int) -> Any:
    """Row of zeros, in the shape of the rows of an empty x."""
    return x.sum(dim)


def _stacked(rows: list[Any], dim: int, reverse: bool) -> Any:
    """Stack the leaves of trees of equal structure along the dimension of the loop."""

    def joined(*leaves: Any) -> Any:
        if leaves[0] is None:
            return None
        where = dim if dim <= leaves[0].ndim else 0
        return torch.stack(leaves[::-1] if reverse else leaves, where)

    return pytree.tree_map(joined, *rows)
