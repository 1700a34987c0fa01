"""Elementwise functions of series, from a system of differential equations or from derivatives in closed form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hodiff.taylor.series import Coefficient, Coefficients, Frame, composition, inner_products, plus, times
from hodiff.taylor.streams import Stream

# Up to this order, composing the Taylor coefficients of φ, which all directions share, takes fewer passes over the
# directions than solving the equations. Above it, the number of passes grows as the square of the order for the
# equations, and as its cube for the composition.
POWERS = 4


@dataclass(frozen=True)
class System:
    r"""φ as the first unknown of $y' = g(u, y)\, u'$.

    Attributes:
        start: Takes the value of u and returns the values of all unknowns.
        slopes: Takes the series of u and of the unknowns, and returns g.
        second: Takes x and returns φ, φ' and φ''/2 in fewer operations, or is None.
    """

    start: Callable[[Any], Sequence[Any]]
    slopes: Callable[..., Sequence[Any]]
    second: Callable[[Any], Sequence[Any]] | None = None

    def taylor(self, x: Any, order: int) -> Coefficients:
        """The Taylor coefficients of φ at x."""
        if self.second is not None and order <= 2:
            return self.second(x)[: order + 1]
        frame = Frame(order, None, False, 0)
        return self._solve(Stream(frame, [x, 1.0]), order)

    def series(self, frame: Frame, u: Coefficients) -> Coefficients:
        """Taylor coefficients of φ(u)."""
        if frame.order <= POWERS and frame.memory is None:
            return composition(frame, u, self.taylor(u[0], frame.order))
        kept = frame.recalled(self, [u])
        if kept:
            stream, first = kept
            stream.known[:] = u
            return [first[k] for k in range(frame.order + 1)]
        stream = Stream(frame, list(u))
        kept[:] = stream, self._unknown(stream)
        return [kept[1][k] for k in range(frame.order + 1)]

    def _solve(self, u: Stream, order: int) -> Coefficients:
        first = self._unknown(u)
        return [first[k] for k in range(order + 1)]

    def _unknown(self, u: Stream) -> Stream:
        """Return the first unknown; all unknowns are computed together."""
        unknowns = [Stream(u.frame, [value]) for value in self.start(u[0])]
        for unknown, slope in zip(unknowns, self.slopes(u, *unknowns), strict=True):
            unknown.more = rising(u, slope)
        return unknowns[0]


@dataclass(frozen=True)
class Power:
    r"""$v = u^p$ by $u v' = p\, v\, u'$, above the order up to which closed-form derivatives are cheaper.

    Attributes:
        exponent: p, less than 1, so that at 0 neither the closed form nor the equation has finite derivatives.
        closed: The derivatives in closed form.
    """

    exponent: float
    closed: Derivatives = field(compare=False)

    def series(self, frame: Frame, u: Coefficients) -> Coefficients:
        r"""The coefficients of the power: $k u_0 v_k = \sum_{j=1}^k (p j - (k - j))\, u_j v_{k-j}$."""
        if frame.order <= POWERS and frame.memory is None:
            return self.closed.series(frame, u)
        found = frame.recalled(self, [u])
        if not found:
            found.append(self.closed.coefficient(u[0], 0))
        for k in range(len(found), frame.order + 1):
            ends = times(times(self.exponent * k, u[k]), found[0])
            weighted = [times(self.exponent * j - (k - j), each) for j, each in enumerate(u[:k])]
            total = plus(ends, inner_products(frame, weighted, [*found, None], k))
            found.append(None if total is None else total / (k * u[0]))
        return found


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
