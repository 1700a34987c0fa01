"""View of any operator or matrix for estimators: size, dtype, and products, which are counted."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from hodiff.common.chunks import resolve_chunk_size, spans
from hodiff.common.options import require_bool
from hodiff.common.overriding import is_moving
from hodiff.common.trees import describe, one_hot_rows
from hodiff.distributed.vectors import reduce_over
from hodiff.errors import InputError
from hodiff.estimators.results import norms_of, precise
from hodiff.torch_internals.autograd.differentiation import is_observed

Apply = Callable[[Tensor], Tensor]

# Ratio of an operator's rounding to its dtype's from which on it counts as another dtype's, the largest such rounding,
# and the allowed difference of two products of one vector.
FEWER, COARSEST, REPEATED = 256.0, 0.1, 1e-3
# Limits of products in float64, whose squares and sums of squares neither overflow nor vanish.
TINY, HUGE = 1e-140, 1e140


@dataclass(eq=False)
class View:
    """Operator as used by the public function `caller`, with working dtype `dtype` and counted products.

    `domain` and `codomain` are the spaces of a hodiff operator, which support pytrees; None for any other operator.
    """

    caller: str
    shape: tuple[int, int]
    dtype: torch.dtype
    device: torch.device
    rounding: float
    chunk_size: int | str | None
    apply: Apply = field(repr=False)
    apply_transposed: Apply | None = field(repr=False)
    domain: Any = field(default=None, repr=False)
    codomain: Any = field(default=None, repr=False)
    products: int = 0
    measured: bool = False
    bar: Any = field(default=None, repr=False)

    @property
    def n(self) -> int:
        """Size of a vector; of its local part if vectors are sharded over ranks."""
        return self.shape[1]

    @property
    def shards(self) -> Any:
        """How vectors lie on the ranks of a device mesh; None if they lie on one process."""
        return getattr(self.domain, "shards", None)

    @property
    def total(self) -> int:
        """Number of rows and columns of a square matrix."""
        return self.n if self.shards is None else int(self.shards.count)

    @cached_property
    def _shares(self) -> Tensor:
        """Share with which each local number counts, (n, 1)."""
        shares: Tensor = self.shards.weights(self.domain.sizes, torch.empty(0, dtype=self.dtype, device=self.device))
        return precise(shares)

    def _summed(self, local: Tensor) -> Tensor:
        return local if self.shards is None else reduce_over(self.shards.mesh, local)

    def group_size(self, count: int, bytes_each: int) -> int:
        """Return how many of `count` columns are computed together; ranks that move data together agree on it."""
        size = resolve_chunk_size(self.chunk_size, count, bytes_each, self.device)
        if self.shards is None:
            return size
        return int(reduce_over(self.shards.mesh, torch.tensor(size, device=self.device), "MIN"))

    def gram(self, a: Tensor, b: Tensor) -> Tensor:
        """Compute the inner products of all columns of two blocks, (j, k), as one sum over ranks."""
        if self.shards is None:
            return a.T @ b
        return self._summed(precise(a.T @ (self._shares.to(b.dtype) * b))).to(b.dtype)

    def dots(self, a: Tensor, b: Tensor) -> Tensor:
        """Compute the inner product of each column of a with the same column of b, (k,), in high precision."""
        terms = precise(a) * b
        return terms.sum(0) if self.shards is None else self._summed((self._shares * terms).sum(0))

    def norms(self, block: Tensor) -> Tensor:
        """Compute the norms of columns in high precision, on the operator's device."""
        return norms_of(block) if self.shards is None else self.dots(block, block).sqrt()

    def rough_norms(self, block: Tensor) -> Tensor:
        """Compute the norms of columns in float32 if that is their dtype, which is faster, and the squares have it."""
        if self.shards is None and block.dtype == torch.float32:
            found = torch.linalg.vector_norm(block, dim=0)
            if bool(((found > 1e-15) & (found < 1e18)).all()):
                return found
        return self.norms(block)

    def units(self, start: int, stop: int) -> Tensor:
        """Return the unit vectors `start` to `stop` of all `total`, as columns."""
        like = torch.empty(self.n, dtype=self.dtype, device=self.device)
        return one_hot_rows(start, stop, like).T if self.shards is None else self.shards.units(start, stop, like)

    def whole(self, block: Tensor) -> Tensor:
        """Return all rows of products on this process, (total, k)."""
        return block if self.shards is None else self.shards.whole(block, self.domain.shapes)

    def qr(self, block: Tensor) -> tuple[Tensor, Tensor]:
        """Factorize a block into orthonormal columns and a triangle that every rank has."""
        if self.shards is None:
            return torch.linalg.qr(block)
        return self.shards.factorized(block, self.domain.sizes)

    def require_whole(self, what: str, remedy: str) -> None:
        """Raise if vectors are sharded over ranks."""
        if self.shards is not None:
            raise InputError(
                f"{self.caller}: {what} needs whole vectors on one process, and the parameters are sharded over ranks "
                f"({self.total:,} numbers); {remedy}."
            )

    def default_tolerance(self, double: float) -> float:
        """Return a relative tolerance: `double` in float64, and a tolerance within reach of less precise products."""
        exact = self.dtype == torch.float64 and self.rounding <= torch.finfo(self.dtype).eps
        return double if exact else max(1e-4, 6 * self.rounding)

    def finds_coarser(self) -> bool:
        """Measure, once, whether products have fewer digits than their dtype; if so, update `rounding`.

        A model may compute in float32 within float64, or by autocast. The sum of two products then differs from the
        product of the sum by that rounding. Call this when a tolerance is missed, as it takes four products.

        Returns:
            Whether `rounding` has changed.
        """
        if self.measured:
            return False
        self.measured = True
        generator = torch.Generator().manual_seed(0)

        def drawn(count: int) -> Tensor:
            numbers = torch.randn(count, dtype=torch.float64, generator=generator, device=generator.device)
            return numbers.to(self.device, self.dtype)

        v, w = (drawn(self.n) if self.shards is None else self.shards.draw(drawn) for _ in "vw")
        first, second, both, again = (precise(self.matmat(each[:, None])) for each in (v, w, v + w, v))
        size = self.norms(both).item()
        noise = self.norms(first + second - both).item()
        # Products that differ for other reasons, such as dropout, do not measure rounding.
        if (
            self.norms(again - first).item() > REPEATED * size
            or not FEWER * self.rounding * size < noise <= COARSEST * size
        ):
            return False
        self.rounding = noise / size
        return True

    @property
    def precision(self) -> str:
        """Sentence about a missed tolerance if products have fewer digits than their dtype, or an empty string."""
        if self.rounding <= FEWER * torch.finfo(self.dtype).eps:
            return ""
        name = str(self.dtype).removeprefix("torch.")
        return (
            f" Products come in {name} and are exact to {self.rounding:.1g} only, as where a part of the model or of "
            f"its loss computes in less: convert that part to {name}, leave autocast, or raise tol."
        )

    def matmat(self, block: Tensor) -> Tensor:
        """Multiply with each column of a block (n, k)."""
        return self._by_groups(self.apply, block, self.shape[0])

    def rmatmat(self, block: Tensor) -> Tensor | None:
        """Multiply the transpose with each column of a block (m, k); None if the operator has no transpose."""
        if self.apply_transposed is None:
            return None
        try:
            return self._by_groups(self.apply_transposed, block, self.shape[1])
        except (NotImplementedError, InputError):
            # A transpose of SciPy's or hodiff's operators may not support products.
            self.apply_transposed = None
            return None

    def _by_groups(self, apply: Apply, block: Tensor, rows: int) -> Tensor:
        count = block.shape[1]
        if count == 0:
            return block.new_zeros(rows, 0)
        size = count if count == 1 else self.group_size(count, sum(self.shape) * self.dtype.itemsize)
        results = []
        for start, stop in spans(count, size):
            group = block if size >= count else block[:, start:stop]
            group = group.to(self.device, self.dtype)
            result = apply(group)
            self._require_product(result, group, rows)
            results.append(result.detach().to(self.device, self.dtype))
            self.products += stop - start
            if self.bar is not None:
                self.bar.update(stop - start)
        return results[0] if len(results) == 1 else torch.cat(results, 1)

    def _require_product(self, result: Any, block: Tensor, rows: int) -> None:
        shape = (rows, block.shape[1])
        if not isinstance(result, Tensor) or result.shape != shape:
            raise InputError(
                f"{self.caller}: A: expected a product of shape {shape} from a block of {shape[1]} columns, "
                f"got {describe(result)}; define A @ v for blocks (n, k)."
            )
        require_constant(self.caller, "A", result)
        largest = result.detach().abs().amax() if result.numel() else result.new_zeros(())
        if self.shards is not None:
            # All ranks raise, or none.
            finite = reduce_over(self.shards.mesh, largest.isfinite().to(torch.float64), "MIN")
            largest = reduce_over(self.shards.mesh, largest.to(torch.float64).nan_to_num(), "MAX") / finite
        size = float(largest)
        if not math.isfinite(size):
            raise InputError(
                f"{self.caller}: A: expected finite products, got inf or nan; check the values, the gradient and the "
                "dtype at the point where the operator was created."
            )
        if not TINY < size < HUGE and size and self.shards is None:
            self._require_moderate(size, block)

    def _require_moderate(self, size: float, block: Tensor) -> None:
        """Raise if squares of products are no numbers; one of an operator's columns may be tiny."""
        size /= float(block.abs().amax())
        dense = int(block[:, 0].count_nonzero()) > len(block) // 2
        if size > HUGE or (size < TINY and dense):
            raise InputError(
                f"{self.caller}: A: expected products between {TINY:.0e} and {HUGE:.0e}, because methods square them, "
                f"got {size:.1g}; multiply the function by a constant, and divide the result by it."
            )

    @contextmanager
    def counting(self, total: int | None, progress: bool) -> Iterator[None]:
        """Show a progress bar of products, of `total` if the number is known."""
        require_bool(self.caller, "progress", progress)
        with tqdm(total=total, unit=" products", disable=not progress) as self.bar:
            yield
        self.bar = None


def require_constant(caller: str, argument: str, tensor: Tensor) -> None:
    """Raise if a transform differentiates or batches a tensor, because it would treat estimates as constants."""
    if is_observed(tensor) or is_moving(tensor):
        raise InputError(
            f"{caller}: {argument}: expected constants, got a tensor that an outer transform differentiates or "
            "batches; estimates have no derivative. Call it outside of the transform, or use torch.linalg for small "
            "matrices and "
            "hodiff.implicit.linear_solve for systems, which are differentiable."
        )
