"""The blocks of a dense Hessian, one of each mirrored pair, from rows in groups."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from hodiff.derivatives.functions import BoundFunction
from hodiff.derivatives.linearized import LinearizedHessian
from hodiff.derivatives.routes import follow
from hodiff.derivatives.trees import PyTree, leaf_names
from hodiff.errors import HodiffWarning

Blocks = dict[tuple[int, int], Tensor]

_TILE = 512


def hessian_blocks(
    function: BoundFunction, route: str, chunk_size: int | str | None, randomness: str, progress: bool
) -> tuple[Blocks, PyTree]:
    """One block of each mirrored pair: rows of the smaller leaf, so that the many directions do the least work.

    Args:
        function: The bound function.
        route: A validated route.
        chunk_size: A validated chunk size.
        randomness: "error" or "same".
        progress: Whether to show a progress bar.

    Returns:
        Blocks (n_i, n_j) by the positions of their leaves, and aux.
    """
    order = sorted(range(len(function.leaves)), key=lambda i: function.leaves[i].numel())
    plan = [(index, order[position:]) for position, index in enumerate(order)]

    def assemble(name: str) -> tuple[Blocks, PyTree]:
        linearized = LinearizedHessian(function, name, chunk_size=chunk_size, randomness=randomness, progress=progress)
        if linearized.plain:
            blocks = _fill(linearized, plan)
            gaps = {index: _symmetrize_in_place(blocks[index, index]) for index in order}
            _warn_of_asymmetry(linearized, gaps)
            return blocks, linearized.source.aux
        blocks = _stack(linearized, plan)
        for index in order:
            square = blocks[index, index]
            blocks[index, index] = (square + square.mT) / 2
        return blocks, linearized.source.aux

    return follow(route, function.caller, assemble)


def _fill(linearized: LinearizedHessian, plan: list[tuple[int, list[int]]]) -> Blocks:
    """Write every group into its place: no second copy of the matrix exists at any time."""
    leaves = linearized.function.leaves
    blocks = {(i, j): leaves[j].new_empty((leaves[i].numel(), leaves[j].numel())) for i, wanted in plan for j in wanted}
    wanted_by = dict(plan)
    for i, start, stop, rows in linearized.groups(plan):
        for j, row in zip(wanted_by[i], rows, strict=True):
            blocks[i, j][start:stop].view(row.shape).copy_(row)
    return blocks


def _stack(linearized: LinearizedHessian, plan: list[tuple[int, list[int]]]) -> Blocks:
    """The same without writing in place, for surroundings that differentiate or batch what happens here."""
    leaves = linearized.function.leaves
    parts: dict[tuple[int, int], list[Tensor]] = {(i, j): [] for i, wanted in plan for j in wanted}
    wanted_by = dict(plan)
    for i, start, stop, rows in linearized.groups(plan):
        for j, row in zip(wanted_by[i], rows, strict=True):
            parts[i, j].append(row.reshape(stop - start, leaves[j].numel()))
    return {
        (i, j): torch.cat(rows) if rows else leaves[j].new_zeros((0, leaves[j].numel()))
        for (i, j), rows in parts.items()
    }


def block(blocks: Blocks, i: int, j: int) -> Tensor:
    """The block (n_i, n_j), computed or mirrored.

    Args:
        blocks: One block of each mirrored pair.
        i: Leaf of the rows.
        j: Leaf of the columns.

    Returns:
        The block.
    """
    return blocks[i, j] if (i, j) in blocks else blocks[j, i].mT


def _symmetrize_in_place(square: Tensor) -> tuple[float, float]:
    """Average a block with its transpose, tile by tile; the largest difference of the two, and the largest entry."""
    gap, size = square.new_zeros(()), square.new_zeros(())
    for i in range(0, len(square), _TILE):
        for j in range(0, i + 1, _TILE):
            lower, upper = square[i : i + _TILE, j : j + _TILE], square[j : j + _TILE, i : i + _TILE]
            mean = (lower + upper.mT).mul_(0.5)
            distance = torch.linalg.vector_norm(lower - mean, torch.inf)
            gap = torch.maximum(gap, 2 * distance)
            size = torch.maximum(size, torch.linalg.vector_norm(mean, torch.inf) + distance)
            lower.copy_(mean)
            if i != j:
                upper.copy_(mean.mT)
    return float(gap), float(size)


def _warn_of_asymmetry(linearized: LinearizedHessian, gaps: dict[int, tuple[float, float]]) -> None:
    """Warn of blocks whose two halves differ by more than rounding, of the matrix or of the function's value."""
    function = linearized.function
    largest = max(size for _, size in gaps.values())
    for index, (gap, _) in gaps.items():
        eps = torch.finfo(function.leaves[index].dtype).eps
        if gap <= max(eps**0.5 * largest, eps * linearized.magnitude):
            continue
        where = leaf_names(function.unflatten(function.leaves))[index]
        warnings.warn(
            f"{function.caller}: the block of {where or 'the argument'} is not symmetric: |H - Hᵀ| reaches "
            f"{gap / largest:.1e} of the largest entry. Either the function is not twice differentiable there, or a "
            "derivative rule is wrong; hodiff.check(f, x) finds which.",
            HodiffWarning,
            stacklevel=7,
        )
