"""Gradients of the examples without layers: each example evaluated alone, or all together with one example's output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from tqdm.auto import tqdm

from hodiff.common.chunks import resolve_chunk_size, spans
from hodiff.derivatives.bound_function import BoundFunction
from hodiff.operators.kfac.columns import Columns
from hodiff.operators.kfac.recorded_layers import Recorded
from hodiff.operators.per_example.layer_gradients import random_cotangent

# Errors of a model that does not support a batch of one of these inputs.
_UNFIT = (RuntimeError, ValueError, IndexError, KeyError, TypeError, AttributeError, AssertionError)


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
        outputs = self._recorded.outputs
        cotangent = random_cotangent(outputs)
        true = self._recorded.pull_leaves(cotangent[None], self._leaves)
        found, norms = [torch.zeros_like(each) for each in true], [0.0] * len(true)
        eps = self._recorded.rounding
        for n in tqdm(range(self._count), unit=" examples", disable=not self._progress):
            one = self._example(n)
            if one is None or not _agree(one.outputs, outputs[n : n + 1], eps):
                return []
            for i, gradient in enumerate(one.pull_leaves(cotangent[None, n : n + 1], self._leaves)):
                found[i] += gradient
                norms[i] += float(gradient.norm())
            visit(n, one)
        return [
            leaf
            for leaf, its, expected, terms in zip(self._leaves, found, true, norms, strict=True)
            # Rounding is relative to the terms of the sum.
            if (its - expected).norm() <= eps**0.5 * expected.norm() + min(100 * eps, 0.02) * terms
        ]

    def _example(self, n: int) -> Recorded | None:
        try:
            return Recorded(self._bound(example_of(self._inputs, n, self._count)), nn.Identity(), ())
        except _UNFIT:
            return None


def example_of(inputs: Any, n: int, count: int) -> Any:
    """Return the inputs of one example, as a batch of one."""

    def part(each: Tensor) -> Tensor:
        return each[n : n + 1] if each.dim() and len(each) == count else each

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


def _agree(one: Tensor, expected: Tensor, eps: float) -> bool:
    """Whether the outputs of an example are those that it has in the batch."""
    return one.shape == expected.shape and bool((one - expected).norm() <= eps**0.5 * (1 + expected.norm()))
