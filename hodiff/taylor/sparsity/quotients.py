"""Quotients that wait: attention weights are divided after the sum in which they are used.

Numerators of a softmax over particles depend on two particles, weights on all. Where weights enter a product of
matrices, as in attention, the division comes after the product, and the weights themselves are never computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from hodiff.taylor.jets import Jet, TensorJet, level_of_all
from hodiff.taylor.series import Coefficient, Frame
from hodiff.taylor.sparsity.slots import Call, moves
from hodiff.torch_internals.autograd.transforms import at_level, in_transform


class Quotient(TensorJet):
    """A jet in slots over a broadcast jet with all directions, divided when its coefficients are needed."""

    # `value` holds coefficient 0 alone.
    def __init__(self, frame: Frame, value: Sequence[Coefficient], call: Call, numerator: Jet, denominator: Jet):
        super().__init__(frame, value)
        self.call = call
        self.numerator = numerator
        self.denominator = denominator
        self.recorded = torch.is_grad_enabled()

    def in_slots(self) -> tuple[Coefficient, ...]:
        """Coefficients of the quotient, computed at the first access."""
        if len(self.held) == 1:
            call = self.call
            args, kwargs = call.arguments
            parts = (*self.numerator.in_slots(), *self.denominator.in_slots())
            # Divide as if at the time when the quotient was made.
            with (
                at_level(level_of_all(parts)) if in_transform() else nullcontext(),
                torch.set_grad_enabled(self.recorded),
            ):
                self.held = call.entry.rule(call.frame, call.func, *args, **kwargs).in_slots()
        return super().in_slots()

    @property
    def value(self) -> Any:
        """Coefficient 0, which needs no further division."""
        return self.held[0]

    @property
    def waits(self) -> bool:
        """Whether the division has not been run yet."""
        return len(self.held) == 1


def quotient(call: Call) -> Any:
    """Create a quotient that waits; NotImplemented where the division can run at once."""
    args, kwargs = call.arguments
    if len(args) != 2 or kwargs:
        return NotImplemented
    a, b = args
    if not all(isinstance(each, Jet) and each.frame is call.frame and moves(each) for each in (a, b)):
        return NotImplemented
    if a.support is None or b.support is not None or a.value.ndim != b.value.ndim:
        return NotImplemented
    broadcast = a.value.ndim > 1 and 1 in (b.value.shape[-1], b.value.shape[-2]) and b.value.numel() < a.value.numel()
    return Quotient(call.frame, [a.value / b.value], call, a, b) if broadcast else NotImplemented
