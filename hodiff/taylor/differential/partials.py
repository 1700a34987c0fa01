"""Single mixed derivatives, and second derivatives by each coordinate, from series along few lines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from hodiff.common.options import INTS, is_int
from hodiff.common.trees import PyTree, unflatten
from hodiff.derivatives.bound_function import leave_inference_mode
from hodiff.errors import InputError
from hodiff.taylor.differential.operand import Directions, Operand, bound, require_options
from hodiff.taylor.differential.polarization import Plan, combined, directions, interpolated, planned, polarised
from hodiff.torch_internals.compilers.dynamo import at_trace_time


def pure_second_derivatives(
    f: Callable[..., Any],
    argnums: int = 0,
    *,
    batched: bool = False,
    chunk_size: int | None = None,
    correct: bool = True,
) -> Callable[..., PyTree]:
    r"""Function that computes the second derivative with respect to each coordinate, for every output of a function.

    $$ d_{oi} = \frac{\partial^2 f_o}{\partial x_i^2} $$

    Use this function for outputs of any shape, for a batch of points, or for single terms of a Laplacian: one forward
    pass along all coordinates handles all outputs at once, in about two evaluations for each coordinate. Use
    `hodiff.hessian_diagonal` for a scalar that depends on the parameters of a network: it computes Hessian-vector
    products, in reverse mode where that is faster, in groups that fit into memory.

    Args:
        f: As in `hodiff.laplacian`.
        argnums: As in `hodiff.laplacian`.
        batched: As in `hodiff.laplacian`.
        chunk_size: As in `hodiff.laplacian`.
        correct: As in `hodiff.hvp`.

    Returns:
        Function of the arguments of `f` that returns the structure of what `f` returns, with a tree in the structure of
        the argument for each output. The tensors of the tree have the output's shape followed by the leaf's shape at a
        point: `(*out, *leaf)`, or with `batched` `(N, *out, *leaf)`.

    Raises:
        InputError: If an option is unknown, or the argument cannot be differentiated.

    Example:
        >>> import torch, hodiff
        >>> f = lambda x: torch.stack((x.prod(), (x**3).sum()))
        >>> hodiff.taylor.pure_second_derivatives(f)(torch.tensor([1.0, 2.0]))
        tensor([[ 0.,  0.],
                [ 6., 12.]])

    Source: A. Griewank & A. Walther, *Evaluating Derivatives*, 2nd ed., chapter 13.
    """
    require_options("pure_second_derivatives", f, argnums, chunk_size, batched=batched, correct=correct)

    @leave_inference_mode
    def transformed(*args: Any, **kwargs: Any) -> PyTree:
        operand = bound("pure_second_derivatives", f, args, kwargs, argnums, batched=batched, correct=correct)
        found, structure = operand.along_each(operand.units(chunk_size), 2)
        return unflatten([_by_leaves(operand, each) for each in found], structure)

    return transformed


def _by_leaves(operand: Operand, rows: Any) -> PyTree:
    """Split derivatives by direction into a tree in the structure of the argument."""
    parts = rows.movedim(0, -1).split(operand.sizes, -1)
    shaped = [part.reshape(*part.shape[:-1], *shape) for part, shape in zip(parts, operand.shapes, strict=True)]
    return unflatten(shaped, operand.spec)


# An int, or an index.
Coordinate = Any


def partial(
    f: Callable[..., Any],
    coordinates: Sequence[Coordinate] | list[Sequence[Coordinate]],
    argnums: int = 0,
    *,
    batched: bool = False,
    chunk_size: int | None = None,
    correct: bool = True,
) -> Callable[..., PyTree]:
    r"""Function that computes single mixed partial derivatives, of any order, by one forward pass.

    $$ \frac{\partial^3 f}{\partial x_i\, \partial x_j\, \partial x_k} \quad \text{for coordinates } (i, j, k) $$

    They are combinations, with exact rational factors, of derivatives along lines in the space of the coordinates
    named: one line for $\partial^4 / \partial x_i^4$, two for $\partial^2 / \partial x_i \partial x_j$, four for
    $\partial^4 / \partial x_i^2 \partial x_j^2$, $2^{d-1}$ for d different coordinates. Several derivatives share
    lines.

    Args:
        f: As in `hodiff.laplacian`.
        coordinates: A tuple with one coordinate for each differentiation, in any order: an int is the number of an
            entry of the flattened argument, leaf after leaf, and a tuple of ints the index of an entry of a tensor. A
            list of such tuples gives a list of derivatives by one pass. With `batched` they are the coordinates of a
            point.
        argnums: As in `hodiff.laplacian`.
        batched: As in `hodiff.laplacian`.
        chunk_size: How many lines go through `f` at once, which bounds memory; None for all.
        correct: As in `hodiff.hvp`.

    Returns:
        Function of the arguments of `f` that returns the derivative in the structure and shapes of what `f` returns, or
        the list of derivatives.

    Raises:
        InputError: If an option is unknown, the argument cannot be differentiated, or it has no such coordinate.

    Example:
        >>> import torch, hodiff
        >>> x = torch.tensor([1.0, 2.0, 3.0])
        >>> hodiff.partial(lambda x: x[0] ** 2 * x[1] * x[2], (0, 0, 2))(x)
        tensor(4.)
        >>> u_t, u_xx = hodiff.partial(lambda p: torch.exp(-p[0]) * torch.sin(p[1]), [(0,), (1, 1)])(x)
        >>> torch.allclose(u_t, u_xx)  # a solution of the heat equation
        True

    Source: A. Griewank, J. Utke & A. Walther, "Evaluating higher derivative tensors by forward propagation of
    univariate Taylor series", Math. Comp. 69, 2000.
    """
    require_options("partial", f, argnums, chunk_size, batched=batched, correct=correct)
    several = isinstance(coordinates, list)
    asked = [_entries(each) for each in (coordinates if several else [coordinates])]
    names = list(dict.fromkeys(each for entries in asked for each in entries))
    plan = _plan([[names.index(each) for each in entries] for entries in asked])
    orders = [len(entries) for entries in asked]

    @leave_inference_mode
    def transformed(*args: Any, **kwargs: Any) -> PyTree:
        operand = bound("partial", f, args, kwargs, argnums, batched=batched, correct=correct)
        numbers = [_number(operand, each) for each in names]
        found = _partials(operand, plan, orders, directions(operand, plan, numbers, chunk_size))
        return found if several else found[0]

    return transformed


@at_trace_time
def _plan(derivatives: list[list[int]]) -> Plan:
    return planned(derivatives, polarised, interpolated)


def _entries(coordinates: Any) -> tuple[Coordinate, ...]:
    """Return the validated coordinates of one derivative."""
    entries = tuple(coordinates) if isinstance(coordinates, tuple) else ()
    if not entries or not all(is_int(each) or _is_index(each) for each in entries):
        raise InputError(
            "partial: coordinates: expected a tuple of ints or of indices, one for each differentiation, or a list of "
            f"such tuples, got {coordinates!r}; write (i,) for the first derivative by one coordinate."
        )
    return entries


def _is_index(entry: Any) -> bool:
    return isinstance(entry, tuple) and all(map(is_int, entry))


def _number(operand: Operand, entry: Coordinate) -> int:
    """Return the flat index of a coordinate at a point."""
    sizes: tuple[int, ...] = (operand.size,)
    index = (entry,) if isinstance(entry, INTS) else entry
    if not isinstance(entry, INTS):
        if len(operand.leaves) != 1:
            raise InputError(
                f"partial: coordinates: expected ints for an argument of {len(operand.leaves)} tensors, got {entry!r}; "
                "they count entries leaf after leaf."
            )
        sizes = operand.shapes[0]
    if len(index) != len(sizes) or not all(-size <= i < size for i, size in zip(index, sizes, strict=True)):
        point = " at a point" if operand.batched else ""
        shape = operand.shapes[0] if len(operand.leaves) == 1 else operand.shapes
        raise InputError(
            f"partial: coordinates: expected an entry of argument {operand.argnums}, of {operand.size} in shape "
            f"{shape}{point}, got {entry!r}; a list of tuples asks for several derivatives."
        )
    number = 0
    for i, size in zip(index, sizes, strict=True):
        number = number * size + i % size
    return number


def _partials(operand: Operand, plan: Plan, orders: list[int], lines: Iterator[Directions]) -> list[PyTree]:
    """Compute each derivative, given the orders, as the plan's combination of coefficients."""
    order = max(orders, default=1)
    passes = list(operand.passes(lines, order))
    columns: list[list[Any]] = [[] for _ in orders]
    for outputs in zip(*(each.outputs for each in passes), strict=True):
        for k in sorted(set(orders)):
            places = [i for i, each in enumerate(orders) if each == k]
            rows = outputs[0][k] if len(outputs) == 1 else torch.cat([each[k] for each in outputs])
            for i, each in zip(places, combined([plan.terms[i] for i in places], rows), strict=True):
                columns[i].append(each)
    return [unflatten(column, passes[0].structure) for column in columns]
