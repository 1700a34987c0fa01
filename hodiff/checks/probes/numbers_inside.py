"""What numbers a computation makes on its way: of which precision, how large, and whether they cancel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from hodiff.common.trees import has_strides
from hodiff.torch_internals.interception import DispatchMode, run_operator
from hodiff.torch_internals.tensors import is_zero_without_memory

aten = torch.ops.aten
_SUMS = {aten.add, aten.sub, aten.rsub, aten.sum}
# Results of these that are infinite have left the range of their dtype; those of others may be at a pole.
_GROW = {
    aten.exp,
    aten.exp2,
    aten.expm1,
    aten.sinh,
    aten.cosh,
    aten.mul,
    aten.add,
    aten.sub,
    aten.sum,
    aten.mm,
    aten.square,
}
# Results of these that are zero have left it where no factor is.
_SHRINK = {aten.mul, aten.div}
# Parts of a sum that are as much larger than it take half of the digits of float32.
_MANY = 1e4

# Constants such as masks, halves and small whole numbers are the same in every precision.
_SHORT = 4096.0


class NumbersInside(DispatchMode):
    """Watches every tensor that operators of torch read and return.

    Attributes:
        rounded: Whether there were numbers in less than float64 that float64 would hold otherwise.
        narrow: Whether there were any in less than float64.
        largest: The largest number.
        cancelled: The largest part of a sum over the sum, where that is largest.
        left_range: Whether something became infinite by growing, or zero by shrinking.
    """

    def __init__(self) -> None:
        """Start without any."""
        super().__init__()
        self.rounded = False
        self.narrow = False
        self.largest = 0.0
        self.cancelled = 1.0
        self.left_range = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at what goes in and comes out."""
        result = run_operator(func, args, kwargs)
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        # Counts, and complex numbers, have no such parts.
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
        """How much larger than a sum its parts are."""
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
    """Whether it is a tensor of real numbers that are in memory; forward mode has zeros that are not."""
    real = isinstance(each, Tensor) and each.is_floating_point()
    return real and has_strides(each) and not each.is_meta and not is_zero_without_memory(each)


def _leaves_range(operator: Any, args: Any, result: Tensor) -> bool:
    """Whether finite numbers gave infinity, or factors that are not zero gave zero."""
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
    """Those of a computation without a graph."""
    seen = NumbersInside()
    with torch.no_grad(), seen:
        run()
    return seen


def cancels(run: Callable[[], Any], size: float) -> bool:
    """Whether float64 numbers that are far larger than what comes of them take digits away."""
    seen = numbers_inside(run)
    return not seen.narrow and (seen.largest > _MANY * max(size, 1e-300) or seen.cancelled > _MANY)
