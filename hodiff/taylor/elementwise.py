"""Elementwise functions of series, from a system of differential equations or from derivatives in closed form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hodiff.taylor.series import Coefficient, Coefficients, Frame, composition, inner_products, minus, plus, times


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
