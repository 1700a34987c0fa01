"""The data structures of the collections of test problems."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class LeastSquares:
    r"""$\min_x \sum_i r_i(x)^2$, without the factor 1/2 of `least_squares`.

    Attributes:
        name: The name in lower case, with the size if there are several.
        residuals: $r$, from x (n,) to (m,).
        start: The standard start, (n,), float64.
        minima: Published values of local minima, the best first.
        minimisers: Published points of the best minimum, or empty.
        norm_at_start: The published norm of the residuals at the start, or None.
    """

    name: str
    residuals: Callable[[Tensor], Tensor]
    start: Tensor
    minima: tuple[float, ...]
    minimisers: tuple[tuple[float, ...], ...] = ()
    norm_at_start: float | None = None

    def value(self, x: Tensor) -> Tensor:
        """Return the sum of squares."""
        return self.residuals(x).square().sum()

    def is_solved_by(self, value: float) -> bool:
        """Whether the value is a published minimum, to the published digits."""
        return any(abs(value - minimum) <= (1e-5 * minimum or 1e-8) for minimum in self.minima)


@dataclass(frozen=True)
class Scalar:
    r"""$\min_x f(x)$ with any number of unknowns.

    Attributes:
        name: The name in lower case.
        value: $f$, from x (n,) to ().
        start: Returns the standard start for n unknowns.
        minimum: Returns the least known value for n unknowns, or None.
        largest: The largest size; with more unknowns the problem is too ill-conditioned for float64.
        multiple: The number whose multiples are valid sizes.
    """

    name: str
    value: Callable[[Tensor], Tensor]
    start: Callable[[int], Tensor]
    minimum: Callable[[int], float | None]
    largest: int = 10_000
    multiple: int = 4

    def size(self, n: int) -> int:
        """Return the largest valid size up to n."""
        return n - n % self.multiple

    def is_solved_by(self, value: float, n: int) -> bool:
        """Whether the value is the minimum to the published digits, relative to the start value if it is zero."""
        minimum = self.minimum(n)
        assert minimum is not None
        at_start = self.value(self.start(self.size(n))).item()
        return abs(value - minimum) <= 5e-6 * max(abs(minimum), min(1.0, at_start))
