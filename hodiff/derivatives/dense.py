"""Dense Hessians: as nested pytrees, as one matrix, and the exact diagonal alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, overload

import torch
from torch import Tensor

from hodiff.common.options import require_bool, require_choice, require_chunk_size
from hodiff.common.ordinary import ordinary
from hodiff.common.trees import PyTree
from hodiff.derivatives.bound_function import at_the_boundary, bind, require_argnums
from hodiff.derivatives.hessian_blocks import hessian_blocks
from hodiff.derivatives.hessian_rows import LinearizedHessian
from hodiff.derivatives.route_choice import follow, require_route


def hessian(
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
    r"""Build a function that computes the dense Hessian of a scalar function; a drop-in for `torch.func.hessian`.

    $$ H_{ij} = \frac{\partial^2 f}{\partial x_i\, \partial x_j} $$

    The gradient is linearized once, and groups of unit directions are pulled back through it together. Only one of
    each pair of mirrored blocks is computed, so the result is symmetric to the last bit.

    Args:
        f: Function that returns a tensor of shape `()`, or `(value, aux)` with `has_aux`.
        argnums: Which positional arguments to differentiate: an int, or a tuple of ints.
        has_aux: Whether `f` returns `(value, aux)`, aux a pytree of tensors.
        route: One of `hodiff.ROUTES`, or "auto" as in `hodiff.hvp`. Routes other than "reverse-over-reverse"
            evaluate `f` again for each group of directions.
        chunk_size: Directions in a group: a positive int, None for all at once, or "auto" for as many as keep the
            intermediate results of a group within 64 MiB on a CPU and 1 GiB on a GPU (never less than one). A
            result that carries a graph keeps every group's intermediates; call under `torch.no_grad()` to bound memory
            when `f` closes over tensors that require gradients.
        randomness: How to treat random operations in `f` if a route evaluates `f` several times: "error", or "same" to
            share one draw among all directions. "same" covers the generators of torch, NumPy and Python and those that
            `f` holds. A function that returns another value the next time is refused in either case.
        progress: Whether to show a progress bar over the directions.
        correct: As in `hodiff.hvp`.

    Returns:
        Function of the arguments of `f`. For a tensor `x` it returns a tensor of shape `(*x.shape, *x.shape)`; for
        pytrees, a tree of trees whose entry `[i][j]` has shape `(*x_i.shape, *x_j.shape)` and the dtype of `x_i`;
        with `has_aux`, the pair of that and aux. It raises the same errors as `hodiff.hvp`.

    Raises:
        InputError: If the route, chunk size or randomness is unknown.

    Example:
        >>> import torch, hodiff
        >>> hodiff.hessian(lambda x: x[0] ** 2 * x[1])(torch.tensor([1.0, 2.0]))
        tensor([[4., 2.],
                [2., 0.]])

    Source: J. Nocedal & S. Wright, *Numerical Optimization*, 2nd ed., section 8.2.
    """
    validate_options("hessian", argnums, route, chunk_size, randomness, progress)

    @at_the_boundary
    def hessian_of_f(*args: Any, **kwargs: Any) -> PyTree:
        function = bind("hessian", f, args, kwargs, argnums, has_aux=has_aux, correct=correct)
        blocks, aux = hessian_blocks(function, route, chunk_size, randomness, progress)
        leaves = function.leaves
        count = len(leaves)
        flat = ordinary(
            blocks[i, j].reshape(rows.shape + columns.shape).to(rows.dtype)
            for i, rows in enumerate(leaves)
            for j, columns in enumerate(leaves)
        )
        result = function.unflatten([function.unflatten(flat[i * count : (i + 1) * count]) for i in range(count)])
        return (result, aux) if has_aux else result

    return hessian_of_f


@overload
def hessian_matrix(
    f: Callable[..., Any],
    x: PyTree,
    *args: Any,
    has_aux: Literal[False] = False,
    route: str = "auto",
    chunk_size: int | str | None = "auto",
    randomness: str = "error",
    progress: bool = False,
    correct: bool = True,
) -> Tensor: ...


@overload
def hessian_matrix(
    f: Callable[..., Any],
    x: PyTree,
    *args: Any,
    has_aux: Literal[True],
    route: str = "auto",
    chunk_size: int | str | None = "auto",
    randomness: str = "error",
    progress: bool = False,
    correct: bool = True,
) -> tuple[Tensor, PyTree]: ...


@at_the_boundary
def hessian_matrix(
    f: Callable[..., Any],
    x: PyTree,
    *args: Any,
    has_aux: bool = False,
    route: str = "auto",
    chunk_size: int | str | None = "auto",
    randomness: str = "error",
    progress: bool = False,
    correct: bool = True,
) -> Tensor | tuple[Tensor, PyTree]:
    r"""Compute the dense Hessian of a scalar function as one matrix, with the leaves of `x` flattened in pytree order.

    $$ H = \nabla^2 f(x) \in \mathbb{R}^{n \times n}, \qquad H = H^\top \text{ to the last bit} $$

    Args:
        f: Function `f(x, *args)` that returns a tensor of shape `()`, or `(value, aux)` with `has_aux`.
        x: Where to differentiate: a tensor or a pytree of tensors, n numbers in all. A complex number counts as two,
            its real part and then its imaginary part.
        *args: Further arguments of `f`, taken as constants.
        has_aux: Whether `f` returns `(value, aux)`.
        route: As in `hodiff.hessian`.
        chunk_size: As in `hodiff.hessian`.
        randomness: As in `hodiff.hessian`.
        progress: Whether to show a progress bar over the directions.
        correct: As in `hodiff.hvp`.

    Returns:
        Tensor of shape `(n, n)` in the dtype that the leaves promote to; with `has_aux`, the pair of it and aux.

    Raises:
        InputError: If an argument is invalid, as for `hodiff.hvp`.
        RouteError: If torch does not implement the route, or with "auto" any route.

    Example:
        >>> import torch, hodiff
        >>> parameters = {"w": torch.tensor([1.0, 2.0]), "b": torch.tensor(3.0)}
        >>> hodiff.hessian_matrix(lambda p: p["b"] * p["w"].prod(), parameters)
        tensor([[0., 3., 2.],
                [3., 0., 1.],
                [2., 1., 0.]])

    Source: as `hodiff.hessian`.
    """
    validate_options("hessian_matrix", 0, route, chunk_size, randomness, progress)
    function = bind("hessian_matrix", f, (x, *args), has_aux=has_aux, name="x", correct=correct, complex_too=True)
    blocks, aux = hessian_blocks(function, route, chunk_size, randomness, progress, joined=True)
    matrix = blocks.matrix(function.leaves)
    return (matrix, aux) if has_aux else matrix


def validate_options(
    caller: str, argnums: Any, route: str, chunk_size: int | str | None, randomness: str, progress: bool
) -> None:
    """Raise if an option of a dense derivative is invalid."""
    require_argnums(caller, argnums)
    require_route(caller, route)
    require_chunk_size(caller, "chunk_size", chunk_size)
    require_bool(caller, "progress", progress)
    remedy = (
        "'same' is what operators call 'fixed'"
        if isinstance(randomness, str) and randomness == "fixed"
        else "with different random numbers for each direction, the rows would belong to different functions"
    )
    require_choice(caller, "randomness", randomness, ("error", "same"), remedy=remedy)


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
