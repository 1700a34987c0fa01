"""What estimators of one number return."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from hodiff.displays import element, facts, number, numbers, page


@dataclass(frozen=True)
class Estimate:
    """A number, how far chance may have put it off, and what it cost.

    Attributes:
        value: The estimate.
        standard_error: Its standard deviation, estimated from the same probes; 0 where no chance was involved.
        products: Products with the operator that were made.
        method: How it was computed; "exact" too where n products were no more than those allowed.
        truncation: How far stopping early may have put it off, beyond chance; 0 where nothing was stopped.
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
    """A diagonal, how far chance may have put each entry off, and what it cost.

    Attributes:
        value: The estimate, (n,), on the operator's device.
        standard_error: The standard deviation of each entry, (n,), estimated from the same probes; 0 if exact.
        products: Products with the operator, and with its transpose, that were made.
        method: How it was computed; "exact" too where n products were no more than those allowed.
    """

    value: Tensor
    standard_error: Tensor
    products: int
    method: str

    def _repr_html_(self) -> str:
        known = [("entries", numbers(self.value)), ("standard errors", numbers(self.standard_error, 2))]
        return page(element("b", f"diagonal of {len(self.value):,} entries"), facts([*known, *cost_of(self)]))


class Costly(Protocol):
    """What took products to compute."""

    @property
    def products(self) -> int:
        """Products with the operator."""

    @property
    def method(self) -> str:
        """How it was computed."""


def cost_of(result: Costly) -> list[tuple[str, object]]:
    """How a result was computed and what it cost, as a notebook shows it."""
    return [("method", result.method), ("products", f"{result.products:,}")]


def mean_and_error(samples: Tensor) -> tuple[float, float]:
    """Mean of independent samples (k,), and its standard error."""
    return samples.mean().item(), samples.std().item() / samples.numel() ** 0.5
