"""Comparison of a function's gradient by autograd with finite differences of its values."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hodiff.common.trees import tensors_in
from hodiff.rules.autocast import without_autocast
from hodiff.torch_internals.interception import EagerDispatchMode, run_operator

# Smaller relative differences may be rounding or a nearby kink.
_CLEAR = 0.02
# A relative difference that rounding or chance rarely makes so small.
_EQUAL = 1e-3
# Steps, relative to the size of each tensor: the widest, the ratio of one to the next, and the smallest one.
_WIDEST = 2e-2
_RATIO = 4
_NARROWEST = 1e-8
# The smallest step and the error of a value, in machine epsilons.
_STEP_IN_EPS = 10
_ERROR_IN_EPS = 10
# Directions of which one must confirm a difference.
_DIRECTIONS = 3


class _Thread(threading.local):
    comparing = False
    limits: tuple[Tensor, Tensor] | None = None


_this_thread = _Thread()


@contextmanager
def compared_within(lower: Tensor, upper: Tensor) -> Iterator[None]:
    """Keep the differences of functions of n numbers, in one or several leaves, within limits (n,)."""
    before, _this_thread.limits = _this_thread.limits, (lower, upper)
    try:
        yield
    finally:
        _this_thread.limits = before


def is_comparing() -> bool:
    """Whether a function runs only for the finite differences of a warning."""
    return _this_thread.comparing


@contextmanager
def comparing() -> Iterator[None]:
    """Declare that functions run only for finite differences."""
    _this_thread.comparing = True
    try:
        yield
    finally:
        _this_thread.comparing = False


class CoarsestDtype(EagerDispatchMode):
    """Mode that finds the machine epsilon of the coarsest dtype of results.

    Attributes:
        eps: The machine epsilon; 0 without floating-point results.
    """

    def __init__(self) -> None:
        super().__init__()
        self.eps = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = run_operator(func, args, kwargs)
        self.eps = max(self.eps, _coarsest_eps(tensors_in(result)))
        return result


def compare(evaluate: Callable[[Sequence[Tensor]], Any], leaves: Sequence[Tensor]) -> tuple[float, float] | None:
    """Return the derivative along a direction by autograd and by differences, or None if they agree or are unclear.

    The steps grow from one that only just shows in the values, because the scale on which the function changes is
    unknown. Two steps of which the differences agree decide.
    """
    if not _steps(_coarsest_eps(leaves)):
        return None
    with ExitStack() as stack:
        # Steps are too small for 16 bits.
        for device in {"cpu", *(leaf.device.type for leaf in leaves)}:
            stack.enter_context(without_autocast(device))
        # The function may register hooks, which need a recorded graph.
        stack.enter_context(torch.enable_grad())
        comparison = _Comparison(evaluate, leaves)
        told = comparison.mismatch()
        # A second direction excludes that rounding errors agree by chance. It may be unclear.
        return told and next((told for _ in range(_DIRECTIONS) if comparison.mismatch(confirms=True)), None)


class _Comparison:
    """Gradient and value of a number that depends on every output of a function, at a point."""

    def __init__(self, evaluate: Callable[[Sequence[Tensor]], Any], leaves: Sequence[Tensor]):
        self._evaluate = evaluate
        self._generator = torch.Generator().manual_seed(0)
        self._weights: list[Tensor] = []
        self._points = [leaf.detach().requires_grad_() for leaf in leaves]
        self._limits = _limits_of(self._points)
        value = self._number(self._points)
        self._gradient = torch.autograd.grad(value, self._points, allow_unused=True)
        self._value = float(value.detach())
        with CoarsestDtype() as dtypes:
            again = float(self._number(self._points).detach())
        eps = max(_coarsest_eps(leaves), dtypes.eps)
        self._steps = _steps(eps)
        # Atomic sums differ from run to run; a function that depends on its history differs by more.
        self._error = _ERROR_IN_EPS * (eps * abs(self._value) + abs(again - self._value))

    def _number(self, at: Sequence[Tensor]) -> Tensor:
        torch.manual_seed(0)
        outputs = [each for each in pytree.tree_leaves(self._evaluate(at)) if _is_floating(each)]
        if not self._weights:
            generator = self._generator
            self._weights = [torch.randn(y.shape, generator=generator, device=generator.device).to(y) for y in outputs]
        return torch.stack([(w * y).double().sum() for w, y in zip(self._weights, outputs, strict=True)]).sum()

    def mismatch(self, confirms: bool = False) -> tuple[float, float] | None:
        """Return the derivative along the next direction by autograd and by differences, if they clearly differ.

        Args:
            confirms: Whether the first two steps that decide suffice, and wider ones need not contradict them.
        """
        moves = self._moves()
        found, last, own = None, None, 0.0
        for h in self._steps:
            try:
                (up, own_up), (down, own_down) = self._change(moves, h), self._change(moves, -h)
            except Exception:
                # Far from the point, the function may raise.
                return found
            if not math.isfinite(up - down):
                return found
            own, difference = (own_up - own_down) / (2 * h), (up - down) / (2 * h)
            if up == down == 0 and last is None:
                continue
            # Curvature makes the bend grow with the step. Kinks and rounding errors do not.
            error, bend = difference - own, (up - own_up + down - own_down) / h
            size = max(abs(own), abs(difference))
            ratio = abs(error) / (size or 1.0)
            if found is None and ratio <= _EQUAL:
                return None
            if last is not None:
                last_difference, last_error, last_bend, last_ratio = last
                # Narrow steps do not see numbers that are rounded inside, as by TF32.
                if max(ratio, last_ratio) <= _CLEAR:
                    return None
                rounding = self._error / h
                doubt = 4 * abs(error - last_error) + abs(last_bend - bend / _RATIO) + rounding
                # Differences of a bounded function vanish over steps that are too wide.
                steady = abs(difference - last_difference) <= abs(difference) / 4 + _RATIO * rounding
                if found is None and steady and abs(error) > doubt + _CLEAR * size:
                    found = own, difference
                    if confirms:
                        break
            last = difference, error, bend, ratio
        return (own, 0.0) if last is None and abs(own) > self._error / _WIDEST else found

    def _moves(self) -> list[Tensor]:
        moves = [_direction(leaf, self._generator) for leaf in self._points]
        for i, (point, (lower, upper)) in enumerate(zip(self._points, self._limits, strict=False)):
            room = torch.minimum(point - lower, upper - point).detach().clamp(min=0) / _WIDEST
            moves[i] = torch.minimum(torch.maximum(moves[i], -room), room)
        return moves

    def _change(self, moves: Sequence[Tensor], h: float) -> tuple[float, float]:
        """Return the change of the value by a step, and the change that the gradient predicts."""
        at = [p + h * m for p, m in zip(self._points, moves, strict=True)]
        if self._limits:
            # A rounded sum may exceed a limit.
            at = [torch.minimum(torch.maximum(p, low), up) for p, (low, up) in zip(at, self._limits, strict=True)]
        # The numbers that are moved are rounded.
        predicted = sum(
            float((g.double() * (moved.detach().double() - p.detach().double())).sum())
            for g, moved, p in zip(self._gradient, at, self._points, strict=True)
            if g is not None
        )
        return float(self._number(at).detach()) - self._value, predicted


def _steps(eps: float) -> list[float]:
    """Return the steps for values of a machine epsilon, the narrowest first; none if rounding would hide them."""
    count = int(math.log(_WIDEST / max(_NARROWEST, _STEP_IN_EPS * eps), _RATIO)) + 1
    return [_WIDEST / _RATIO**i for i in reversed(range(count))] if count > 1 else []


def _coarsest_eps(tensors: Sequence[Tensor]) -> float:
    return max((torch.finfo(each.dtype).eps for each in tensors if each.is_floating_point()), default=0.0)


def _limits_of(points: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Return the limits of each leaf; none if there are no limits of as many numbers."""
    sizes = [each.numel() for each in points]
    if _this_thread.limits is None or sum(sizes) != _this_thread.limits[0].numel():
        return []
    lower, upper = (side.split(sizes) for side in _this_thread.limits)
    return [
        (low.reshape(each.shape).to(each), up.reshape(each.shape).to(each))
        for each, low, up in zip(points, lower, upper, strict=True)
    ]


def _direction(leaf: Tensor, generator: torch.Generator) -> Tensor:
    size = float(leaf.detach().double().square().mean().sqrt()) if leaf.numel() else 0.0
    return torch.randn(leaf.shape, generator=generator, device=generator.device).to(leaf) * (size or 1.0)


def _is_floating(each: Any) -> bool:
    return isinstance(each, Tensor) and each.is_floating_point()
