"""Curvature that waits for the step, tied to the backward passes that wrote the gradients.

Gradients may also come from `autograd.grad`, `backward(gradient=...)` or a pass that was not observed. Hooks identify
the pass that added to a gradient. A sample of the gradient's entries shows later changes: `GradScaler.unscale_` and
writes through `.data` do not change its version. The curvature of a loss other than the gradient's is never returned.
"""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hodiff.optim.optimizer_states import precise
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
    places: slice | Tensor | None
    numbers: Tensor

    def sample(self, gradient: Tensor) -> Tensor:
        """Return the present entries of the gradient at the places of the sample."""
        if gradient.layout != torch.strided:
            return self.numbers
        flat = gradient.detach().reshape(-1)
        return (flat if self.places is None else flat[self.places]).to(self.numbers)

    def has_version_of(self, gradient: Tensor) -> bool:
        """Whether no counted write has changed the gradient."""
        return self.version == version_of(gradient)


class PendingCurvature:
    """Estimates by parameter, for exactly the loss whose gradient is in `grad`.

    Args:
        signed: Whether the curvature of the negative loss is the negative curvature.
        shared: Whether the end of a backward pass may average gradients over ranks, as DistributedDataParallel does.
    """

    def __init__(self, signed: bool, shared: bool):
        self._signed, self._shared = signed, shared
        self._noticed: list[Tensor] = []
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
        self._noticed.clear()
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
        for parameter in self._noticed if self._shared else ():
            if parameter.grad is not None:
                self._written[id(parameter)] = _as_written(parameter.grad)
        self._noticed.clear()

    def settled(self, *, strict: bool) -> dict[int, Any]:
        """Return the estimates of gradients that did not change after observed passes, except by a factor.

        Args:
            strict: Whether gradients were multiplied, so that an unknown factor is not 1.

        Returns:
            Estimates by the id of the parameter.
        """
        kept: dict[int, tuple[_Written, Tensor]] = {}
        for parameter, _ in self:
            written = self._written.get(id(parameter))
            if written is not None and parameter.grad is not None and written.gradient() is parameter.grad:
                kept[id(parameter)] = written, parameter.grad
        settled = {}
        for key, factor in zip(kept, _factors(list(kept.values()), strict), strict=True):
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
            self._noticed.append(parameter)
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
    if gradient.layout != torch.strided or bool(gradient.any()):
        return False
    if written is None or written.gradient() is not gradient or not written.has_version_of(gradient):
        return True
    return bool(written.numbers.any())


def _as_written(gradient: Tensor) -> _Written:
    places: slice | Tensor | None = None
    if gradient.layout != torch.strided:
        return _Written(weakref.ref(gradient), version_of(gradient), places, gradient.new_empty(0).to_dense())
    flat, count = gradient.detach().reshape(-1), gradient.numel()
    if count >= 2 * _SAMPLE:
        places = slice(None, None, count // _SAMPLE)
        if not bool(flat[places].any()):
            # Most rows may be zero, for example in an embedding.
            places = flat.abs().argmax().reshape(1)
    numbers = (flat if places is None else flat[places]).clone()
    return _Written(weakref.ref(gradient), version_of(gradient), places, numbers)


def _factors(pairs: Sequence[tuple[_Written, Tensor]], strict: bool) -> list[float | None]:
    """Return the factors that scaled gradients since they were written; NaN or None where a factor is unknown."""
    if not strict and _are_unchanged(pairs):
        return [1.0] * len(pairs)
    found = [_factor(*pair) for pair in pairs]
    counted = [not written.has_version_of(gradient) for written, gradient in pairs]
    # A zero gradient does not reveal its factor; gradients that were written in the same way do if they agree.
    alike = {}
    for way in (False, True):
        known = [f for f, each in zip(found, counted, strict=True) if each == way and f and not math.isnan(f)]
        alike[way] = known[0] if known and max(known) - min(known) <= 1e-3 * abs(known[0]) else None
    return [alike[way] if factor is None else factor for factor, way in zip(found, counted, strict=True)]


def _are_unchanged(pairs: Sequence[tuple[_Written, Tensor]]) -> bool:
    if not all(written.has_version_of(gradient) for written, gradient in pairs):
        return False
    before, now = defaultdict(list), defaultdict(list)
    for written, gradient in pairs:
        before[written.numbers.device].append(written.numbers)
        now[written.numbers.device].append(written.sample(gradient))
    return all(torch.equal(torch.cat(before[device]), torch.cat(now[device])) for device in before)


def _factor(written: _Written, gradient: Tensor) -> float | None:
    """Return the factor that scaled a gradient; NaN if it changed otherwise, None if it is zero everywhere."""
    if gradient.layout != torch.strided:
        return math.nan
    before, now = precise(written.numbers), precise(written.sample(gradient))
    if not bool(before.any()):
        return math.nan if bool(now.any()) else None
    peak = before.abs().argmax()
    factor = float(now[peak] / before[peak])
    rounding = 32 * torch.finfo(gradient.dtype).eps * abs(factor) * before[peak].abs()
    return factor if factor and bool(((now - factor * before).abs() <= rounding).all()) else math.nan
