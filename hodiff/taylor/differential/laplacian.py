"""The Laplacian, and weighted sums of second derivatives, by collapsed jets of order 2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hodiff.common.trees import PyTree, describe, flatten, unflatten
from hodiff.derivatives.bound_function import leave_inference_mode
from hodiff.errors import InputError
from hodiff.taylor.differential.operand import Operand, bound, grouped, require_options
from hodiff.taylor.differential.random_directions import estimate, sampled, sampling_of


def laplacian(
    f: Callable[..., Any],
    argnums: int = 0,
    *,
    weights: PyTree = None,
    batched: bool = False,
    randomised: str | None = None,
    samples: int = 16,
    generator: torch.Generator | None = None,
    chunk_size: int | None = None,
    sparse: bool = True,
    correct: bool = True,
) -> Callable[..., Any]:
    r"""Function that computes the Laplacian of each output of a function, in one forward pass.

    $$ \Delta f(x) = \sum_i \frac{\partial^2 f}{\partial x_i^2}, \qquad \text{or} \qquad
       \operatorname{tr}(C\, \nabla^2 f(x)) = \sum_r D^2 f(x)[w_r, w_r], \quad C = \sum_r w_r w_r^\top $$

    Value, first derivatives in all directions and the *sum* of second derivatives go through `f` together (a collapsed
    jet), in about the time of a gradient for each direction. Nothing of the Hessian's size is stored. The result can
    be differentiated, so that a network can be trained by it, and works inside `torch.func` transforms and
    `torch.compile(fullgraph=True)`.

    In very many dimensions `randomised` takes the mean of $D^2 f(x)[v, v]$ over random directions, and estimates
    its standard error. The expectation is the Laplacian for directions with mean 0 and covariance I:

    | `randomised` | directions | without error for |
    |---|---|---|
    | `"rademacher"` | signs | a diagonal Hessian |
    | `"gaussian"` | standard normal numbers | nothing |
    | `"coordinates"` | $\sqrt n\, e_i$, of different i | a constant diagonal, or n samples |

    With `batched` each point draws its own directions, so that the errors at different points are independent. Under
    `torch.func.vmap` pass `randomness="different"` or `"same"` to it; in `torch.compile` pass no generator.

    Args:
        f: Function that returns a tensor, or a pytree of tensors, of any shape.
        argnums: Which positional argument to differentiate: a tensor, or a pytree of real tensors.
        weights: Directions $w_r$ that define C, in the structure of the argument, with a leading dimension R.
            With `batched`, (R, N, D) for each point, or (R, D) for all points. None for unit directions, which give the
            Laplacian.
        batched: Whether the argument has a leading dimension of N points, which `f` does not mix: `f` maps (N, D) to
            (N, ...). The Laplacian is then computed at each point, in the shape of the output.
        randomised: Distribution of the random directions: "rademacher", "gaussian", or "coordinates", drawn without
            replacement; None for the exact sum. With `weights` the random numbers are the factors of $w_r$.
        samples: Number of random directions.
        generator: Random number generator; torch's default if None.
        chunk_size: How many directions go through `f` at once, which bounds memory; None for all.
        sparse: Whether to skip first derivatives that are zero for any numbers because of the structure of `f`, such as
            one particle's features by another's coordinates. The result is the same up to rounding. It has no
            effect together with `weights`, `randomised` or `chunk_size`, and inside of `torch.compile`.
        correct: As in `hodiff.hvp`.

    Returns:
        Function of the arguments of `f` that returns the Laplacian in the structure and shapes of what `f` returns;
        with `randomised` a `hodiff.taylor.RandomisedEstimate` of it.

    Raises:
        InputError: If an option is unknown, the argument cannot be differentiated, or weights do not match it; with
            `batched`, if the output at a point depends on other points, as by batch norm in training mode.
        RouteError: If `f` has another value in Taylor mode than for tensors, because its code tests exact types.

    Example:
        >>> import torch, hodiff
        >>> hodiff.laplacian(lambda x: (x**3).sum() + x.prod())(torch.tensor([1.0, 2.0]))
        tensor(18.)
        >>> many, source = torch.ones(100_000), torch.Generator().manual_seed(0)
        >>> found = hodiff.laplacian(lambda x: x.square().mean(), randomised="rademacher", generator=source)(many)
        >>> round(found.value.item(), 4), round(found.standard_error.item(), 4)
        (2.0, 0.0)

    Source: F. Dangel et al., "Collapsing Taylor mode automatic differentiation", 2025, section 3; R. Li et al., "A
    computational framework for neural network-based variational Monte Carlo with Forward Laplacian", 2024; at random
    Z. Shi, Z. Hu, M. Lin & K. Kawaguchi, "Stochastic Taylor derivative estimator", NeurIPS 2024.
    """
    require_options("laplacian", f, argnums, chunk_size, batched=batched, sparse=sparse, correct=correct)
    sampling = sampling_of("laplacian", randomised, samples, generator)

    @leave_inference_mode
    def transformed(*args: Any, **kwargs: Any) -> Any:
        operand = bound("laplacian", f, args, kwargs, argnums, batched=batched, correct=correct)
        given = None if weights is None else _given_directions(operand, weights)
        if sampling is None:
            found, spec = _second_order(operand, given, chunk_size, sparse, slopes=False)
            return unflatten([each[2] for each in found], spec)
        sample = sampled(operand, sampling, given)
        terms, spec = operand.along_each(grouped(sample.directions, chunk_size), 2)
        return estimate(terms, spec, sample)

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
    r"""Function that computes value, gradient and Laplacian of a scalar function, at the cost of the Laplacian.

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
        InputError: As by `hodiff.laplacian`, or if the output of `f` has another shape.

    Example:
        >>> import torch, hodiff
        >>> hodiff.taylor.value_grad_laplacian(lambda x: (x**3).sum())(torch.tensor([1.0, 2.0]))
        (tensor(9.), tensor([ 3., 12.]), tensor(18.))

    Source: As in `hodiff.laplacian`.
    """
    require_options("value_grad_laplacian", f, argnums, chunk_size, batched=batched, sparse=sparse, correct=correct)

    @leave_inference_mode
    def transformed(*args: Any, **kwargs: Any) -> tuple[Any, PyTree, Any]:
        operand = bound("value_grad_laplacian", f, args, kwargs, argnums, batched=batched, correct=correct)
        found, _ = _second_order(operand, None, chunk_size, sparse)
        if len(found) != 1 or tuple(found[0][0].shape) != operand.points:
            got = ", ".join(str(tuple(each[0].shape)) for each in found)
            raise InputError(
                f"value_grad_laplacian: f: expected an output of shape {operand.points}, got {got}; "
                "hodiff.laplacian takes outputs of any shape."
            )
        value, slopes, total = found[0]
        return value, unflatten(_gradient(slopes, operand), operand.spec), total

    return transformed


def _second_order(
    operand: Operand, directions: list[Any] | None, chunk_size: int | None, sparse: bool, *, slopes: bool = True
) -> tuple[list[list[Any]], Any]:
    """Value, derivatives by direction (if requested) and Laplacian of each output; the structure of the output."""
    found: list[list[Any]] = []
    structure: Any = None
    if sparse and directions is None and chunk_size is None and operand.may_be_sparse:
        passes = iter([operand.pass_in_slots(slopes=slopes)])
    else:
        given = operand.units(chunk_size) if directions is None else grouped(directions, chunk_size)
        passes = operand.passes(given, 2, collapsed=True)
    for each in passes:
        found = [_joined(*pair) for pair in zip(found, each.outputs, strict=True)] if found else each.outputs
        structure = each.structure
    # The coefficient of t^2 is half of the second derivative.
    return [[value, first, 2 * second] for value, first, second in found], structure


def _joined(old: list[Any], new: list[Any]) -> list[Any]:
    return [old[0], torch.cat((old[1], new[1])), old[2] + new[2]]


def _given_directions(operand: Operand, weights: PyTree) -> list[Any]:
    given, given_spec = flatten(weights)
    if given_spec != operand.spec:
        raise InputError(
            f"{operand.caller}: weights: expected the structure of the argument, {operand.spec}, got {given_spec}."
        )
    counts = {len(each) if getattr(each, "ndim", 0) else 0 for each in given}
    found = []
    for each, leaf, point in zip(given, operand.leaves, operand.shapes, strict=True):
        shapes = [tuple(leaf.shape), *([tuple(point)] if operand.batched else [])]
        own = tuple(getattr(each, "shape", ()))[1:]
        if own not in shapes or len(counts) != 1 or each.dtype != leaf.dtype:
            expected = " or ".join(f"({', '.join(map(str, ('R', *shape)))})" for shape in shapes)
            expected += f" {str(leaf.dtype)[6:]}"
            raise InputError(
                f"{operand.caller}: weights: expected {expected}, a direction a row and as many for each leaf, "
                f"got {describe(each)}."
            )
        found.append(each if own == shapes[0] else each.unsqueeze(1).expand(len(each), *leaf.shape))
    return found


def _gradient(slopes: Any, operand: Operand) -> list[Any]:
    """Split the derivatives by direction into the leaves of the argument."""
    # The dimension of points comes after the directions and before the coordinates.
    rows = slopes.movedim(0, -1) if operand.batched else slopes
    parts = rows.split(operand.sizes, -1)
    return [part.reshape(leaf.shape) for part, leaf in zip(parts, operand.leaves, strict=True)]
