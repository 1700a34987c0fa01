"""Results of estimators of a number or a diagonal.

Error or warning of an iteration that did not converge.

Sums in high precision, which cost little beside products.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from hodiff.displays import element, facts, number, numbers, page
from hodiff.errors import ConvergenceError, HodiffWarning


def precise(block: Tensor) -> Tensor:
    """Convert to float64, for sums and factorizations that cost little beside products; on MPS keep the dtype."""
    return block if block.device.type == "mps" else block.to(torch.float64)


def norms_of(block: Tensor) -> Tensor:
    """Compute the norms of columns in high precision, on the operator's device."""
    return torch.linalg.vector_norm(block, dim=0, dtype=block.dtype if block.device.type == "mps" else torch.float64)


def not_converged(message: str, result: Any, *, throw: bool) -> None:
    """Raise a `ConvergenceError` with the result, or warn if `throw` is false."""
    if throw:
        raise ConvergenceError(message, result)
    # The warning points past this function and the public one, to the user's line.
    warnings.warn(message, HodiffWarning, stacklevel=3)


@dataclass(frozen=True)
class Estimate:
    """Estimated number, with its errors and its cost.

    Attributes:
        value: Estimate.
        standard_error: Standard deviation, estimated from the same probes; 0 for a deterministic result.
        products: Number of products with the operator.
        method: Method of computation; also "exact" if n products were within the limit.
        truncation: Error due to stopping early, beyond chance; 0 if the method does not stop early.
    """

    value: float
    standard_error: float
    products: int
    method: str
    truncation: float = 0.0

    def __float__(self) -> float:
        return self.value

    def _repr_html_(self) -> str:
        spread = f" ± {number(self.standard_error, 2)}" if self.standard_error else ""
        stopped = [("stopped early by", number(self.truncation, 2))] if self.truncation else []
        return page(element("b", number(self.value) + spread), facts([*cost_of(self), *stopped]))


@dataclass(frozen=True, eq=False)
class DiagonalEstimate:
    """Estimated diagonal, with standard errors and its cost.

    Attributes:
        value: Estimate (n,), on the operator's device.
        standard_error: Standard deviation of each entry, (n,), estimated from the same probes; 0 if exact.
        products: Number of products with the operator and its transpose.
        method: Method of computation; also "exact" if n products were within the limit.
    """

    value: Tensor
    standard_error: Tensor
    products: int
    method: str

    def _repr_html_(self) -> str:
        known = [("entries", numbers(self.value)), ("standard errors", numbers(self.standard_error, 2))]
        return page(element("b", f"diagonal of {len(self.value):,} entries"), facts([*known, *cost_of(self)]))


class Costly(Protocol):
    """Result that was computed by products with an operator."""

    @property
    def products(self) -> int:
        """Number of products with the operator."""

    @property
    def method(self) -> str:
        """Method of computation."""


def cost_of(result: Costly) -> list[tuple[str, object]]:
    """Return method and products of a result for display in notebooks."""
    return [("method", result.method), ("products", f"{result.products:,}")]


def mean_and_error(samples: Tensor) -> tuple[float, float]:
    """Compute the mean of independent samples (k,), and its standard error."""
    return samples.mean().item(), samples.std().item() / samples.numel() ** 0.5
