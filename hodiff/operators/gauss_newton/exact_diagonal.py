r"""Exact diagonals of $J^\top M J$ from gradients of the examples, without products with unit vectors of parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hodiff.common.chunks import resolve_chunk_size, spans
from hodiff.common.randomness import RandomState
from hodiff.common.trees import one_hot_rows, unflatten
from hodiff.derivatives.bound_function import leave_inference_mode
from hodiff.derivatives.route_choice import refused
from hodiff.estimators import DiagonalEstimate
from hodiff.operators.data.determinism import read_unchanged
from hodiff.operators.kfac.columns import (
    Columns,
    Given,
    Root,
    View,
    blocks_of,
    eigen_of,
    is_separate,
    negative_part,
    root_of,
)
from hodiff.operators.kfac.recorded_layers import OutputFormError
from hodiff.operators.linearized.kept_linearizations import Leaves
from hodiff.operators.linearized.likelihoods import has_classes, known_likelihood
from hodiff.operators.linearized.model_loss import ModelLossOperator, OuterProducts, OutputMatrix, pair
from hodiff.operators.linearized.recorded_model import RecordedModel
from hodiff.operators.per_example.example_gradients import ExampleGradients, module_of
from hodiff.torch_internals.threads import one_thread_at_a_time


@dataclass
class DiagonalOfBatch:
    """The diagonal of one batch, in place of a linearization.

    Attributes:
        diagonal: The diagonal (n,).
        value: The model's outputs.
        count: Number of vectors that were pulled back.
    """

    diagonal: Tensor
    value: Leaves
    count: int
    bytes_each: int = 0
    nbytes: int = 0

    def products(self, tangents: Leaves) -> Leaves:
        """See `Linearization`."""
        raise AssertionError("a diagonal has no products")


class ModelDiagonal(ModelLossOperator):
    r"""Base class of operators whose matrix on the outputs M gives the diagonal of $J^\top M J$ without n products.

    With a root $M_n = \sum_s s_n s_n^\top$ for each example n, the diagonal is $\sum_{n,s} (J_n^\top s_n)^2$, one
    gradient of the batch for each column s. If M couples examples, or the outputs are no single tensor, it is
    $\sum_j (J^\top e_j) \circ (J^\top M e_j)$ over all outputs j.
    """

    @leave_inference_mode
    @read_unchanged
    def _exact_diagonal(self, chunk_size: int | str | None, progress: bool) -> DiagonalEstimate:
        """See `LinearOperator.diagonal`."""
        self.domain.require_whole("diagonal", 'method="hutchinson"')
        self._point.require_unchanged(type(self).__name__)
        size, counts = self.chunk_size if chunk_size == "auto" else chunk_size, [0]

        def diagonal(each: DiagonalOfBatch) -> Tensor:
            counts.append(each.count)
            return each.diagonal

        linearize = partial(self._diagonal_at, chunk_size=size, progress=progress)
        batches = self._kept.again(partial(self._at, linearize=linearize))
        # Hooks of the model record its layers for one thread at a time.
        with one_thread_at_a_time(), torch.no_grad(), refused(type(self).__name__):
            total = self._sum(diagonal, self.shape[:1], batches)
        return DiagonalEstimate(total, torch.zeros_like(total), max(counts), "exact")

    def _diagonal_at(self, args: tuple[Any, ...], chunk_size: int | str | None, progress: bool) -> DiagonalOfBatch:
        inputs, targets = pair(args[0])
        draw = RandomState(self.leaves)
        bound = partial(self._bound, self.leaves)
        try:
            module = None if any(self.domain.joined) else module_of(self._functions[0], self.domain.labels)
            fixed = self._draw_seed is not None
            gradients = ExampleGradients(
                bound, inputs, module, self.domain.labels, self.dtype, repeatable=not fixed, progress=progress
            )
        except OutputFormError:
            with draw.replayed():
                return self._over_all_outputs(RecordedModel(bound(inputs)), targets, chunk_size)
        outputs = gradients.outputs
        if not outputs.numel():
            return DiagonalOfBatch(self._flat([torch.zeros_like(leaf) for leaf in self.leaves]), (outputs,), 0)
        matrix = self._matrix(outputs, targets)
        roots = self._roots(matrix, outputs)
        if roots is None:
            pull = gradients.recorded.pull_leaves
            everything = range(len(self.leaves))
            bytes_each = gradients.recorded.graph_bytes
            return self._by_units(matrix, (outputs,), lambda u: pull(u[0], everything), bytes_each, chunk_size)
        totals = [torch.zeros_like(leaf, dtype=self.dtype) for leaf in self.leaves]
        for sign, columns in roots:
            for total, its in zip(totals, gradients.squares(columns, chunk_size), strict=True):
                total.add_(its, alpha=sign)
        return DiagonalOfBatch(self._flat(totals), (outputs,), gradients.count)

    def _roots(self, matrix: OutputMatrix, outputs: Tensor) -> list[tuple[float, Columns]] | None:
        """Return columns with signs that add up to the matrix; None if it couples examples."""
        if isinstance(matrix, OuterProducts):
            ((gradients,), factor) = matrix.gradients, float(matrix.factor)
            return [(1.0, Given(gradients * factor**0.5))]

        def products(vectors: Tensor) -> Tensor:
            return matrix.products((vectors,))[0]

        known, classes = known_likelihood(self.loss) is not None, has_classes(self.loss)
        # Outputs (C,) are the classes of a single example.
        if (classes and outputs.dim() == 1) or (not known and not is_separate(products, outputs)):
            return None
        view = View(outputs.shape, classes, known)
        blocks = blocks_of(products, outputs, view)
        values, vectors = eigen_of(blocks)
        signs = (1.0, -1.0) if negative_part(values, blocks) else (1.0,)
        return [(sign, Root(root_of(sign * values, vectors, blocks), view)) for sign in signs]

    def _over_all_outputs(self, model: RecordedModel, targets: Any, chunk_size: int | str | None) -> DiagonalOfBatch:
        matrix = self._matrix(unflatten(list(model.outputs), model.spec), targets)
        return self._by_units(matrix, model.outputs, model.pull_many, model.bytes_each, chunk_size)

    def _by_units(
        self,
        matrix: OutputMatrix,
        outputs: Leaves,
        pull: Callable[[Leaves], Sequence[Tensor]],
        bytes_each: int,
        chunk_size: int | str | None,
    ) -> DiagonalOfBatch:
        r"""Compute $\sum_j (J^\top e_j) \circ (J^\top M e_j)$ over all outputs j."""
        totals = [torch.zeros_like(leaf, dtype=self.dtype) for leaf in self.leaves]
        bytes_each += 2 * sum(leaf.nbytes for leaf in self.leaves)
        for index, output in enumerate(outputs):
            count = output.numel()
            for start, stop in spans(count, resolve_chunk_size(chunk_size, count, bytes_each, self.device)):
                units = one_hot_rows(start, stop, output)
                vectors = tuple(
                    units if i == index else other.new_zeros(stop - start, *other.shape)
                    for i, other in enumerate(outputs)
                )
                for total, left, right in zip(totals, pull(vectors), pull(matrix.products(vectors)), strict=True):
                    total += (left.to(self.dtype) * right.to(self.dtype)).sum(0)
        return DiagonalOfBatch(self._flat(totals), outputs, 2 * sum(output.numel() for output in outputs))

    def _flat(self, leaves: Sequence[Tensor]) -> Tensor:
        return self.domain.join([leaf[None] for leaf in leaves], 1)[:, 0]
