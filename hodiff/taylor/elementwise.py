"""Elementwise functions of series, from a system of differential equations or from derivatives in closed form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hodiff.taylor.series import Coefficient, Coefficients, Frame, composition, inner_products, plus, times
from hodiff.taylor.streams import Stream

# Up to this order derivatives of φ at the value, which no direction has a part in, and powers of the change take fewer
# passes over all directions than the equations; above, equations take a number that grows as its square, powers as
# its cube.
POWERS = 4


@dataclass(frozen=True)
class System:
    r"""φ as the first unknown of $y' = g(u, y)\, u'$.

    Attributes:
        start: Takes the value of u and returns those of all unknowns.
        slopes: Takes the series of u and of the unknowns, and returns g.
    """

    start: Callable[[Any], Sequence[Any]]
    slopes: Callable[..., Sequence[Any]]

    def taylor(self, x: Any, order: int) -> Coefficients:
        """The Taylor coefficients of φ at x."""
        frame = Frame(order, None, False, 0)
        return self._solve(Stream(frame, [x, 1.0]), order)

    def series(self, frame: Frame, u: Coefficients) -> Coefficients:
        """Those of φ(u)."""
        if frame.order <= POWERS:
            return composition(frame, u, self.taylor(u[0], frame.order))
        return self._solve(Stream(frame, list(u)), frame.order)

    def _solve(self, u: Stream, order: int) -> Coefficients:
        """All unknowns at once, and of them the first."""
        unknowns = [Stream(u.frame, [value]) for value in self.start(u[0])]
        for unknown, slope in zip(unknowns, self.slopes(u, *unknowns), strict=True):
            unknown.more = rising(u, slope)
        return [unknowns[0][k] for k in range(order + 1)]


@dataclass(frozen=True)
class Derivatives:
    r"""φ by its Taylor coefficients at any x, $\varphi^{(m)}(x) / m!$.

    Attributes:
        coefficient: Takes x and m; may return a number, or None for 0.
    """

    coefficient: Callable[[Any, int], Coefficient]

    def series(self, frame: Frame, u: Coefficients) -> Coefficients:
        """The coefficients of φ(u)."""
        return composition(frame, u, [self.coefficient(u[0], m) for m in range(frame.order + 1)])


def rising(u: Stream, slope: Any) -> Callable[[int], Coefficient]:
    r"""Coefficient k of v with $v' = g\,u'$: $k v_k = \sum_{j=1}^k j u_j g_{k-j}$; a number g is constant."""

    def more(k: int) -> Coefficient:
        if not isinstance(slope, Stream):
            return times(slope, u[k])
        last, _ = u[k], slope[k - 1]
        weighted = [times(j, each) for j, each in enumerate(u.known[:k])]
        total = plus(times(times(k, last), slope[0]), inner_products(u.frame, weighted, slope.known, k))
        return None if total is None else total / k

    return more
