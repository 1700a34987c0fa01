"""Functions of many rows, evaluated a block of rows at a time, with derivatives of any order by blocks as well.

A formula takes tensors with rows (dimension -2) block by block, and shared tensors whole. Outputs with rows are joined;
shared outputs are summed over blocks. The pullback of such a formula has the same form: gradients of tensors with rows
have rows, gradients of shared tensors are sums. So a derivative of any order holds one block.

Blocks of a tensor that are processed one at a time, so that intermediate results stay small.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hodiff.rules.any_order import AnyOrderFunction
from hodiff.rules.autocast import without_autocast
from hodiff.rules.nesting import nestable_jvp
from hodiff.torch_internals.autograd.batching import is_legacy_batched
from hodiff.torch_internals.tensors import broadcast_shape, is_zero_without_memory

# Elements in a block: as many as fit a processor's caches, or keep a GPU busy.
AUTO = {"cpu": 2**20, "cuda": 2**25}


def block_size(chunk_size: int | str | None, x: Tensor, dim: int) -> int | None:
    """Number of elements in a block of `chunk_size` samples along `dim`, or None for no limit."""
    # Do not cut compiled code, where sizes may be symbols.
    if chunk_size is None or torch.compiler.is_compiling():
        return None
    if isinstance(chunk_size, str):
        return AUTO.get(x.device.type, AUTO["cuda"])
    return max(1, chunk_size * x.shape[dim])


def allows_in_place(*tensors: Tensor | None) -> bool:
    """Whether `forward` may change its intermediate results in place."""
    # Not under `torch.compile`, which differentiates through it; not with the zeros without memory that forward mode
    # passes; and not with `is_grads_batched=True`, which batches tensors without asking for a rule.
    if torch.compiler.is_compiling():
        return False
    for each in tensors:
        # A stand-in for a tensor, such as a jet, has no memory to write to.
        if each is not None and (
            not isinstance(each, Tensor) or is_zero_without_memory(each) or is_legacy_batched(each)
        ):
            return False
    return True


def blocks(dim: int, limit: int | None, x: Tensor, *others: Tensor) -> list[tuple[slice, ...]]:
    """Slices that cut the dimensions before `dim` (negative) into blocks of at most `limit` elements, if possible."""
    if limit is None or x.numel() <= limit or not allows_in_place(x, *others):
        return [()]
    return list(_cuts(x.shape, dim, limit))


def _cuts(shape: torch.Size, dim: int, limit: int) -> Iterator[tuple[slice, ...]]:
    size = math.prod(shape)
    if size <= limit or len(shape) + dim == 0:
        yield ()
        return
    step = max(1, limit * shape[0] // size)
    for start in range(0, shape[0], step):
        piece = slice(start, min(start + step, shape[0]))
        if step > 1:
            yield (piece,)
        else:
            for inner in _cuts(shape[1:], dim, limit):
                yield (piece, *inner)


def block_of(tensor: Tensor, slices: tuple[slice, ...], rank: int) -> Tensor:
    """Return a view of the part of a tensor that broadcasts with a block, given the slices of the block."""
    if not slices:
        return tensor
    missing = rank - tensor.dim()
    index: list[slice] = []
    for position, piece in enumerate(slices[max(missing, 0) :], start=max(-missing, 0)):
        index.append(piece if tensor.shape[position] != 1 else slice(None))
    return tensor[(slice(None),) * max(-missing, 0) + tuple(index)]


def block_by_block(
    formula: Callable[..., Tensor], dim: int, limit: int | None, *tensors: Tensor, reduces: bool = False
) -> Tensor:
    """Evaluate a formula of broadcasting tensors, which keeps or reduces `dim`, a block of the first at a time."""
    cuts = blocks(dim, limit, *tensors)
    if len(cuts) == 1:
        return formula(*tensors)
    x = tensors[0]
    shape = broadcast_shape(*[each.shape for each in tensors])
    y = x.new_empty(without(dim, shape) if reduces else shape)
    for cut in cuts:
        *parts, part = [block_of(each, cut, x.dim()) for each in (*tensors, y)]
        part.copy_(formula(*parts))
    return y


def without(dim: int, shape: Sequence[int]) -> list[int]:
    """Return the shape with size 1 along a dimension, counted from the end."""
    return [1 if k == dim else size for k, size in enumerate(shape, start=-len(shape))]


Formula = Callable[..., tuple[Tensor, ...]]

# Elements of the widest intermediate in one block, 8 MiB in float32; for smaller blocks, sums over blocks cost more.
BLOCK = 2**21
FEWEST_ROWS = 16


class Plan(NamedTuple):
    """The tensors that have rows, and the number of rows in a block.

    Attributes:
        length: Number of rows.
        width: Elements in one row of the widest intermediate.
        inputs: Whether each input has rows.
        outputs: Whether each output has rows.
    """

    length: int
    width: int
    inputs: tuple[bool, ...]
    outputs: tuple[bool, ...]

    @property
    def block(self) -> int:
        """Number of rows in a block."""
        return max(FEWEST_ROWS, BLOCK // max(self.width, 1))


@dataclass(frozen=True)
class WithKernel:
    """A formula with a kernel for all rows at once, which returns None to fall back to the formula."""

    formula: Formula
    kernel: Callable[..., tuple[Tensor, ...] | None]

    def __call__(self, start: int, *tensors: Any) -> tuple[Tensor, ...]:
        """Evaluate the formula on one block."""
        return self.formula(start, *tensors)


def blockwise(formula: Formula, plan: Plan, *tensors: Tensor | None) -> tuple[Tensor, ...]:
    """Evaluate a formula block by block; join outputs that have rows, and sum shared outputs."""
    if isinstance(formula, WithKernel):
        found = formula.kernel(*tensors)
        if found is not None:
            return found
    device = next(each.device.type for each in tensors if each is not None)
    with without_autocast(device):
        return _by_blocks(formula, plan, tensors)


def _by_blocks(formula: Formula, plan: Plan, tensors: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    if plan.length <= plan.block:
        return tuple(formula(0, *tensors))
    joined: list[list[Tensor]] = [[] for _ in plan.outputs]
    for start in range(0, plan.length, plan.block):
        rows = min(plan.block, plan.length - start)
        slices = [
            each.narrow(-2, start, rows) if has_rows and each is not None else each
            for each, has_rows in zip(tensors, plan.inputs, strict=True)
        ]
        for parts, part, has_rows in zip(joined, formula(start, *slices), plan.outputs, strict=True):
            parts[:] = [*parts, part] if has_rows or not parts else [parts[0] + part]
    return tuple(torch.cat(parts, -2) if rows else parts[0] for parts, rows in zip(joined, plan.outputs, strict=True))


class RowBlocks(AnyOrderFunction):
    """The Function of `blockwise`, with derivatives by blocks. Saves its inputs."""

    @staticmethod
    def forward(formula: Formula, plan: Plan, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        """Evaluate a block at a time."""
        return blockwise(formula, plan, *tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Save the inputs."""
        del output
        ctx.formula, ctx.plan, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        """Compute the pullback of the formula by blocks."""
        tensors, needed = ctx.saved_tensors, ctx.needs_input_grad[2:]
        wanted = tuple(i for i, need in enumerate(needed) if need)
        given = tuple(i for i, each in enumerate(cotangents) if each is not None)
        gradients: list[Tensor | None] = [None] * len(tensors)
        if given and wanted:
            plan = ctx.plan._replace(
                inputs=(*ctx.plan.inputs, *(ctx.plan.outputs[i] for i in given)),
                outputs=tuple(ctx.plan.inputs[i] for i in wanted),
            )
            formula = partial(_pullback, ctx.formula, wanted, given)
            found = RowBlocks.call(formula, plan, *tensors, *(cotangents[i] for i in given))
            for i, each in zip(wanted, found, strict=True):
                gradients[i] = each
        return None, None, *gradients

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, _formula: None, _plan: None, *tangents: Tensor | None) -> tuple[Tensor, ...]:
        """Compute the pushforward of the formula by blocks."""
        return pushed(ctx.formula, ctx.plan, ctx.saved_tensors, tangents)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], formula: Formula, plan: Plan, *tensors: Tensor | None) -> Any:
        """Add the batch to the dimensions before the rows."""
        front = all_batched(info.batch_size, in_dims[2:], tensors)
        outputs = RowBlocks.call(formula, plan._replace(width=plan.width * info.batch_size), *front)
        return outputs, (0,) * len(outputs)


def pushed(
    formula: Formula, plan: Plan, tensors: Sequence[Tensor | None], tangents: Sequence[Tensor | None]
) -> tuple[Tensor, ...]:
    """Compute the pushforward of a formula by blocks; a tangent of None is zero."""
    given = tuple(i for i, each in enumerate(tangents) if each is not None)
    plan = plan._replace(inputs=(*plan.inputs, *(plan.inputs[i] for i in given)))
    found: tuple[Tensor, ...] = RowBlocks.call(
        partial(_pushforward, formula, given), plan, *tensors, *(tangents[i] for i in given)
    )
    return found


def all_batched(size: int, in_dims: Sequence[Any], tensors: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """Move or expand the batch to the front of every tensor, as unbatched ones would get summed gradients."""
    return tuple(
        each if each is None else each.expand(size, *each.shape) if dim is None else each.movedim(dim, 0)
        for each, dim in zip(tensors, in_dims, strict=True)
    )


def _pullback(formula: Formula, wanted: Sequence[int], given: Sequence[int], start: int, *tensors: Any) -> Any:
    inputs, cotangents = tensors[: len(tensors) - len(given)], tensors[len(tensors) - len(given) :]
    _, pull = _linearized(formula, wanted, given, start, inputs)
    return pull(cotangents)


def _pushforward(formula: Formula, given: Sequence[int], start: int, *tensors: Any) -> Any:
    inputs, tangents = tensors[: len(tensors) - len(given)], tensors[len(tensors) - len(given) :]
    outputs, pull = _linearized(formula, given, None, start, inputs)
    # Transpose the pullback, because torch.autograd.forward_ad may be active outside and does not nest.
    transposed: Any = torch.func.vjp(pull, tuple(torch.zeros_like(each) for each in outputs))
    (found,) = transposed[1](tangents)
    return found


def _linearized(
    formula: Formula, by: Sequence[int], of: Sequence[int] | None, start: int, inputs: Sequence[Any]
) -> Any:
    def primal(*chosen: Tensor) -> tuple[Tensor, ...]:
        arguments = list(inputs)
        for i, each in zip(by, chosen, strict=True):
            arguments[i] = each
        outputs = formula(start, *arguments)
        return outputs if of is None else tuple(outputs[i] for i in of)

    return torch.func.vjp(primal, *(inputs[i] for i in by))
