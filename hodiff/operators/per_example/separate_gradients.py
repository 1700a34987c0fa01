"""Gradients of the examples without layers: evaluated by vmap, one by one, or together with one example's output."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from tqdm.auto import tqdm

from hodiff.common.chunks import resolve_chunk_size, spans
from hodiff.corrections import Corrections
from hodiff.derivatives.bound_function import BoundFunction
from hodiff.errors import HodiffError
from hodiff.operators.kfac.columns import Columns
from hodiff.operators.kfac.recorded_layers import Recorded
from hodiff.operators.per_example.layer_gradients import random_cotangent

# Errors of a model that does not support a batch of one of these inputs.
_UNFIT = (RuntimeError, ValueError, IndexError, KeyError, TypeError, AttributeError, AssertionError)


class BatchedGradients:
    """Gradients of examples by vmap of reverse mode, which must reproduce the evaluation of the batch.

    Args:
        recorded: The model's evaluation on the batch.
        bound: Binds the model at the point for other inputs.
        inputs: Inputs of the batch; tensors whose length is that of the outputs are split.
        leaves: Indices of the parameters to differentiate.

    Attributes:
        verified: The parameters whose gradients add up to those of the batch; empty if vmap does not support the model.
    """

    def __init__(
        self,
        recorded: Recorded,
        bound: Callable[[Any], BoundFunction],
        inputs: Any,
        leaves: Sequence[int],
    ):
        self._recorded, self._bound, self._inputs = recorded, bound, inputs
        self.verified = list(leaves)
        sums = _Sums(recorded, leaves)
        try:
            for start, stop in self._spans():
                outputs, rows = self._evaluate(sums.cotangent[None, start:stop], start, stop)
                if not _agree(outputs, recorded.outputs[start:stop], recorded.rounding):
                    raise _OtherOutputs
                sums.add([each[:, 0] for each in rows])
        except (*_UNFIT, HodiffError, _OtherOutputs):
            self.verified = []
            return
        self.verified = sums.verified()

    def pull(self, cotangents: Tensor) -> Iterator[tuple[int, int, list[Tensor]]]:
        """Yield first and last example, and their gradients (n, c, *shape) by parameter, for cotangents (c, N, ...)."""
        for start, stop in self._spans(len(cotangents)):
            yield start, stop, self._evaluate(cotangents[:, start:stop], start, stop)[1]

    def gradients(self, cotangents: Tensor, dtype: torch.dtype) -> dict[int, Tensor]:
        """Compute the gradients (N, c, *shape) of all examples."""
        leaves, count = self._recorded.leaves, self._recorded.outputs.shape[0]
        found = {
            i: torch.empty(count, len(cotangents), *leaves[i].shape, dtype=dtype, device=leaves[i].device)
            for i in self.verified
        }
        for start, stop, rows in self.pull(cotangents):
            for i, each in zip(self.verified, rows, strict=True):
                found[i][start:stop] = each
        return found

    @property
    def bytes_each(self) -> int:
        """Bytes of the examples' gradients for one more column."""
        return self._recorded.graph_bytes + sum(self._recorded.leaves[i].nbytes for i in self.verified)

    def _spans(self, columns: int = 1) -> Iterator[tuple[int, int]]:
        count = len(self._recorded.outputs)
        graph = self._recorded.graph_bytes // max(1, count)
        rows = sum(self._recorded.leaves[i].nbytes for i in self.verified)
        size = resolve_chunk_size("auto", count, graph + columns * (graph + rows), self._recorded.outputs.device)
        return iter(spans(count, size))

    def _evaluate(self, cotangents: Tensor, start: int, stop: int) -> tuple[Tensor, list[Tensor]]:
        """Return outputs (n, 1, ...) and gradients (n, c, *shape) of some examples, for cotangents (c, n, ...)."""
        count, leaves = len(self._recorded.outputs), [each.detach() for each in self._recorded.leaves]
        flat, spec = pytree.tree_flatten(self._inputs)
        split = [_is_split(each, count) for each in flat]

        def one(vectors: Tensor, *parts: Tensor) -> tuple[Tensor, list[Tensor]]:
            given = iter(parts)
            example = [next(given)[None] if is_part else each for each, is_part in zip(flat, split, strict=True)]
            function = self._bound(pytree.tree_unflatten(example, spec))

            def outputs_at(chosen: list[Tensor]) -> Tensor:
                moved = list(leaves)
                for i, leaf in zip(self.verified, chosen, strict=True):
                    moved[i] = leaf
                outputs: Tensor = function(moved, Corrections(lean=True, many=True) if function.correct else None)[0]
                return outputs

            outputs, pull = torch.func.vjp(outputs_at, [leaves[i] for i in self.verified])[:2]
            return outputs, list(torch.func.vmap(pull)(vectors[:, None])[0])

        parts = [each[start:stop] for each, is_part in zip(flat, split, strict=True) if is_part]
        found: tuple[Tensor, list[Tensor]] = torch.func.vmap(one, in_dims=(1, *[0] * len(parts)))(cotangents, *parts)
        return found


class _OtherOutputs(Exception):  # noqa: N818 - it is no error, and ends the verification
    """An example alone has other outputs than in the batch."""


class _Sums:
    """Sums of the examples' gradients, for one random cotangent, to compare with those of the batch."""

    def __init__(self, recorded: Recorded, leaves: Sequence[int]):
        self.cotangent = random_cotangent(recorded.outputs)
        self._leaves, self._eps = list(leaves), recorded.rounding
        self._true = recorded.pull_leaves(self.cotangent[None], leaves)
        self._found = [torch.zeros_like(each) for each in self._true]
        self._terms = [0.0] * len(leaves)

    def add(self, rows: Sequence[Tensor]) -> None:
        """Add gradients (n, *shape) of some examples."""
        for i, each in enumerate(rows):
            self._found[i] += each.sum(0)
            self._terms[i] += float(each.reshape(len(each), -1).norm(dim=1).sum())

    def verified(self) -> list[int]:
        """Return the parameters whose gradients add up."""
        return [
            leaf
            for leaf, its, true, terms in zip(self._leaves, self._found, self._true, self._terms, strict=True)
            # Rounding is relative to the terms of the sum.
            if (its - true).norm() <= self._eps**0.5 * true.norm() + min(100 * self._eps, 0.02) * terms
        ]


class SeparateGradients:
    """Evaluations of the examples one by one, which must reproduce the evaluation of the batch.

    Args:
        recorded: The model's evaluation on the batch.
        bound: Binds the model at the point for other inputs.
        inputs: Inputs of the batch; tensors whose length is that of the outputs are split.
        leaves: Indices of the parameters to differentiate.
        progress: Whether to show a progress bar.
    """

    def __init__(
        self,
        recorded: Recorded,
        bound: Callable[[Any], BoundFunction],
        inputs: Any,
        leaves: Sequence[int],
        *,
        progress: bool = False,
    ):
        self._recorded, self._bound, self._inputs = recorded, bound, inputs
        self._leaves, self._progress = list(leaves), progress
        self._count = len(recorded.outputs)

    def each(self, visit: Callable[[int, Recorded], None]) -> list[int]:
        """Evaluate every example, and return the leaves whose gradients add up to those of the batch."""
        outputs, sums = self._recorded.outputs, _Sums(self._recorded, self._leaves)
        for n in tqdm(range(self._count), unit=" examples", disable=not self._progress):
            one = self._example(n)
            if one is None or not _agree(one.outputs, outputs[n : n + 1], self._recorded.rounding):
                return []
            sums.add(one.pull_leaves(sums.cotangent[None, n : n + 1], self._leaves))
            visit(n, one)
        return sums.verified()

    def _example(self, n: int) -> Recorded | None:
        try:
            return Recorded(self._bound(example_of(self._inputs, n, self._count)), nn.Identity(), ())
        except _UNFIT:
            return None


def example_of(inputs: Any, n: int, count: int) -> Any:
    """Return the inputs of one example, as a batch of one."""

    def part(each: Tensor) -> Tensor:
        return each[n : n + 1] if _is_split(each, count) else each

    return pytree.tree_map_only(Tensor, part, inputs)


def squares_of(
    recorded: Recorded, columns: Columns, leaves: Sequence[int], chunk_size: int | str | None, dtype: torch.dtype
) -> list[Tensor]:
    """Compute the sums over columns of squared gradients, for one evaluation and some of its parameters."""
    some = [recorded.leaves[i] for i in leaves]
    totals = [torch.zeros_like(leaf, dtype=dtype) for leaf in some]
    bytes_each = recorded.graph_bytes + sum(leaf.nbytes for leaf in some)
    size = resolve_chunk_size(chunk_size, len(columns), bytes_each, recorded.outputs.device)
    for start, stop in spans(len(columns), size):
        for total, rows in zip(totals, recorded.pull_leaves(columns.chunk(start, stop), leaves), strict=True):
            total += rows.to(dtype).square().sum(0)
    return totals


class ColumnsOfOne:
    """Columns of one example as vectors of the whole batch, zero at the other examples.

    Args:
        columns: Columns of all examples.
        n: The example.
        count: The number of examples.
    """

    def __init__(self, columns: Columns, n: int, count: int):
        self._one, self._n, self._count = columns.of_example(n), n, count

    def __len__(self) -> int:
        return len(self._one)

    def chunk(self, start: int, stop: int) -> Tensor:
        """See `Columns`."""
        one = self._one.chunk(start, stop)
        vectors = one.new_zeros(len(one), self._count, *one.shape[2:])
        vectors[:, self._n] = one[:, 0]
        return vectors

    def of_example(self, n: int) -> Columns:
        """See `Columns`."""
        assert n == self._n
        return self._one


def _is_split(value: Any, count: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and len(value) == count


def _agree(found: Tensor, expected: Tensor, eps: float) -> bool:
    """Whether the outputs of examples are those that they have in the batch."""
    found = found.reshape(expected.shape) if found.numel() == expected.numel() else found
    if found.shape != expected.shape:
        return False
    apart, size = (
        (each.flatten(1) if each.dim() > 1 else each[:, None]).norm(dim=1) for each in (found - expected, expected)
    )
    return bool((apart <= eps**0.5 * (1 + size)).all())
