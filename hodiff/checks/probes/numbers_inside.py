"""Numbers inside a computation: their precision and size, and whether they cancel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from hodiff.common.trees import has_strides, tensors_in
from hodiff.torch_internals.interception import DispatchMode, run_operator
from hodiff.torch_internals.tensors import is_zero_without_memory

aten = torch.ops.aten
_SUMS = {aten.add, aten.sub, aten.rsub, aten.sum}
# Operators whose infinite results have left the range of their dtype; other operators may be at a pole.
_GROW = {
    *(aten.exp, aten.exp2, aten.expm1, aten.sinh, aten.cosh),
    *(aten.mul, aten.add, aten.sub, aten.sum, aten.mm, aten.square),
}
# Operators whose zero results have left the range if no factor is zero.
_SHRINK = {aten.mul, aten.div}
# Ratio of a sum's parts to the sum at which half of the digits of float32 are lost.
_MANY = 1e4

# Multiples of 1 / 4096, such as masks, halves and small integers, count as exact in every precision.
_SHORT = 4096.0


class NumbersInside(DispatchMode):
    """Mode that inspects every tensor that operators of torch read and return.

    Attributes:
        rounded: Whether there were numbers in less than float64 that float64 might hold more exactly.
        narrow: Whether there were numbers in less than float64.
        largest: The largest number.
        cancelled: The largest ratio of a sum's parts to the sum.
        left_range: Whether a number overflowed to infinity or underflowed to zero.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rounded = False
        self.narrow = False
        self.largest = 0.0
        self.cancelled = 1.0
        self.left_range = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = run_operator(func, args, kwargs)
        given = tensors_in((args, kwargs))
        # Integers and complex numbers are not inspected for cancellation.
        real = _is_readable(result) and all(map(_is_readable, given))
        if real and func.overloadpacket in _SUMS:
            self._compare(func, args, kwargs or {}, result)
        if real:
            self.left_range = self.left_range or _leaves_range(func.overloadpacket, args, result)
        for each in (*given, *tree_leaves(result)):
            if _is_readable(each) and each.numel():
                self._look(each.detach())
        return result

    def _compare(self, func: Any, args: Any, kwargs: Any, result: Tensor) -> None:
        """Record the ratio of a sum's parts to the sum."""
        if func.overloadpacket is aten.sum:
            parts = func(args[0].abs(), *args[1:], **kwargs)
        else:
            parts = torch.maximum(*(torch.as_tensor(each).abs().to(result).expand_as(result) for each in args[:2]))
        if result.numel():
            ratio = (parts / result.abs()).nan_to_num(1.0)
            self.cancelled = max(self.cancelled, float(ratio.max()))

    def _look(self, numbers: Tensor) -> None:
        finite = numbers.double().nan_to_num(0.0, 0.0, 0.0)
        self.largest = max(self.largest, float(finite.abs().max()))
        if numbers.dtype != torch.float64:
            self.narrow = True
            scaled = finite * _SHORT
            self.rounded = self.rounded or bool((scaled != scaled.round()).any())


def _is_readable(each: Any) -> bool:
    """Whether the value is a real tensor with memory; forward mode has zero tensors without memory."""
    real = isinstance(each, Tensor) and each.is_floating_point()
    return real and has_strides(each) and not each.is_meta and not is_zero_without_memory(each)


def _leaves_range(operator: Any, args: Any, result: Tensor) -> bool:
    """Whether finite numbers gave infinity, or nonzero factors gave zero."""
    given = [torch.as_tensor(each) for each in args if isinstance(each, (Tensor, int, float))]
    if operator in _GROW and bool(result.isinf().any()):
        return all(bool(each.isfinite().all()) for each in given)
    if operator not in _SHRINK:
        return False
    lost = result == 0
    for each in given:
        lost = lost & (each != 0).to(lost.device)
    return bool(lost.any())


def numbers_inside(run: Callable[[], Any]) -> NumbersInside:
    """Inspect the numbers of a computation, which runs without a graph."""
    seen = NumbersInside()
    with torch.no_grad(), seen:
        run()
    return seen


def cancels(run: Callable[[], Any], size: float) -> bool:
    """Whether float64 computations lose digits to cancellation or to numbers far larger than the size."""
    seen = numbers_inside(run)
    return not seen.narrow and (seen.largest > _MANY * max(size, 1e-300) or seen.cancelled > _MANY)
