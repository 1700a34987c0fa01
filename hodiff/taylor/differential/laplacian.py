"""The Laplacian, and weighted sums of second derivatives, by collapsed jets of order 2."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from hodiff.common.options import require_bools, require_callable, require_int
from hodiff.common.randomness import RandomState
from hodiff.common.trees import PyTree, describe, flatten, unflatten
from hodiff.derivatives.bound_function import leave_inference_mode
from hodiff.errors import InputError
from hodiff.taylor.jets import Jet, tensor_of
from hodiff.taylor.passes import framed, primal_leaves, through
from hodiff.taylor.series import Coefficient, Frame, filled, plus
from hodiff.taylor.sparsity import support


def laplacian(
    f: Callable[..., Any],
    argnums: int = 0,
    *,
    weights: PyTree = None,
    batched: bool = False,
    chunk_size: int | None = None,
    sparse: bool = True,
    correct: bool = True,
) -> Callable[..., PyTree]:
    r"""Function that computes the Laplacian of each output of a function, by one pass forward.

    $$ \Delta f(x) = \sum_i \frac{\partial^2 f}{\partial x_i^2}, \qquad \text{or} \qquad
       \operatorname{tr}(C\, \nabla^2 f(x)) = \sum_r D^2 f(x)[w_r, w_r], \quad C = \sum_r w_r w_r^\top $$

    Value, first derivatives in all directions and the *sum* of the second ones go through `f` together (a collapsed
    jet), in about the time of the gradient in each direction. Nothing of the Hessian's size is stored. The result can
    be differentiated, so that a network can be trained by it, and works inside `torch.func` transforms and
    `torch.compile(fullgraph=True)`. The Laplacian of a Laplacian is the bilaplacian.

    Args:
        f: Function that returns a tensor, or a pytree of tensors, of any shape.
        argnums: Which positional argument to differentiate: a tensor, or a pytree of real tensors.
        weights: The directions $w_r$ that span C, in the structure of the argument, with one leading dimension for them
            all; None for the unit ones, and so for the Laplacian.
        batched: Whether the argument has a leading dimension of points, N, at each of which `f` computes an entry of
            its own: `f` maps (N, D) to (N, ...). The Laplacian is then that of each point, of the shape of the output.
        chunk_size: How many directions go through `f` at once, which bounds memory; None for all.
        sparse: Whether first derivatives that are zero because of how `f` is built are left out, as those of the
            features of one particle by the coordinates of another; of all directions at once, and not within
            `torch.compile`. The result is the same.
        correct: As in `hodiff.hvp`.

    Returns:
        Function of the arguments of `f` that returns the Laplacian in the structure and shapes of what `f` returns.

    Raises:
        InputError: If an option is unknown, the argument cannot be differentiated, or weights do not match it.

    Example:
        >>> import torch, hodiff
        >>> hodiff.laplacian(lambda x: (x**3).sum() + x.prod())(torch.tensor([1.0, 2.0]))
        tensor(18.)

    Source: F. Dangel et al., "Collapsing Taylor mode automatic differentiation", 2025, section 3; R. Li et al., "A
    computational framework for neural network-based variational Monte Carlo with Forward Laplacian", 2024.
    """
    _require_options("laplacian", f, argnums, batched, chunk_size, sparse, correct)

    @leave_inference_mode
    def transformed(*args: Any, **kwargs: Any) -> PyTree:
        function = partial(f, **kwargs) if kwargs else f
        found, spec, _ = _second_order(
            "laplacian", function, argnums, args, weights, batched, chunk_size, sparse, correct, slopes=False
        )
        return unflatten([each[2] for each in found], spec)

    return transformed


def value_grad_laplacian(
    f: Callable[..., Any],
    argnums: int = 0,
    *,
    batched: bool = False,
    chunk_size: int | None = None,
    sparse: bool = True,
    correct: bool = True,
) -> Callable[..., tuple[Any, PyTree, Any]]:
    r"""Function that computes value, gradient and Laplacian of a scalar function, for the price of the Laplacian.

    Args:
        f: Function that returns a tensor of shape `()`, or with `batched` of shape (N,).
        argnums: As in `hodiff.laplacian`.
        batched: As in `hodiff.laplacian`.
        chunk_size: As in `hodiff.laplacian`.
        sparse: As in `hodiff.laplacian`.
        correct: As in `hodiff.hvp`.

    Returns:
        Function of the arguments of `f` that returns the triple (value, gradient, Laplacian), the gradient in the
        structure and shapes of the argument.

    Raises:
        InputError: As by `hodiff.laplacian`, or if `f` returns anything else.

    Example:
        >>> import torch, hodiff
        >>> hodiff.taylor.value_grad_laplacian(lambda x: (x**3).sum())(torch.tensor([1.0, 2.0]))
        (tensor(9.), tensor([ 3., 12.]), tensor(18.))

    Source: As of `hodiff.laplacian`.
    """
    _require_options("value_grad_laplacian", f, argnums, batched, chunk_size, sparse, correct)

    @leave_inference_mode
    def transformed(*args: Any, **kwargs: Any) -> tuple[Any, PyTree, Any]:
        function = partial(f, **kwargs) if kwargs else f
        found, _, (leaves, leaf_spec) = _second_order(
            "value_grad_laplacian", function, argnums, args, None, batched, chunk_size, sparse, correct
        )
        shape = tuple(leaves[0].shape[:1]) if batched else ()
        if len(found) != 1 or tuple(found[0][0].shape) != shape:
            got = ", ".join(str(tuple(each[0].shape)) for each in found)
            raise InputError(
                f"value_grad_laplacian: f: expected an output of shape {shape}, got {got}; "
                "hodiff.laplacian takes outputs of any shape."
            )
        value, slopes, total = found[0]
        return value, unflatten(_gradient(slopes, leaves, batched), leaf_spec), total

    return transformed


def _require_options(
    caller: str, f: Any, argnums: Any, batched: Any, chunk_size: Any, sparse: Any, correct: Any
) -> None:
    require_callable(caller, f=f)
    require_int(caller, "argnums", argnums)
    require_int(caller, "chunk_size", chunk_size, 1, optional=True)
    require_bools(caller, batched=batched, sparse=sparse, correct=correct)


def _second_order(
    caller: str,
    f: Callable[..., Any],
    argnums: int,
    args: tuple[Any, ...],
    weights: PyTree,
    batched: bool,
    chunk_size: int | None,
    sparse: bool,
    correct: bool,
    *,
    slopes: bool = True,
) -> tuple[list[tuple[Any, Any, Any]], Any, tuple[list[Any], Any]]:
    """Of each output value, derivatives by direction and Laplacian; the structures of output and argument."""
    if not -len(args) <= argnums < len(args):
        raise InputError(f"{caller}: argnums: expected one of {len(args)} positional arguments, got {argnums}.")
    leaves, spec = primal_leaves(args[argnums], caller, f"argument {argnums}")
    for leaf in leaves:
        if tensor_of(leaf).is_complex() or (batched and leaf.ndim == 0):
            kind = "a real tensor with a leading dimension of points" if batched else "a real tensor"
            raise InputError(f"{caller}: argument {argnums}: expected {kind}, got {describe(tensor_of(leaf))}.")
    if sparse and weights is None and chunk_size is None and _may_be_sparse(leaves):
        with framed(2, sum(_sizes(leaves, batched)), collapsed=True, correct=correct, sparse=True) as frame:
            given = list(args)
            given[argnums] = unflatten(_unit_jets(frame, leaves, batched), spec)
            parts, structure = through(frame, f, given, slots=not slopes)
            found = [_filled(frame, part) if slopes else part for part in parts]
        return [_scaled(part) for part in found], structure, (leaves, spec)
    directions = (
        _unit_directions(leaves, batched) if weights is None else _given_directions(caller, weights, leaves, spec)
    )
    count = len(directions[0]) if directions else 0
    state = RandomState([tensor_of(leaf) for leaf in leaves])
    found: list[list[Coefficient]] = []
    structure: Any = None
    for start in range(0, max(count, 1), chunk_size or max(count, 1)):
        if start:
            # Every group of directions goes through the same function.
            state.rewind()
        chunk = [each[start : start + (chunk_size or count)] for each in directions]
        with framed(2, len(chunk[0]), collapsed=True, correct=correct) as frame:
            jets = [Jet(frame, [leaf, each, None]) for leaf, each in zip(leaves, chunk, strict=True)]
            given = list(args)
            given[argnums] = unflatten(jets, spec)
            parts, structure = through(frame, f, given)
            parts = [_filled(frame, part) for part in parts]
        found = parts if not found else [_joined(old, new) for old, new in zip(found, parts, strict=True)]
    return [_scaled(part) for part in found], structure, (leaves, spec)


def _filled(frame: Frame, part: list[Coefficient]) -> list[Coefficient]:
    """With zeros for no first derivatives."""
    return [part[0], filled(frame, part, 1, part[0]), part[2]]


def _scaled(part: list[Coefficient]) -> tuple[Any, Any, Any]:
    """Derivatives of coefficients, which are those of t^k."""
    value, first, second = part
    return value, first, torch.zeros_like(value) if second is None else 2 * second


def _may_be_sparse(leaves: list[Any]) -> bool:
    return not torch.compiler.is_compiling() and not any(isinstance(leaf, Jet) for leaf in leaves)


def _sizes(leaves: list[Any], batched: bool) -> list[int]:
    """The number of coordinates of each leaf."""
    return [torch.Size(leaf.shape[1:] if batched else leaf.shape).numel() for leaf in leaves]


def _unit_jets(frame: Frame, leaves: list[Any], batched: bool) -> list[Jet]:
    """Each coordinate as the only one that moves in its own direction: one slot, in which all are 1."""
    found, start = [], 0
    for leaf, size in zip(leaves, _sizes(leaves, batched), strict=True):
        shape = (1, *([1] if batched else []), *(leaf.shape[1:] if batched else leaf.shape))
        index = np.arange(start, start + size).reshape(shape)
        slot = torch.ones_like(tensor_of(leaf)).unsqueeze(0)
        found.append(Jet(frame, [leaf, slot, None], support(index, frame.directions or 0)))
        start += size
    return found


def _joined(old: list[Coefficient], new: list[Coefficient]) -> list[Coefficient]:
    """Of two groups of directions."""
    return [old[0], torch.cat((old[1], new[1])), plus(old[2], new[2])]


def _unit_directions(leaves: list[Any], batched: bool) -> list[Any]:
    """For each leaf the unit directions of all, those of the other leaves zero; at all points at once."""
    shapes = [tuple(leaf.shape[1:] if batched else leaf.shape) for leaf in leaves]
    sizes = _sizes(leaves, batched)
    found, start = [], 0
    for leaf, shape, size in zip(leaves, shapes, sizes, strict=True):
        plain = tensor_of(leaf)
        rows = torch.zeros(sum(sizes), size, dtype=plain.dtype, device=plain.device)
        rows[start : start + size] = torch.eye(size, dtype=plain.dtype, device=plain.device)
        rows = rows.reshape(sum(sizes), *([1] if batched else []), *shape)
        found.append(rows.expand(sum(sizes), *leaf.shape))
        start += size
    return found


def _given_directions(caller: str, weights: PyTree, leaves: list[Any], spec: Any) -> list[Any]:
    given, given_spec = flatten(weights)
    if given_spec != spec:
        raise InputError(f"{caller}: weights: expected the structure of the argument, {spec}, got {given_spec}.")
    counts = {len(each) if getattr(each, "ndim", 0) else 0 for each in given}
    for each, leaf in zip(given, leaves, strict=True):
        if tuple(getattr(each, "shape", ()))[1:] != tuple(leaf.shape) or len(counts) != 1 or each.dtype != leaf.dtype:
            expected = f"(R, {', '.join(map(str, leaf.shape))}) {str(leaf.dtype)[6:]}"
            raise InputError(
                f"{caller}: weights: expected {expected}, a direction a row and as many for each leaf, "
                f"got {describe(each)}."
            )
    return given


def _gradient(slopes: Any, leaves: list[Any], batched: bool) -> list[Any]:
    """The derivatives by direction, sorted to the leaves."""
    # Points stand behind the directions, and before the coordinates.
    rows = slopes.movedim(0, -1) if batched else slopes
    sizes = _sizes(leaves, batched)
    return [part.reshape(leaf.shape) for part, leaf in zip(rows.split(sizes, -1), leaves, strict=True)]
