"""Coefficients of truncated power series, along one direction or along several that share their value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hodiff.kernels import fused
from hodiff.torch_internals.autograd.transforms import in_transform

# The highest order whose factorial, between a coefficient and a derivative, is finite in double precision.
HIGHEST = 170

# A tensor (or a jet of an outer call), a number, or None for zero.
Coefficient = Any
Coefficients = Sequence[Coefficient]


class RecallRefused(BaseException):
    """Raised when a function differentiates leaves that are new in every pass, so that no cached result holds."""


@dataclass
class Kink:
    """The side from which a pass approaches lengths |t| that are 0.

    Attributes:
        side: The sign of t; functions with a kink there use the mean of both sides.
        is_met: Whether a pass met such a length.
        is_new: Whether the function that runs met it.
    """

    side: int = 1
    is_met: bool = False
    is_new: bool = False


class Frame:
    """Settings and state that all series of one call share.

    All directions share coefficient 0. Higher coefficients have the directions as their first axis, except the highest
    coefficient of a collapsed series, which is the sum over directions.

    Args:
        order: The highest power that is kept.
        directions: Number of directions, or None for one direction without an axis.
        collapsed: Whether the highest coefficient is summed over the directions.
        depth: Nesting depth of the call: a series is constant to a series of a deeper call.
        handle: Calls a torch function whose arguments contain jets (`jet_calls.handle`); None for series without jets.
        mode: Mode for rules whose result may be differentiated further, such as hodiff's corrections.
        observer: Called with each function that has no rule.
        sparse: Whether jets may store only the directions that their elements depend on, in slots.
        memory: Cache of the previous pass, where passes follow each other.
        functions: Number of calls of Functions around the call, if it is made in the forward or a rule of one.
    """

    def __init__(
        self,
        order: int,
        directions: int | None,
        collapsed: bool,
        depth: int,
        handle: Any = None,
        mode: Any = None,
        observer: Callable[[Any], None] | None = None,
        sparse: bool = False,
        memory: Any = None,
        functions: int = 0,
    ):
        self.order = order
        self.directions = directions
        self.collapsed = collapsed
        self.depth = depth
        self.handle = handle
        self.mode = mode
        self.observer = observer
        self.sparse = sparse
        self.memory = memory
        self.functions = functions
        self.ended = False
        # Whether the user's own rules took part; their value may differ from the function's.
        self.has_own_rules = False
        # Whether constants that the function creates become jets, because it writes to one.
        self.accumulates = False
        self.kink = Kink()
        # Evaluates a jet at a point of its curve, while a function without support for series runs.
        self.moment: Callable[[Any], Any] | None = None

    def recalled(self, rule: Any, series: Sequence[Coefficients], constants: Any = ()) -> list[Any]:
        """List of what the previous pass cached for a call; items appended to it are cached for the next pass."""
        if self.memory is None:
            return []
        if in_transform():
            # Tensors that an inner transform differentiates or batches are new in every pass.
            self.recall_nothing()
        found: list[Any] = self.memory.recall(rule, series, constants)
        return found

    def recall_nothing(self) -> None:
        """Restart the pass without the cache, if there is one."""
        if self.memory is not None:
            raise RecallRefused

    def meets_kink(self) -> None:
        """Record that a length is 0, so that the pass runs for both of its sides."""
        self.recall_nothing()
        self.kink.is_met = self.kink.is_new = True

    def has_axis(self, k: int) -> bool:
        """Whether coefficient k has the axis of directions."""
        return self.directions is not None and k > 0 and not (self.collapsed and k == self.order)

    def shape(self, k: int, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of coefficient k of a series whose value has a given shape."""
        return (*([self.directions or 0] if self.has_axis(k) else []), *shape)

    def summed(self, k: int, inner: Coefficient) -> Coefficient:
        """Sum inner products over the directions, if coefficient k is collapsed."""
        if inner is None or self.directions is None or self.has_axis(k):
            return inner
        return inner.sum(0)


def plus(a: Coefficient, b: Coefficient) -> Coefficient:
    """The sum, where None is zero."""
    if a is None:
        return b
    return a if b is None else a + b


def minus(a: Coefficient, b: Coefficient) -> Coefficient:
    """The difference, where None is zero."""
    if b is None:
        return a
    return -b if a is None else a - b


def times(a: Coefficient, b: Coefficient) -> Coefficient:
    """The product, where None is zero and 1 costs nothing."""
    if a is None or b is None:
        return None
    if type(a) in (int, float) and a == 1:
        return b
    return a if type(b) in (int, float) and b == 1 else a * b


def inner_products(frame: Frame, a: Coefficients, b: Coefficients, k: int) -> Coefficient:
    """The sum of a_i b_{k-i} over 0 < i < k, as it enters coefficient k."""
    total = None
    if a is b:
        for i in range(1, (k + 1) // 2):
            total = plus(total, times(a[i], a[k - i]))
        total = times(2, total)
        if k > 1 and k % 2 == 0 and a[k // 2] is not None:
            middle = a[k // 2]
            total = plus(total, middle * middle)
    else:
        for i in range(1, k):
            total = plus(total, times(a[i], b[k - i]))
    return frame.summed(k, total)


def product(frame: Frame, a: Coefficients, b: Coefficients) -> list[Coefficient]:
    """Cauchy product of two series of one shape."""
    result = frame.recalled(product, (a, b))
    if not result:
        result.append(times(a[0], b[0]))
    for k in range(len(result), frame.order + 1):
        ends = plus(times(a[0], b[k]), times(a[k], b[0]))
        result.append(plus(ends, inner_products(frame, a, b, k)))
    return result


def quotient(frame: Frame, a: Coefficients, b: Coefficients) -> list[Coefficient]:
    r"""The series q with q b = a: $q_k = (a_k - \sum_{j=1}^k b_j q_{k-j}) / b_0$."""
    result = frame.recalled(quotient, (a, b))
    if not result:
        result.append(a[0] / b[0])
    for k in range(len(result), frame.order + 1):
        known = plus(times(b[k], result[0]), inner_products(frame, b, [*result, None], k))
        rest = minus(a[k], known)
        result.append(None if rest is None else rest / b[0])
    return result


def composition(frame: Frame, u: Coefficients, taylor: Coefficients) -> list[Coefficient]:
    r"""The series of $\varphi(u)$ by the Taylor coefficients of φ at $u_0$: $\sum_m \varphi_m (u - u_0)^m$."""
    if frame.collapsed and frame.order == 2:
        found = _fused_composition(frame, u, taylor)
        if found is not None:
            return found
    change = [None, *u[1:]]
    result = [taylor[0], *(times(taylor[1], each) for each in u[1:])]
    power: list[Coefficient] = change
    last = max([0, *[m for m, each in enumerate(taylor) if each is not None]])
    for m in range(2, last + 1):
        # The m-th power of the change begins with t^m.
        known = power
        power = [None] * m
        for k in range(m, frame.order + 1):
            power.append(inner_products(frame, known, change, k))
            result[k] = plus(result[k], times(taylor[m], power[k]))
    return result


def _fused_composition(frame: Frame, u: Coefficients, taylor: Coefficients) -> list[Coefficient] | None:
    """Compose a collapsed series of order 2 in a fused kernel; None if no kernel supports the tensors."""
    value, first, second = u
    given = [taylor[1], taylor[2], *(each for each in (first, second) if each is not None)]
    if first is None or frame.directions is None or not all(type(each) is torch.Tensor for each in given):
        return None
    shape = value.shape
    if {taylor[1].shape, taylor[2].shape, first.shape[1:], shape if second is None else second.shape} != {shape}:
        return None
    if value.dtype not in (torch.float32, torch.float64) or not fused.takes(*given, dtype=value.dtype):
        return None
    return [taylor[0], *fused.collapsed(taylor[1], taylor[2], first, second)]


def filled(frame: Frame, coefficients: Coefficients, k: int, value: Any) -> Any:
    """Coefficient k as a tensor, zeros where it is None."""
    found = coefficients[k]
    return torch.zeros_like(value).expand(frame.shape(k, value.shape)) if found is None else found
