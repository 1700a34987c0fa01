"""The divergence of a vector field, by first-order series."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hodiff.common.trees import flatten
from hodiff.derivatives.bound_function import leave_inference_mode
from hodiff.errors import InputError
from hodiff.taylor.differential.operand import Directions, Operand, Pass, bound, grouped, groups, require_options
from hodiff.taylor.differential.random_directions import estimate, sampled, sampling_of
from hodiff.taylor.jets import tensor_of


def divergence(
    f: Callable[..., Any],
    argnums: int = 0,
    *,
    batched: bool = False,
    randomised: str | None = None,
    samples: int = 16,
    generator: torch.Generator | None = None,
    chunk_size: int | None = None,
    correct: bool = True,
) -> Callable[..., Any]:
    r"""Function that computes the divergence of a vector field, the trace of its Jacobian, in one forward pass.

    $$ \operatorname{div} f(x) = \sum_i \frac{\partial f_i}{\partial x_i} = E\, v^\top J v, \qquad E\, v v^\top = I $$

    Only a group of the Jacobian's columns is stored at a time, or all columns if `chunk_size` is None. In very many
    dimensions `randomised` takes the mean of $v^\top J v$ over random directions, as in continuous normalising flows.
    The result can be differentiated.

    Args:
        f: Function whose output has the structure and shapes of its argument: a tensor or a pytree of tensors.
        argnums: As in `hodiff.laplacian`.
        batched: As in `hodiff.laplacian`: `f` maps (N, D) to (N, D).
        randomised: As in `hodiff.laplacian`; "rademacher" is without error for a diagonal Jacobian.
        samples: Number of random directions.
        generator: Random number generator; torch's default if None.
        chunk_size: As in `hodiff.laplacian`.
        correct: As in `hodiff.hvp`.

    Returns:
        Function of the arguments of `f` that returns the divergence, of shape `()`, or with `batched` (N,); with
        `randomised` a `hodiff.taylor.RandomisedEstimate` of it.

    Raises:
        InputError: If an option is unknown, the argument cannot be differentiated, or the output of `f` does
            not match it.

    Example:
        >>> import torch, hodiff
        >>> hodiff.taylor.divergence(lambda x: x**2 * x.sum())(torch.tensor([1.0, 2.0]))
        tensor(23.)

    Source: M. F. Hutchinson, "A stochastic estimator of the trace of the influence matrix", 1990; W. Grathwohl et al.,
    "FFJORD", ICLR 2019, section 3.1.
    """
    require_options("divergence", f, argnums, chunk_size, batched=batched, correct=correct)
    sampling = sampling_of("divergence", randomised, samples, generator)

    @leave_inference_mode
    def transformed(*args: Any, **kwargs: Any) -> Any:
        operand = bound("divergence", f, args, kwargs, argnums, batched=batched, correct=correct)
        if sampling is None:
            passes = operand.passes(operand.units(chunk_size), 1)
            ranges = groups(operand.size, chunk_size)
            parts = [_diagonal(operand, start, each) for (start, _), each in zip(ranges, passes, strict=True)]
            return sum(parts[1:], parts[0])
        sample = sampled(operand, sampling)
        directions = list(grouped(sample.directions, chunk_size))
        passes = operand.passes(directions, 1)
        parts = [_products(operand, each, found) for each, found in zip(directions, passes, strict=True)]
        terms = torch.cat(parts)
        return estimate([terms], flatten(terms)[1], sample)

    return transformed


def _slopes(operand: Operand, found: Pass) -> list[Any]:
    """Return the first coefficients, one for each leaf of the argument."""
    shapes = [tuple(each[0].shape) for each in found.outputs]
    expected = [tuple(leaf.shape) for leaf in operand.leaves]
    if found.structure != operand.spec or shapes != expected:
        raise InputError(
            f"divergence: f: expected an output in the structure and shapes of argument {operand.argnums}, {expected}, "
            f"got {shapes}; hodiff.jacobian takes outputs of any shape."
        )
    return [each[1] for each in found.outputs]


def _diagonal(operand: Operand, start: int, found: Pass) -> Any:
    """Sum the diagonal entries of the Jacobian in a group of columns that begins at `start`."""
    slopes = _slopes(operand, found)
    plain, offset = tensor_of(slopes[0]), 0
    total: Any = torch.zeros(operand.points, dtype=plain.dtype, device=plain.device)
    for slope, size in zip(slopes, operand.sizes, strict=True):
        columns = slope.reshape(len(slope), *operand.points, size)
        # The directions of this group that are coordinates of this leaf.
        first, last = max(start, offset), min(start + len(slope), offset + size)
        if first < last:
            block = columns[first - start : last - start, ..., first - offset : last - offset]
            total = total + block.diagonal(0, 0, -1).sum(-1)
        offset += size
    return total


def _products(operand: Operand, directions: Directions, found: Pass) -> Any:
    """Multiply each direction by the derivative along it."""
    total: Any = 0
    for v, slope in zip(directions, _slopes(operand, found), strict=True):
        total = total + (v * slope).reshape(len(slope), *operand.points, -1).sum(-1)
    return total
