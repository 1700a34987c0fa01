"""Curvature that waits for the step, tied to the backward passes that wrote the gradients.

Gradients may also come from `autograd.grad`, `backward(gradient=...)` or a pass that was not observed. Hooks identify
the pass that added to a gradient, and the gradient's version shows later changes. The curvature of a loss other than
the gradient's is never returned.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hodiff.optim.stochastic.precise_states import precise
from hodiff.torch_internals.tensors import version_of

# Pairs of parameters and estimates; a dict would compare tensors. Estimates support addition and multiplication by
# numbers.
Estimates = Sequence[tuple[Tensor, Any]]
# Number of a gradient's entries that determine the factor of a later multiplication.
_SAMPLE = 256


@dataclass(frozen=True, eq=False)
class _Written:
    """Gradient as an observed backward pass left it, with a sample of its entries."""

    gradient: weakref.ref[Tensor]
    version: int
    places: slice | Tensor
    numbers: Tensor


class PendingCurvature:
    """Estimates by parameter, for exactly the loss whose gradient is in `grad`.

    Args:
        signed: Whether the curvature of the negative loss is the negative curvature.
    """

    def __init__(self, signed: bool):
        self._signed = signed
        self._estimates: dict[int, tuple[Tensor, Any]] = {}
        self._coming: dict[int, Any] = {}
        self._written: dict[int, _Written] = {}
        self._hooks: dict[int, Any] = {}
        weakref.finalize(self, _remove, self._hooks)

    def __iter__(self) -> Iterator[tuple[Tensor, Any]]:
        return iter(self._estimates.values())

    def __bool__(self) -> bool:
        return bool(self._estimates)

    def clear(self) -> None:
        """Drop all estimates."""
        self._estimates.clear()
        self._written.clear()

    def watch(self, parameters: Sequence[Tensor]) -> None:
        """Observe backward passes that add to the gradients of these parameters.

        Hooks run in the order of registration. A user's hook that takes the step within the backward pass is registered
        after the optimizer, and has to find the curvature. Hooks are therefore not removed between refreshes.
        """
        for parameter in parameters:
            hooked, _ = self._hooks.get(id(parameter), (None, None))
            # A freed parameter may have had the same id.
            if hooked is None or hooked() is not parameter:
                handle = parameter.register_post_accumulate_grad_hook(_noticed_by(weakref.ref(self)))
                self._hooks[id(parameter)] = weakref.ref(parameter), handle

    def announce(self, estimates: Estimates) -> None:
        """Set the estimates of the loss whose backward pass begins."""
        self._coming.clear()
        before = self.settled(strict=False)
        for key, estimate in before.items():
            # The factor of a zero gradient is only known as long as all gradients have the factor.
            parameter, unchanged = self._estimates[key]
            if estimate is not unchanged:
                self._take(parameter, estimate)
        self.watch([p for p, _ in estimates])
        for parameter, estimate in estimates:
            key = id(parameter)
            if _is_empty(parameter, self._written.get(key)):
                self._coming[key] = estimate
            elif key in before:
                self._coming[key] = before[key] + estimate

    def passed(self) -> None:
        """Note that the backward pass has ended."""
        self._coming.clear()

    def settled(self, *, strict: bool) -> dict[int, Any]:
        """Return the estimates of gradients that did not change after observed passes, except by a factor.

        Args:
            strict: Whether gradients were multiplied, so that an unknown factor is not 1.

        Returns:
            Estimates by the id of the parameter.
        """
        factors: dict[int, float | None] = {}
        for parameter, _ in self:
            written = self._written.get(id(parameter))
            if written is not None and parameter.grad is not None and written.gradient() is parameter.grad:
                factors[id(parameter)] = _factor(written, parameter.grad, strict)
        known = [each for each in factors.values() if each is not None and not math.isnan(each)]
        # A zero gradient does not reveal its factor; other gradients do if their factors agree.
        alike = known[0] if known and max(known) - min(known) <= 1e-3 * abs(known[0]) else None
        settled = {}
        for key, factor in factors.items():
            factor = alike if factor is None else factor
            if strict and (factor is None or math.isnan(factor)):
                continue
            factor = 1.0 if factor is None or math.isnan(factor) else factor if self._signed else abs(factor)
            estimate = self._estimates[key][1]
            settled[key] = estimate if factor == 1 else estimate * factor
        return settled

    def notice(self, parameter: Tensor) -> None:
        """Record that a backward pass has added to the gradient of a parameter."""
        key = id(parameter)
        if key in self._coming:
            self._take(parameter, self._coming.pop(key))
        else:
            self._estimates.pop(key, None)
            self._written.pop(key, None)

    def _take(self, parameter: Tensor, estimate: Any) -> None:
        assert parameter.grad is not None
        self._estimates[id(parameter)] = parameter, estimate
        self._written[id(parameter)] = _as_written(parameter.grad)


def _noticed_by(reference: weakref.ref[PendingCurvature]) -> Any:
    def hook(parameter: Tensor) -> None:
        pending = reference()
        if pending is not None:
            pending.notice(parameter)

    return hook


def _remove(hooks: dict[int, Any]) -> None:
    for _, handle in hooks.values():
        handle.remove()


def _is_empty(parameter: Tensor, written: _Written | None) -> bool:
    """Whether a gradient was zeroed; zeros that an observed pass wrote do not count."""
    gradient = parameter.grad
    if gradient is None:
        return True
    if written is not None and written.gradient() is gradient and written.version == version_of(gradient):
        return False
    return gradient.layout == torch.strided and not bool(gradient.any())


def _as_written(gradient: Tensor) -> _Written:
    places: slice | Tensor = slice(None)
    if gradient.layout == torch.strided:
        flat = gradient.detach().reshape(-1)
        places = slice(None, None, max(1, len(flat) // _SAMPLE))
        if len(flat) > 2 * _SAMPLE and not bool(flat[places].any()):
            # Most rows may be zero, for example in an embedding.
            places = flat.abs().argmax().reshape(1)
        numbers = flat[places].clone()
    else:
        numbers = gradient.new_empty(0).to_dense()
    return _Written(weakref.ref(gradient), version_of(gradient), places, numbers)


def _factor(written: _Written, gradient: Tensor, strict: bool) -> float | None:
    """Return the factor that scaled a gradient; NaN if it changed otherwise, None if it is zero everywhere."""
    if not strict and written.version == version_of(gradient):
        return 1.0
    if gradient.layout != torch.strided:
        return math.nan
    before, now = precise(written.numbers), precise(gradient.detach().reshape(-1)[written.places])
    if not bool(before.any()):
        return math.nan if bool(now.any()) else None
    peak = before.abs().argmax()
    factor = float(now[peak] / before[peak])
    rounding = 32 * torch.finfo(gradient.dtype).eps * abs(factor) * before[peak].abs()
    return factor if factor and bool(((now - factor * before).abs() <= rounding).all()) else math.nan
