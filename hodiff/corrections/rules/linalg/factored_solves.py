r"""Solves with a factored matrix, from which the derivatives of solves and determinants are composed.

torch's forward rules use the factors of the first pass as constants. Here the factors compute values only, at every
order, while derivatives pass through the matrix: $\dot X = A^{-1} (\dot B - \dot A X)$.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hodiff.rules.any_order import AnyOrderFunction
from hodiff.rules.nesting import nestable_jvp
from hodiff.torch_internals.autograd.transforms import in_transform

DTYPES = (torch.float32, torch.float64, torch.complex64, torch.complex128)


def for_lapack(*args: Any, out: Any = None, **kwargs: Any) -> bool:
    """Whether a call allocates its result, and all its tensors have dtypes that LAPACK supports."""
    tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
    return out is None and bool(tensors) and all(each.dtype in DTYPES for each in tensors)


def named(kind: str, values: Sequence[Tensor]) -> Any:
    """Return the named tuple of `torch.return_types` of a torch function, which no stub declares."""
    return getattr(torch.return_types, kind)(values)


def factors(matrix: Tensor, *, check_errors: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Return L and U in one matrix, the pivots, and LAPACK's info, as constants: Functions add the derivatives."""
    # A compiler differentiates the operators in a Function's forward, so the factors are not constants there.
    traced = torch.compiler.is_compiling() and in_transform()
    pair, pivots, info = torch.linalg.lu_factor_ex(matrix if traced else matrix.detach(), check_errors=check_errors)
    return pair, pivots, info


def in_front(in_dims: Sequence[int | None], tensors: Sequence[Tensor], cores: Sequence[int]) -> list[Tensor]:
    """Move batch dimensions to the front and pad after them, so that all but the last `cores` dimensions broadcast."""
    leading = [t.dim() - c - (d is not None) for t, d, c in zip(tensors, in_dims, cores, strict=True)]
    moved = []
    for tensor, dim, own in zip(tensors, in_dims, leading, strict=True):
        if dim is not None:
            tensor = tensor.movedim(dim, 0)
            tensor = tensor.reshape(tensor.shape[0], *(1,) * (max(leading) - own), *tensor.shape[1:])
        moved.append(tensor)
    return moved


class FactoredSolve(AnyOrderFunction):
    r"""$X = A^{-1} B$, or $A^{-H} B$, by the factors of A. Saves A, B and the factors.

    $$ \bar B = A^{-H} \bar X, \qquad \bar A = -\bar B X^H, \qquad \dot X = A^{-1} (\dot B - \dot A X) $$
    """

    @staticmethod
    def forward(matrix: Tensor, right: Tensor, pair: Tensor, pivots: Tensor, adjoint: bool) -> Tensor:
        """Substitute forwards and backwards."""
        del matrix
        batch = torch.broadcast_shapes(pair.shape[:-2], right.shape[:-2])
        count = math.prod(batch)

        def in_one(tensor: Tensor, core: int) -> Tensor:
            return tensor.expand(*batch, *tensor.shape[-core:]).reshape(count, *tensor.shape[-core:])

        # The kernel steps through the matrices by the stride of the last batch dimension, even where that dimension has
        # one element and its stride means nothing.
        solution = torch.linalg.lu_solve(in_one(pair, 2), in_one(pivots, 1), in_one(right, 2), adjoint=adjoint)
        solution = solution.reshape(*batch, *right.shape[-2:])
        # A compiler's nested tangents must be contiguous.
        return solution.contiguous() if torch.compiler.is_compiling() else solution

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save the inputs."""
        del output
        matrix, right, pair, pivots, ctx.adjoint = inputs
        ctx.save_for_backward(matrix, right, pair, pivots)
        ctx.save_for_forward(matrix, right, pair, pivots)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, solution_bar: Tensor | None) -> Any:
        """Gradients by a solve with the adjoint, and an outer product."""
        if solution_bar is None:
            return (None,) * 5
        matrix, right, pair, pivots = ctx.saved_tensors
        right_bar = FactoredSolve.call(matrix, solution_bar, pair, pivots, not ctx.adjoint)
        matrix_bar = None
        if ctx.needs_input_grad[0]:
            solution = FactoredSolve.call(matrix, right, pair, pivots, ctx.adjoint)
            left, right_factor = (solution, right_bar) if ctx.adjoint else (right_bar, solution)
            matrix_bar = -(left @ right_factor.mH).sum_to_size(matrix.shape)
        return matrix_bar, right_bar.sum_to_size(right.shape), None, None, None

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, matrix_t: Tensor | None, right_t: Tensor | None, *_: None) -> Tensor:
        """Tangent by a solve with the same matrix."""
        matrix, right, pair, pivots = ctx.saved_tensors
        change = right_t
        if matrix_t is not None:
            solution = FactoredSolve.call(matrix, right, pair, pivots, ctx.adjoint)
            product = (matrix_t.mH if ctx.adjoint else matrix_t) @ solution
            change = -product if change is None else change - product
        return FactoredSolve.call(matrix, change, pair, pivots, ctx.adjoint)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[Tensor, int]:
        """Leading dimensions broadcast."""
        del info
        *tensors, adjoint = inputs
        return FactoredSolve.call(*in_front(in_dims[:4], tensors, (2, 2, 2, 1)), adjoint), 0


def solve(matrix: Tensor, right: Tensor) -> Tensor:
    """Solve A X = B with one factorization for all derivatives; a singular A gives non-finite numbers."""
    pair, pivots, _ = factors(matrix)
    return FactoredSolve.call(matrix, right, pair, pivots, False)
