"""Gradients of all examples of a batch, for each parameter in the cheapest way that was verified."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from hodiff.common.chunks import resolve_chunk_size, spans
from hodiff.derivatives.bound_function import BoundFunction
from hodiff.errors import InputError
from hodiff.operators.kfac.columns import Columns
from hodiff.operators.kfac.layers import layer_blocks
from hodiff.operators.kfac.recorded_layers import Recorded
from hodiff.operators.per_example.layer_gradients import LayerGradients, random_cotangent
from hodiff.operators.per_example.separate_gradients import (
    BatchedGradients,
    ColumnsOfOne,
    SeparateGradients,
    squares_of,
)
from hodiff.recompute.reachable import modules_in


class ExampleGradients:
    r"""Gradients $J_n^\top u_n$ of the examples of a batch, for cotangents u of the model's outputs.

    Parameters of layers follow from the layers' inputs and the gradients of their outputs. Other parameters take an
    evaluation of each example alone, by vmap if the model supports it. If that does not reproduce the batch, as with
    batch norm in training mode, the batch is pulled back with the outputs of one example at a time.

    Args:
        bound: Binds the model at the point, for given inputs.
        inputs: Inputs of the batch.
        model: The module, if the point is a dict of its parameters; else None.
        names: Names of the parameters.
        dtype: Dtype of the results.
        cotangent_of: Returns the cotangent of the outputs for which the formulas of layers are verified; a single
            cotangent suffices if no others follow.
        repeatable: Whether another evaluation of the model computes the same function.
        mixing: Whether examples may depend on each other; if false, the methods raise if they do.
        keep_rows: Whether `gradients` for the cotangent of `cotangent_of` follows.
        progress: Whether to show progress bars.

    Attributes:
        recorded: The model's evaluation on the batch.
        count: Number of vectors that were pulled back through the batch.
    """

    def __init__(
        self,
        bound: Callable[[Any], BoundFunction],
        inputs: Any,
        model: nn.Module | None,
        names: Sequence[str],
        dtype: torch.dtype,
        *,
        cotangent_of: Callable[[Tensor], Tensor] = random_cotangent,
        repeatable: bool = True,
        mixing: bool = True,
        keep_rows: bool = False,
        progress: bool = False,
    ):
        function = bound(inputs)
        layers = layer_blocks(model, names) if model is not None else {}
        self.recorded = Recorded(function, nn.Identity() if model is None else model, layers, every=False)
        if not bool(self.recorded.outputs.isfinite().all()):
            raise InputError(
                f"{function.caller}: model: expected finite outputs, got NaN or infinity; look for the example whose "
                "inputs or outputs are not finite."
            )
        everything = range(len(function.leaves))
        self._layers = self._batched = self._separate = None
        if model is not None:
            self._layers = LayerGradients(self.recorded, model, layers, dtype, keep_rows=keep_rows)
            self._layers.verify(cotangent_of(self.recorded.outputs))
        self._rest = self._besides(everything)
        if self._rest and repeatable:
            batched = BatchedGradients(self.recorded, bound, inputs, self._rest)
            self._batched = batched if batched.verified else None
            self._rest = self._besides(everything)
        if self._rest and repeatable:
            self._separate = SeparateGradients(self.recorded, bound, inputs, self._rest, progress=progress)
        self._caller, self._names = function.caller, list(names)
        self._dtype, self._mixing, self._progress = dtype, mixing, progress
        self.count = 0

    def _besides(self, indices: Iterable[int]) -> list[int]:
        """Return the parameters that neither formulas nor vmap cover."""
        covered = {*(self._layers.leaves if self._layers else ()), *(self._batched.verified if self._batched else ())}
        return [i for i in indices if i not in covered]

    @property
    def outputs(self) -> Tensor:
        """The model's outputs."""
        return self.recorded.outputs

    def squares(self, columns: Columns, chunk_size: int | str | None) -> list[Tensor]:
        r"""Compute $\sum_{n,s} (J_n^\top s_n)^2$ over examples n and columns s, for each parameter."""
        totals = [torch.zeros_like(leaf, dtype=self._dtype) for leaf in self.recorded.leaves]
        if self._layers is not None:
            self._layers.add_squares(columns, chunk_size, totals, progress=self._progress)
        self._add_batched(columns, chunk_size, totals)
        self.count += len(columns)
        pending = self._add_separate(columns, chunk_size, totals) if self._separate is not None else self._rest
        if not pending:
            return totals
        self._require_mixing(pending)
        self.count += len(columns) * len(self.outputs)
        for n in tqdm(range(len(self.outputs)), unit=" examples", disable=not self._progress):
            some = ColumnsOfOne(columns, n, len(self.outputs))
            for i, its in zip(pending, squares_of(self.recorded, some, pending, chunk_size, self._dtype), strict=True):
                totals[i] += its
        return totals

    def gradients(self, cotangent: Tensor) -> list[Tensor]:
        """Compute the gradients (N, *shape) of the examples for each parameter."""
        leaves, count = self.recorded.leaves, len(self.outputs)
        rows = {i: torch.zeros(count, *leaves[i].shape, dtype=self._dtype, device=cotangent.device) for i in self._rest}

        def visit(n: int, one: Recorded) -> None:
            for i, its in zip(self._rest, one.pull_leaves(cotangent[None, n : n + 1], self._rest), strict=True):
                rows[i][n] = its[0]

        self._visit_all(visit)
        if self._layers is not None:
            rows |= self._layers.gradients(cotangent)
        if self._batched is not None:
            batched = self._batched.gradients(cotangent[None], self._dtype)
            rows |= {i: each[:, 0] for i, each in batched.items()}
        return [rows[i].reshape(count, *leaf.shape) for i, leaf in enumerate(leaves)]

    def squared_norms(self, cotangent: Tensor) -> Tensor:
        """Compute the squared norms (N,) of the examples' gradients."""
        total = torch.zeros(len(self.outputs), dtype=self._dtype, device=cotangent.device)

        def visit(n: int, one: Recorded) -> None:
            for its in one.pull_leaves(cotangent[None, n : n + 1], self._rest):
                total[n] += its.to(self._dtype).square().sum()

        self._visit_all(visit)
        if self._batched is not None:
            for start, stop, rows in self._batched.pull(cotangent[None]):
                for each in rows:
                    total[start:stop] += each.to(self._dtype).square().flatten(1).sum(1)
        return total if self._layers is None else total + self._layers.squared_norms(cotangent)

    def _visit_all(self, visit: Callable[[int, Recorded], None]) -> None:
        """Visit the examples one by one, and raise if they depend on each other."""
        verified = self._separate.each(visit) if self._separate is not None else []
        self._require_mixing([i for i in self._rest if i not in set(verified)])

    def _require_mixing(self, pending: Sequence[int]) -> None:
        if pending and not self._mixing:
            raise InputError(
                f"{self._caller}: model: expected independent examples, along the first dimension of inputs and "
                f"outputs, got gradients of {self._names[pending[0]] or 'x'!r} that differ if an example is evaluated "
                "alone; look for statistics over the batch, random numbers, or another order of dimensions."
            )

    def _add_batched(self, columns: Columns, chunk_size: int | str | None, totals: list[Tensor]) -> None:
        if self._batched is None:
            return
        size = resolve_chunk_size(chunk_size, len(columns), self._batched.bytes_each, self.outputs.device)
        for first, last in spans(len(columns), size):
            for _, _, rows in self._batched.pull(columns.chunk(first, last)):
                for i, each in zip(self._batched.verified, rows, strict=True):
                    totals[i] += each.to(self._dtype).square().sum((0, 1))

    def _add_separate(self, columns: Columns, chunk_size: int | str | None, totals: list[Tensor]) -> list[int]:
        """Add the squares for parameters outside of layers, and return those for which examples are not separate."""
        assert self._separate is not None
        sums = [torch.zeros_like(totals[i]) for i in self._rest]

        def visit(n: int, one: Recorded) -> None:
            found = squares_of(one, columns.of_example(n), self._rest, chunk_size, self._dtype)
            for total, its in zip(sums, found, strict=True):
                total += its

        verified = set(self._separate.each(visit))
        for i, total in zip(self._rest, sums, strict=True):
            if i in verified:
                totals[i] += total
        return [i for i in self._rest if i not in verified]


def module_of(model: Any, names: Sequence[str]) -> nn.Module | None:
    """Return a module that a model calls and whose parameters have these names, or None."""
    for module in (model,) if isinstance(model, nn.Module) else modules_in(model):
        if set(names) <= dict(module.named_parameters(remove_duplicate=False)).keys():
            return module
    return None
