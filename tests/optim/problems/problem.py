"""What the collections of test problems are made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class LeastSquares:
    r"""$\min_x \sum_i r_i(x)^2$, without the half that `least_squares` has.

    Attributes:
        name: In lower case, with the size where there are several.
        residuals: $r$, of x (n,) to (m,).
        start: The standard one, (n,), float64.
        minima: Published values of local minima, the best first.
        minimisers: Published points of the best minimum; empty where none is.
        norm_at_start: That of the residuals, published, or None.
    """

    name: str
    residuals: Callable[[Tensor], Tensor]
    start: Tensor
    minima: tuple[float, ...]
    minimisers: tuple[tuple[float, ...], ...] = ()
    norm_at_start: float | None = None

    def value(self, x: Tensor) -> Tensor:
        """The sum of squares."""
        return self.residuals(x).square().sum()

    def is_solved_by(self, value: float) -> bool:
        """Whether it is a published minimum, to the digits published."""
        return any(abs(value - minimum) <= (1e-5 * minimum or 1e-8) for minimum in self.minima)


@dataclass(frozen=True)
class Scalar:
    r"""$\min_x f(x)$ of as many unknowns as one likes.

    Attributes:
        name: In lower case.
        value: $f$, of x (n,) to ().
        start: The standard one of n unknowns.
        minimum: The least value known for n unknowns, or None.
        largest: With more unknowns it is too ill-conditioned for float64.
        multiple: Of what its sizes are multiples.
    """

    name: str
    value: Callable[[Tensor], Tensor]
    start: Callable[[int], Tensor]
    minimum: Callable[[int], float | None]
    largest: int = 10_000
    multiple: int = 4

    def size(self, n: int) -> int:
        """The largest that the problem has, up to n."""
        return n - n % self.multiple

    def is_solved_by(self, value: float, n: int) -> bool:
        """Whether it is the minimum, to the digits published; one of zero, to those of the value at the start."""
        minimum = self.minimum(n)
        assert minimum is not None
        at_start = self.value(self.start(self.size(n))).item()
        return abs(value - minimum) <= 5e-6 * max(abs(minimum), min(1.0, at_start))
