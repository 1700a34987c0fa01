"""Torch's value beside hodiff's derivatives, where a formula with the right derivatives rounds otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hodiff.rules.elementwise import ElementwiseFunction


class WithValue(ElementwiseFunction):
    """The derivatives of the first tensor and the value of the second, which is a constant. Saves nothing for them."""

    @staticmethod
    def forward(y: Tensor, value: Tensor) -> Tensor:
        """Copy the value."""
        del y
        return value.clone()

    @staticmethod
    def residuals(inputs: Sequence[Any], output: Any) -> Sequence[Any]:
        """None."""
        del inputs, output
        return ()

    @staticmethod
    def slope(index: int) -> float:
        """One, as of the identity."""
        return 1.0 - index


def with_value(y: Tensor, value: Tensor) -> Tensor:
    """The derivatives of a tensor with the value of another, of the same shape and dtype."""
    # A compiler differentiates what a Function's forward consists of, so there the value is that of the formula.
    return y if torch.compiler.is_compiling() else WithValue.call(y, value.detach())
