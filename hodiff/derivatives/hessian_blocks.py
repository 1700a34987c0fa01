"""The blocks of a dense Hessian, one for each mirrored pair, computed from groups of rows."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from hodiff.common.trees import PyTree, leaf_names
from hodiff.derivatives.bound_function import BoundFunction
from hodiff.derivatives.hessian_rows import LinearizedHessian
from hodiff.derivatives.route_choice import follow
from hodiff.errors import HodiffWarning, levels_to_the_caller
from hodiff.kernels import fused
from hodiff.torch_internals.tensors import has_numbers

Plan = Sequence[tuple[int, Sequence[int]]]

_TILE = 512


@dataclass(frozen=True)
class Blocks:
    """Blocks of a Hessian, one for each mirrored pair.

    Attributes:
        parts: Blocks (n_i, n_j) by the positions of their leaves.
        whole: The (n, n) matrix if the parts are views of one; mirrored blocks are not filled yet.
    """

    parts: dict[tuple[int, int], Tensor]
    whole: Tensor | None = None

    def __getitem__(self, position: tuple[int, int]) -> Tensor:
        """Return the block (n_i, n_j), computed or mirrored."""
        i, j = position
        return self.parts[i, j] if (i, j) in self.parts else self.parts[j, i].mT

    def matrix(self, leaves: Sequence[Tensor]) -> Tensor:
        """Return the blocks as one matrix (n, n)."""
        if self.whole is None:
            count = range(len(leaves))
            return torch.cat([torch.cat([self[i, j] for j in count], 1) for i in count])
        spans = _spans(leaves)
        for (i, j), part in self.parts.items():
            if i != j:
                self.whole[spans[j], spans[i]].copy_(part.mT)
        return self.whole


def hessian_blocks(
    function: BoundFunction,
    route: str,
    chunk_size: int | str | None,
    randomness: str,
    progress: bool,
    *,
    joined: bool = False,
) -> tuple[Blocks, PyTree]:
    """Compute one block of each mirrored pair, and aux; rows belong to the smaller leaf, for fewer directions."""
    # If one matrix is wanted in the end (`joined`), the blocks are written into it directly where possible.

    def assemble(name: str) -> tuple[Blocks, PyTree]:
        linearized = LinearizedHessian(function, name, chunk_size=chunk_size, randomness=randomness, progress=progress)
        return symmetric_blocks(linearized, joined), linearized.source.aux

    return follow(route, function.caller, assemble)


def symmetric_blocks(linearized: LinearizedHessian, joined: bool) -> Blocks:
    """Compute the blocks of a linearized Hessian, with symmetric diagonal blocks."""
    leaves = linearized.function.leaves
    order = list(range(len(leaves)))
    if not linearized.traced:
        # Sizes may be symbols in a graph, which cannot be sorted.
        order.sort(key=lambda i: leaves[i].numel())
    plan = [(index, order[position:]) for position, index in enumerate(order)]
    if linearized.plain:
        blocks = _places(leaves, plan, joined)
        _fill(linearized, plan, blocks.parts)
        gaps = {index: _symmetrize_in_place(blocks[index, index]) for index in order}
        _warn_of_asymmetry(linearized, gaps)
        return blocks
    parts = _stack(linearized, plan)
    for index in order:
        square = parts[index, index]
        parts[index, index] = (square + square.mT) / 2
    return Blocks(parts)


def _spans(leaves: Sequence[Tensor]) -> list[slice]:
    """Return the slice of each leaf in the flat vector of all numbers."""
    stops = list(accumulate((leaf.numel() for leaf in leaves), initial=0))
    return [slice(start, stop) for start, stop in pairwise(stops)]


def _places(leaves: Sequence[Tensor], plan: Plan, joined: bool) -> Blocks:
    """Allocate empty blocks, separate or as views of one matrix."""
    if joined and len({leaf.dtype for leaf in leaves}) == 1:
        spans = _spans(leaves)
        whole = leaves[0].new_empty((spans[-1].stop, spans[-1].stop))
        return Blocks({(i, j): whole[spans[i], spans[j]] for i, wanted in plan for j in wanted}, whole)
    return Blocks({
        (i, j): leaves[j].new_empty((leaves[i].numel(), leaves[j].numel())) for i, wanted in plan for j in wanted
    })


def _fill(linearized: LinearizedHessian, plan: Plan, parts: dict[tuple[int, int], Tensor]) -> None:
    """Write every group into its block, so that no second copy of the matrix exists at any time."""
    wanted_by = dict(plan)
    for i, start, stop, rows in linearized.groups(plan):
        for j, row in zip(wanted_by[i], rows, strict=True):
            target = parts[i, j][start:stop]
            target.copy_(row.reshape(target.shape))


def _stack(linearized: LinearizedHessian, plan: Plan) -> dict[tuple[int, int], Tensor]:
    """Compute the blocks without in-place writes, for callers that differentiate or batch this code."""
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


def _symmetrize_in_place(square: Tensor) -> tuple[float, float]:
    """Average a block with its transpose, tile by tile; return their largest difference and the largest entry."""
    if not has_numbers(square):
        return 0.0, 0.0
    found = fused.average_with_transpose(square)
    if found is not None:
        return found
    gap, size = square.new_zeros(()), square.new_zeros(())
    for i in range(0, len(square), _TILE):
        for j in range(0, i + 1, _TILE):
            lower, upper = square[i : i + _TILE, j : j + _TILE], square[j : j + _TILE, i : i + _TILE]
            mean = (lower + upper.mT).mul_(0.5)
            distance = _largest(lower - mean)
            gap = torch.maximum(gap, 2 * distance)
            size = torch.maximum(size, _largest(mean) + distance)
            lower.copy_(mean)
            if i != j:
                upper.copy_(mean.mT)
    return float(gap), float(size)


def _largest(tensor: Tensor) -> Tensor:
    """Return the largest magnitude; a vector norm takes four times as long."""
    low, high = tensor.aminmax()
    return torch.maximum(-low, high)


def _warn_of_asymmetry(linearized: LinearizedHessian, gaps: dict[int, tuple[float, float]]) -> None:
    """Warn of blocks whose two halves differ by more than rounding, relative to the matrix or the function's value."""
    function = linearized.function
    largest = max(size for _, size in gaps.values())
    for index, (gap, _) in gaps.items():
        eps = max(torch.finfo(function.leaves[index].dtype).eps, linearized.eps)
        if gap <= max(eps**0.5 * largest, eps * linearized.magnitude):
            continue
        where = leaf_names(function.unflatten(function.leaves))[index]
        if math.isfinite(gap):
            amiss = f"is not symmetric: |H - Hᵀ| reaches {gap / largest:.1e} of the largest entry"
        else:
            amiss = "holds numbers that are not finite"
        warnings.warn(
            f"{function.caller}: the block of {where or 'the argument'} {amiss}. Either the function is not twice "
            "differentiable there, or a derivative rule is wrong; hodiff.check(f, x) finds which.",
            HodiffWarning,
            stacklevel=levels_to_the_caller(),
        )
