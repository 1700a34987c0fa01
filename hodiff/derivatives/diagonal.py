"""The exact diagonal of a Hessian."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hodiff.common.trees import PyTree
from hodiff.derivatives.bound_function import at_the_boundary, bind
from hodiff.derivatives.dense import validate_options
from hodiff.derivatives.hessian_rows import LinearizedHessian
from hodiff.derivatives.route_choice import follow


def hessian_diagonal(
    f: Callable[..., Any],
    argnums: int | tuple[int, ...] = 0,
    *,
    has_aux: bool = False,
    route: str = "auto",
    chunk_size: int | str | None = "auto",
    randomness: str = "error",
    progress: bool = False,
    correct: bool = True,
) -> Callable[..., PyTree]:
    r"""Build a function that computes the exact diagonal of the Hessian of a scalar function.

    $$ d_i = \frac{\partial^2 f}{\partial x_i^2} $$

    It needs one product for each coordinate, computes them in groups, and stores at most one group of rows.

    Args:
        f: Function that returns a tensor of shape `()`, or `(value, aux)` with `has_aux`.
        argnums: Which positional arguments to differentiate: an int, or a tuple of ints.
        has_aux: Whether `f` returns `(value, aux)`.
        route: As in `hodiff.hessian`.
        chunk_size: As in `hodiff.hessian`.
        randomness: As in `hodiff.hessian`.
        progress: Whether to show a progress bar over the coordinates.
        correct: As in `hodiff.hvp`.

    Returns:
        Function of the arguments of `f` that returns the diagonal in the structure of the differentiated argument, or
        with `has_aux` the pair of it and aux. It raises the same errors as `hodiff.hvp`.

    Raises:
        InputError: If the route, chunk size or randomness is unknown.

    Example:
        >>> import torch, hodiff
        >>> hodiff.hessian_diagonal(lambda x: (x**3).sum() + x.prod())(torch.tensor([1.0, 2.0]))
        tensor([ 6., 12.])

    Source: A. Griewank & A. Walther, *Evaluating Derivatives*, 2nd ed., section 3.3.
    """
    validate_options("hessian_diagonal", argnums, route, chunk_size, randomness, progress)

    @at_the_boundary
    def diagonal_of_f(*args: Any, **kwargs: Any) -> PyTree:
        function = bind("hessian_diagonal", f, args, kwargs, argnums, has_aux=has_aux, correct=correct)
        leaves = function.leaves

        def assemble(name: str) -> tuple[PyTree, PyTree]:
            linearized = LinearizedHessian(
                function, name, chunk_size=chunk_size, randomness=randomness, progress=progress
            )
            parts: list[list[Tensor]] = [[] for _ in leaves]
            for index, start, stop, (rows,) in linearized.groups([(i, (i,)) for i in range(len(leaves))]):
                square = rows.reshape(stop - start, -1)[:, start:stop]
                parts[index].append(square.diagonal().clone())
            diagonal = [
                torch.cat(part).view(leaf.shape) if part else torch.zeros_like(leaf)
                for part, leaf in zip(parts, leaves, strict=True)
            ]
            return function.unflatten(diagonal), linearized.source.aux

        diagonal, aux = follow(route, "hessian_diagonal", assemble)
        return (diagonal, aux) if has_aux else diagonal

    return diagonal_of_f
