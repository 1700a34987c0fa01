"""Second derivatives with respect to each coordinate, for every output, by series of order 2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hodiff.common.trees import PyTree, unflatten
from hodiff.derivatives.bound_function import leave_inference_mode
from hodiff.taylor.differential.operand import Operand, bound, require_options


def hessian_diagonal(
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
        >>> hodiff.taylor.hessian_diagonal(f)(torch.tensor([1.0, 2.0]))
        tensor([[ 0.,  0.],
                [ 6., 12.]])

    Source: A. Griewank & A. Walther, *Evaluating Derivatives*, 2nd ed., chapter 13.
    """
    require_options("hessian_diagonal", f, argnums, chunk_size, batched=batched, correct=correct)

    @leave_inference_mode
    def transformed(*args: Any, **kwargs: Any) -> PyTree:
        operand = bound("hessian_diagonal", f, args, kwargs, argnums, batched=batched, correct=correct)
        found, structure = operand.along_each(operand.units(chunk_size), 2)
        return unflatten([_by_leaves(operand, each) for each in found], structure)

    return transformed


def _by_leaves(operand: Operand, rows: Any) -> PyTree:
    """Split derivatives by direction into a tree in the structure of the argument."""
    parts = rows.movedim(0, -1).split(operand.sizes, -1)
    shaped = [part.reshape(*part.shape[:-1], *shape) for part, shape in zip(parts, operand.shapes, strict=True)]
    return unflatten(shaped, operand.spec)
