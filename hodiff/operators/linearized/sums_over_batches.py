"""Sums over batches, weights and ranks: products, matrix and diagonal of an operator that is linearized on batches."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from hodiff.common.chunks import in_threads, resolve_chunk_size, spans
from hodiff.common.options import require_bool, require_chunk_size
from hodiff.common.running_pass import running_pass
from hodiff.common.trees import strided
from hodiff.derivatives.bound_function import leave_inference_mode
from hodiff.derivatives.route_choice import raise_if_unavailable, refused
from hodiff.distributed.exchanges import leave_note
from hodiff.estimators import DiagonalEstimate
from hodiff.kernels.transposed_blocks import turned
from hodiff.operators.data.batches import Batch, Batches, Size
from hodiff.operators.data.determinism import read_unchanged
from hodiff.operators.data.distributed import JointBatches, sum_over_ranks
from hodiff.operators.data.watched_point import Point
from hodiff.operators.linear.linear_operator import LinearOperator
from hodiff.operators.linearized.kept_linearizations import KeptLinearizations, Leaves, Linearization
from hodiff.torch_internals.autograd.batching import is_legacy_batched
from hodiff.torch_internals.autograd.differentiation import only_reverse_mode
from hodiff.torch_internals.interception import autocasts, dispatch_mode_count, function_mode_count


class SumsOverBatches(LinearOperator):
    """Operator whose products are sums over the linearizations of batches.

    Attributes:
        threads: Number of groups of columns that are computed at once, where the linearization allows it.
    """

    threads = 1
    batches: Batches
    chunk_size: int | str | None
    process_group: Any
    _joint: JointBatches | None
    _kept: KeptLinearizations
    _point: Point

    @abstractmethod
    def _at(
        self, batch: Batch, linearize: Callable[[tuple[Any, ...]], Linearization] | None = None
    ) -> tuple[Linearization, Size]:
        """Linearize at the point on a batch; also return the size of the batch."""

    @leave_inference_mode
    @read_unchanged
    def multiply(self, block: Tensor) -> Tensor:
        """Sum the products over batches."""
        self._point.require_unchanged(type(self).__name__)
        if not block.shape[1]:
            return block.new_zeros(self.shape[0], 0)
        with torch.no_grad():
            try:  # without the context `refused`, which costs more than the rest of this method
                return self._sum(lambda each: self._columns(each, block), block.shape)
            except Exception as error:
                leave_note(error)
                raise_if_unavailable(error, type(self).__name__)
                raise

    @leave_inference_mode
    @read_unchanged
    def to_dense(self, *, chunk_size: int | str | None = "auto", progress: bool = False) -> Tensor:
        """Compute the matrix as `LinearOperator.to_dense` does, but linearize every batch only once."""
        require_chunk_size("to_dense", "chunk_size", chunk_size)
        require_bool("to_dense", "progress", progress)
        self.domain.require_whole("to_dense", "products A @ v, or hodiff.estimators")
        self._point.require_unchanged(type(self).__name__)
        with torch.no_grad(), refused(type(self).__name__):
            return self._sum(lambda each: self._dense(each, chunk_size, progress), self.shape)

    def _dense(self, linearization: Linearization, chunk_size: int | str | None, progress: bool) -> Tensor:
        return self._by_columns(lambda block: self._columns(linearization, block), chunk_size, progress)

    @leave_inference_mode
    @read_unchanged
    def _exact_diagonal(self, chunk_size: int | str | None, progress: bool) -> DiagonalEstimate:
        """See `LinearOperator.diagonal`; every batch is linearized only once."""
        self.domain.require_whole("diagonal", 'method="hutchinson"')
        self._point.require_unchanged(type(self).__name__)
        count = self.chunk_size if chunk_size == "auto" else chunk_size
        with torch.no_grad(), refused(type(self).__name__):
            total = self._sum(lambda each: self._diagonal(each, count, progress), self.shape[:1])
        return DiagonalEstimate(total, torch.zeros_like(total), len(total), "exact")

    def _diagonal(self, linearization: Linearization, chunk_size: int | str | None, progress: bool) -> Tensor:
        """Compute the diagonal of one batch by products with unit vectors."""
        n = self.shape[0]
        found = torch.empty(n, dtype=self.dtype, device=self.device)
        size = resolve_chunk_size(chunk_size, n, linearization.bytes_each + self._bytes_each(), self.device)
        with tqdm(total=n, unit=" columns", disable=not progress) as bar:
            for start, stop in spans(n, size):
                block = torch.zeros(n, stop - start, dtype=self.dtype, device=self.device)
                block.diagonal(offset=-start).fill_(1)
                found[start:stop] = self._columns(linearization, block)[start:stop].diagonal()
                bar.update(stop - start)
        return found

    def _flat_product(self, v: Tensor) -> Tensor:
        """Multiply as `LinearOperator` does; the leaves of a plain vector take no detour by blocks of columns."""
        # Not `isinstance` of a protocol, which takes as long as a small product.
        product = getattr(self._kept.alone, "product", None)
        if product is None or not self._is_plain(v):
            return super()._flat_product(v)
        return self._vector_product(product, v)

    @leave_inference_mode
    @read_unchanged
    def _vector_product(self, product: Callable[[Sequence[Tensor]], Leaves], v: Tensor) -> Tensor:
        self._point.require_unchanged(type(self).__name__)
        with torch.no_grad():
            try:
                products = product(self.domain.split_vector(v))
            except Exception as error:
                leave_note(error)
                raise_if_unavailable(error, type(self).__name__)
                raise
            # Joining copies, so that the result shares no memory with the vector or with the recorded graph.
            return torch.cat([strided(each).reshape(-1) for each in products])

    def _is_plain(self, v: Tensor) -> bool:
        """Whether a vector needs no conversion, and nothing but autograd can see the product, which has no graph."""
        space = self.domain
        return (
            type(v) is Tensor
            and v.shape == (space.size,)
            and v.dtype is space.dtype
            and v.device == space.device
            and space.is_uniform
            and self.process_group is None
            and not (v.requires_grad and torch.is_grad_enabled())
            and only_reverse_mode()
            and running_pass() is None
            and not is_legacy_batched(v)
            and v.is_contiguous()
        )

    def _sum(
        self,
        product: Callable[[Any], Tensor],
        shape: tuple[int, ...],
        batches: Iterable[tuple[Any, Size]] | None = None,
    ) -> Tensor:
        """Sum results of one shape over batches and ranks, weighted, or average them; the result is a new tensor.

        Args:
            product: Computes the result for one batch.
            shape: Shape of the results.
            batches: What `product` takes, and the size, for each batch; the linearizations by default.

        Returns:
            The sum or the mean.
        """
        if batches is None and self.process_group is None and (kept := self._kept.alone) is not None:
            return product(kept)
        total: Tensor | None = None
        sizes, count = Size(), 0
        for linearization, size in self._kept.each(self._at) if batches is None else batches:
            # Products of 16-bit leaves are joined as float32, and so are summed in float32.
            one = product(linearization)
            if total is None:
                total = one
            else:
                if count == 1 and sizes.weight != 1.0:
                    total = sizes.weight * total
                total.add_(one, alpha=size.weight)
            sizes += size
            count += 1
            del linearization, one
        if total is None:
            # A rank without data must take part, because the other ranks wait for it.
            total = torch.zeros(shape, dtype=self.dtype, device=self.device)
        alone = self.process_group is None or (self._joint is not None and self._joint.is_sum)
        if count == 1:
            if alone and self.batches.reduction == "mean" and sizes.divisor:
                # The mean over a single batch.
                return total
            total = total if sizes.weight == 1.0 else sizes.weight * total
        if not alone:
            total, sizes = sum_over_ranks(total, sizes, self.process_group)
        if not sizes.divisor:
            raise self.batches.empty()
        return total / sizes.weight if self.batches.reduction == "mean" and sizes.weight != 1.0 else total

    def _columns(self, linearization: Linearization, block: Tensor) -> Tensor:
        """Compute one batch's products, in groups of columns that fit the memory budget."""
        k = block.shape[1]
        size = 1 if k == 1 else resolve_chunk_size(self.chunk_size, k, linearization.bytes_each, self.device)
        if self._joint is not None and k > 1:
            size = self._joint.least(size)
        # Transpose once, because splitting into leaves and groups would read the whole block each time.
        rows = turned(block)
        if size == k:
            return self.codomain.join(linearization.products(self.domain.split_rows(rows)), k)
        products = torch.empty(k, self.shape[0], dtype=self.codomain.dtype, device=self.codomain.device)

        def write(span: tuple[int, int]) -> None:
            start, stop = span
            leaves = linearization.products(self.domain.split_rows(rows[start:stop]))
            self.codomain.join(leaves, stop - start, out=products[start:stop])

        for _ in in_threads(write, list(spans(k, size)), self._threads(linearization)):
            pass
        return products.t()

    def _threads(self, linearization: Linearization) -> int:
        if self.threads == 1 or not getattr(linearization, "allows_threads", False):
            return 1
        # Modes, autocast and passes belong to the calling thread.
        watched = function_mode_count() or dispatch_mode_count() or autocasts() or running_pass() is not None
        return 1 if watched or not only_reverse_mode() else self.threads
