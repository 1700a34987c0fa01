"""Power series with lazily computed coefficients, so that equations can define them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hodiff.taylor.series import Coefficient, Frame, inner_products, minus, plus, times


class Stream:
    """A lazy series with arithmetic: coefficient k of a result uses the operands' coefficients up to k.

    Args:
        frame: Order and directions.
        known: The first coefficients.
        more: Computes coefficient k, once all lower coefficients are known.
    """

    def __init__(self, frame: Frame, known: list[Coefficient], more: Callable[[int], Coefficient] | None = None):
        self.frame = frame
        self.known = known
        self.more = more

    def __getitem__(self, k: int) -> Coefficient:
        while len(self.known) <= k:
            self.known.append(None if self.more is None else self.more(len(self.known)))
        return self.known[k]

    def __mul__(self, other: Any) -> Stream:
        if not isinstance(other, Stream):
            return Stream(self.frame, [self[0] * other], lambda k: times(self[k], other))
        return Stream(self.frame, [self[0] * other[0]], lambda k: self._product(other, k))

    def __rmul__(self, other: Any) -> Stream:
        return self * other

    def __neg__(self) -> Stream:
        return self * -1

    def __add__(self, other: Any) -> Stream:
        if not isinstance(other, Stream):
            return Stream(self.frame, [self[0] + other], lambda k: self[k])
        return Stream(self.frame, [self[0] + other[0]], lambda k: plus(self[k], other[k]))

    def __radd__(self, other: Any) -> Stream:
        return self + other

    def __sub__(self, other: Any) -> Stream:
        return self + -other

    def __rsub__(self, other: Any) -> Stream:
        return -self + other

    def __truediv__(self, other: Stream) -> Stream:
        quotient = Stream(self.frame, [self[0] / other[0]])

        def more(k: int) -> Coefficient:
            for j in range(k + 1):
                other[j]
            known = plus(times(other[k], quotient[0]), inner_products(self.frame, other.known, quotient.known, k))
            rest = minus(self[k], known)
            return None if rest is None else rest / other[0]

        quotient.more = more
        return quotient

    def __rtruediv__(self, other: Any) -> Stream:
        return Stream(self.frame, [other + 0 * self[0]]) / self

    def _product(self, other: Stream, k: int) -> Coefficient:
        ends = plus(times(self[0], other[k]), times(self[k], other[0]))
        return plus(ends, inner_products(self.frame, self.known, other.known, k))
