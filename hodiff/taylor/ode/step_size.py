"""Order and step size of a Taylor series method, from the tolerance and the last coefficients.

Source: A. Jorba & M. Zou, "A software package for the numerical integration of ODEs by means of high-order Taylor
methods", Experimental Mathematics 14(1), 2005, section 3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hodiff.errors import InputError
from hodiff.taylor.jets import tensor_of
from hodiff.taylor.ode.field import Columns
from hodiff.torch_internals.autograd.wrapped_tensors import is_batched_by_any


@dataclass(frozen=True)
class Tolerance:
    """How large the error of a step may be: the larger of an absolute one and one relative to the state.

    Attributes:
        relative: Of the largest component of the state.
        absolute: Whatever the state.
        rounding: Of the state's dtype.
    """

    relative: float
    absolute: float
    rounding: float

    def at(self, size: float) -> float:
        """Of a state of a size."""
        return max(self.absolute, self.relative * size)

    def order(self, size: float) -> int:
        r"""The order with the fewest operations a unit of time, $\lceil 1 - \frac12 \ln\varepsilon\rceil$."""
        relative = self.relative * size > self.absolute
        epsilon = max(self.relative if relative else self.absolute, self.rounding)
        return max(2, math.ceil(1 - math.log(min(epsilon, 1.0)) / 2))


def norm(leaves: Sequence[Any]) -> float:
    """The largest component of a state, infinite where one is not finite."""
    largest = 0.0
    for each in leaves:
        tensor = tensor_of(each)
        if tensor is None or not tensor.numel():
            continue
        if is_batched_by_any(tensor):
            raise InputError(
                "odeint_taylor: y0, t or what f closes over: expected no torch.func.vmap around them, which hides the "
                "numbers that step sizes depend on; make the batch a dimension of y0, whose parts then share steps."
            )
        found = float(tensor.detach().abs().amax())
        largest = max(largest, found if math.isfinite(found) else math.inf)
    return largest


def proposed(columns: Columns, tolerance: float) -> float:
    """The step at which the last two terms are as large as the tolerance, made a little shorter."""
    order = len(columns[0]) - 1
    steps = [math.inf]
    for j in range(max(order - 1, 1), order + 1):
        size = norm([column[j] for column in columns if column[j] is not None])
        if math.isinf(size):
            return 0.0
        if size > 0:
            steps.append((tolerance / size) ** (1 / j))
    return min(steps) * math.exp(-0.7 / max(order - 1, 1))


# A step that was too long is made shorter by these at most and at least.
_LEAST, _MOST = 0.1, 0.9


def shortened(step: float, error: float, allowed: float, order: int) -> float:
    """A step after one whose error was too large; it grows as the power order + 1 of the step."""
    if not math.isfinite(error):
        return _LEAST * step
    return step * min(_MOST, max(_LEAST, 0.9 * (allowed / error) ** (1 / (order + 1))))
