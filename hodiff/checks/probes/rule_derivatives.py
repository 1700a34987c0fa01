"""Slopes of a rule with respect to the tensors it reads, by differences and by autograd."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hodiff.checks.attempts import Failure, attempt
from hodiff.checks.probes.function_calls import ForwardRun, as_tuple

CUT = 1e-4
# Relative difference of slopes of a step and half of it, below which there is no jump or kink.
_JUMP = 0.01
_DOUBLE = torch.finfo(torch.float64).eps


@dataclass(frozen=True)
class Precision:
    """Precision of differences of a rule.

    Attributes:
        step: Step, relative to the tensor that is moved.
        cut: Tolerated difference of autograd and differences, relative to the slope.
        noise: Tolerated difference, relative to the value of the rule.
    """

    step: float
    cut: float = CUT
    noise: float = 1e-7

    @property
    def is_low(self) -> bool:
        """Whether rounding limits the tolerance."""
        return self.cut > CUT

    def noise_of(self, tensor: Tensor, size: float) -> float:
        """Return the error of a slope by a tensor that is caused by rounding of the rule's value."""
        return self.noise * size / (max(1e-3, float(tensor.abs().max())) if self.is_low else 1.0)

    @staticmethod
    def of(eps: float) -> Precision:
        """Return the precision of a rule that rounds to eps; in low precision, truncation and rounding are balanced."""
        if eps <= _DOUBLE:
            return Precision(1e-5)
        error = eps ** (2 / 3)
        return Precision(eps ** (1 / 3), min(0.3, 30 * error), error)


@dataclass(frozen=True)
class Slope:
    """Slope of a rule with respect to one of the tensors that it can read.

    Attributes:
        name: Name such as ``"saved_tensors[0]"``, ``"ctx.slope"``, ``"incoming 0"``.
        tensor: The tensor.
        by_differences: Derivative of the rule along a random direction, by differences.
        by_autograd: Derivative of the rule along the same direction, by autograd.
        size: The value of the rule, contracted.
        precision: The precision of differences.
        noise: Slope that rounding alone may cause.
    """

    name: str
    tensor: Tensor
    by_differences: float
    by_autograd: float
    size: float
    precision: Precision
    noise: float

    @property
    def matters(self) -> bool:
        """Whether the rule's result changes with the tensor."""
        return abs(self.by_differences) > 10 * self.noise

    @property
    def cut(self) -> bool:
        """Whether autograd and differences disagree."""
        larger = max(abs(self.by_differences), abs(self.by_autograd))
        return abs(self.by_differences - self.by_autograd) > self.precision.cut * larger + self.noise


def slopes_of(ran: ForwardRun, reading: str, incoming: tuple[Any, ...], generator: torch.Generator) -> list[Slope]:
    """Return the slopes of a rule with respect to every tensor that it reads."""
    rule = inspect.unwrap(ran.call.backward) if reading == "backward" else ran.call.function.jvp
    ran.context.reading = reading
    names = {n: t for n, t in ran.context.tensors().items() if t.is_floating_point() and t.numel()}
    names |= {f"incoming {k}": g for k, g in enumerate(incoming) if isinstance(g, Tensor) and g.is_floating_point()}
    weights: dict[int, Tensor] = {}
    read = [torch.finfo(t.dtype).eps for t in names.values()]
    precision = Precision.of(max([ran.call.eps, *read]))

    def value(given: dict[str, Tensor]) -> Tensor:
        context = ran.context.replaced(lambda name, t: given.get(name, t).clone(), reading)
        entering = [given.get(f"incoming {k}", g) for k, g in enumerate(incoming)]
        # A rule may write into its arguments.
        entering = [g.clone() if isinstance(g, Tensor) else g for g in entering]
        results = as_tuple(rule(context, *entering))
        total = torch.zeros((), dtype=torch.float64, device="cpu")
        for i, y in enumerate(results):
            if isinstance(y, Tensor) and (y.is_floating_point() or y.is_complex()):
                y = torch.view_as_real(y) if y.is_complex() else y
                if i not in weights:
                    weights[i] = torch.randn(y.shape, generator=generator, dtype=torch.float64, device=generator.device)
                total = total + (weights[i] * y).sum()
        return total

    with torch.no_grad():
        size = abs(float(value({})))
    variables = {name: t.detach().clone().requires_grad_() for name, t in names.items()}
    with torch.enable_grad():
        outcome = attempt(value, variables)
        grads: Any = (None,) * len(variables)
        if isinstance(outcome, Tensor) and outcome.requires_grad:
            found = attempt(lambda: torch.autograd.grad(outcome, list(variables.values()), allow_unused=True))
            if isinstance(found, Failure):
                # The rule raises, which the comparisons of routes report.
                return []
            grads = found
    slopes = []
    for (name, t), grad in zip(names.items(), grads, strict=True):
        draw = torch.randn(t.shape, generator=generator, dtype=torch.float64, device=generator.device).to(t)

        def moved(move: Tensor, name: str = name, t: Tensor = t) -> Tensor:
            return value({name: t + move})

        # A tensor that is compared with zero has jumps where it is zero.
        for direction in (draw, draw * (t != 0)):
            numeric, smooth = _by_differences(moved, direction, t, precision)
            exact = 0.0 if grad is None else float((grad * direction).sum())
            slope = Slope(name, t, numeric, exact, size, precision, precision.noise_of(t, size))
            if not slope.cut or smooth():
                break
        else:
            slope = replace(slope, by_differences=exact)
        slopes.append(slope)
    return slopes


def _by_differences(
    value: Callable[[Tensor], Tensor], direction: Tensor, t: Tensor, precision: Precision
) -> tuple[float, Callable[[], bool]]:
    """Return the slope along a direction, and a test that half of the step agrees from both sides."""
    h = precision.step * max(1e-3, float(t.abs().max()))

    def at(s: float) -> float:
        with torch.no_grad():
            return float(value(s * direction))

    right, left = at(h), at(-h)
    slope = (right - left) / (2 * h)

    def smooth() -> bool:
        near_right, near_left, centre = at(h / 2), at(-h / 2), at(0.0)
        near = (near_right - near_left) / h
        gap, near_gap = abs(right + left - 2 * centre) / h, abs(near_right + near_left - 2 * centre) / (h / 2)
        size = max(abs(slope), abs(near))
        allowed = max(_JUMP, 2 * precision.cut) * size
        return abs(slope - near) <= allowed and (near_gap <= allowed or near_gap < 0.8 * gap)

    return slope, smooth
