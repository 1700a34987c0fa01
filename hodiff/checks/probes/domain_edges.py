"""Probes of large arguments and edges of the domain: HD111, HD112."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from hodiff.checks.attempts import Failure, attempt
from hodiff.checks.probes.cause import Cause, no_entry
from hodiff.checks.probes.function_calls import LeavesFunction

SCALES = (10.0, -10.0, 100.0, -100.0, 1000.0, -1000.0)
# Relative error from which a float32 result has no correct digit.
LOST = 0.1
_LARGEST = 1e30
_TOWARDS_INFINITY = (1e2, 1e4, 1e8)


def large_arguments(
    function: LeavesFunction, leaves: tuple[Tensor, ...], location: str, truth: LeavesFunction | None = None
) -> list[Cause]:
    """Compare low precision with float64, or `truth`, at large arguments whose result it can hold."""
    low = tuple(leaf.float() if truth is None else leaf for leaf in leaves)
    pair = (function, function if truth is None else truth)
    if any(True for _ in _disagreements(*pair, low)):
        return []
    bad: dict[str, list[str]] = {}
    for i, leaf in enumerate(low):
        for scale in SCALES:
            moved = tuple(each * scale if i == j else each for j, each in enumerate(low))
            if not leaf.numel():
                continue
            for what, seen in _disagreements(*pair, moved):
                bad.setdefault(what, []).append(f"{what} {seen} where input {i} is {scale:g} times as large")
    evidence = [texts[0] for what, texts in bad.items() if len(texts) > 1 or "not finite" in texts[0]]
    return [Cause("HD111", tuple(evidence), no_entry, location, severity="warning")] if evidence else []


def _disagreements(
    function: LeavesFunction, exact: LeavesFunction, single: tuple[Tensor, ...]
) -> Iterator[tuple[str, str]]:
    double = tuple(each.double() for each in single)
    nearby = tuple(x * (1 + torch.finfo(each.dtype).eps) for x, each in zip(double, single, strict=True))
    dtype = str(min((each.dtype for each in single), key=lambda dtype: -torch.finfo(dtype).eps)).split(".")[-1]
    points = ((function, single), (exact, double), (exact, nearby))
    pairs = [
        (what, *(attempt(rule, f, point) for f, point in points))
        for what, rule in (("the value", values_of), ("the gradient", gradients_of))
    ]
    values = pairs[0][2]
    if isinstance(values, Failure) or not all(bool(y.isfinite().all()) for y in values):
        return
    spread = max((float(y.abs().max()) for y in values if y.numel()), default=0.0)
    spread /= max(float(each.abs().max()) for each in double if each.numel())
    for what, *outcomes in pairs:
        if any(isinstance(outcome, Failure) for outcome in outcomes):
            continue
        for y, truth, moved in zip(*outcomes, strict=True):
            if not truth.numel() or float(truth.abs().nan_to_num(0.0).max()) > _LARGEST:
                continue
            if not bool(truth.isfinite().all()):
                yield what, "is not finite"
                return
            if not bool(y.isfinite().all()):
                yield what, f"is not finite in {dtype}"
                return
            size = float(truth.abs().max())
            error = float((y.double() - truth).abs().max())
            # No formula is more accurate than the effect of rounding its inputs, and a derivative that vanishes up to
            # rounding may have the rounding of the values.
            allowed = max(LOST * size, 1e3 * float((moved - truth).abs().max()), 1e-3 * spread)
            if error > allowed and size > 1e-30:
                yield what, f"is off by {error / size:.0e} in {dtype}"
                return


def values_of(function: LeavesFunction, leaves: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the outputs, complex outputs as pairs of real numbers."""
    with torch.no_grad():
        return tuple(_real(y) for y in function(*(leaf.clone() for leaf in leaves)))


def gradients_of(function: LeavesFunction, leaves: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the gradients of a weighted sum of all outputs."""
    tracked = [leaf.clone().requires_grad_() for leaf in leaves]
    with torch.enable_grad():
        outputs = [_real(y) for y in function(*(leaf.clone() for leaf in tracked))]
        total = sum(((y * _weights(y)).sum() for y in outputs), torch.zeros((), device="cpu"))
        gradients = torch.autograd.grad(total, tracked, allow_unused=True, materialize_grads=True)
    return tuple(gradient.detach() for gradient in gradients)


def _weights(y: Tensor) -> Tensor:
    """Return unequal weights, as many functions have outputs with a constant sum."""
    return torch.cos(torch.arange(y.numel(), dtype=torch.float64, device="cpu")).reshape(y.shape).to(y)


def _real(y: Tensor) -> Tensor:
    return torch.view_as_real(y) if y.is_complex() else y


def domain_edges(
    function: LeavesFunction,
    leaves: tuple[Tensor, ...],
    location: str,
    truth: LeavesFunction | None = None,
    *,
    infinite: bool = True,
) -> list[Cause]:
    """Report gradients that are not finite at zeros, ties and infinities where the function has slopes."""
    points: list[tuple[str, tuple[Tensor, ...], int | None]] = [(*each, None) for each in _edges(leaves)]
    if infinite:
        points += _infinities(leaves)
    for name, point, only in points:
        outcome = attempt(bad_gradient, function, point, truth, only)
        if isinstance(outcome, str) and outcome:
            return [Cause("HD112", (f"{outcome} {name}",), no_entry, location, severity="warning")]
    return []


def _edges(leaves: tuple[Tensor, ...]) -> Iterator[tuple[str, tuple[Tensor, ...]]]:
    for i, leaf in enumerate(leaves):
        if not leaf.numel():
            continue

        def put(value: Tensor, i: int = i) -> tuple[Tensor, ...]:
            return tuple(value if j == i else each for j, each in enumerate(leaves))

        first = leaf.clone()
        first.view(-1)[0] = 0.0
        yield f"where an element of input {i} is 0", put(first)
        if leaf.numel() > 1:
            yield f"where input {i} is 0", put(torch.zeros_like(leaf))
            yield f"where all elements of input {i} are equal", put(torch.full_like(leaf, float(leaf.view(-1)[0])))
        for j, other in enumerate(leaves[:i]):
            if other.shape == leaf.shape:
                yield f"where inputs {j} and {i} are equal", put(other.clone())


def _infinities(leaves: tuple[Tensor, ...]) -> Iterator[tuple[str, tuple[Tensor, ...], int]]:
    """Yield points with an infinite element, and that input's index: other gradients may be infinite, too."""
    for i, leaf in enumerate(leaves):
        for infinity in ("inf", "-inf") if leaf.numel() else ():
            outside = leaf.clone()
            outside.view(-1)[0] = float(infinity)
            yield f"where an element of input {i} is {infinity}", (*leaves[:i], outside, *leaves[i + 1 :]), i


def bad_gradient(
    function: LeavesFunction, point: tuple[Tensor, ...], truth: LeavesFunction | None = None, only: int | None = None
) -> str:
    """Name a gradient that is not finite though f, or its float64 `truth`, has slopes; "" if there is none."""
    values = values_of(function, point)
    if not all(bool(y.isfinite().all()) for y in values):
        return ""
    gradients = gradients_of(function, point)
    exact = function if truth is None else truth
    wide = point if truth is None else tuple(leaf.double() for leaf in point)
    for i, gradient in enumerate(gradients):
        bad = ~gradient.isfinite() if only is None else ~gradient.reshape(-1)[: int(i == only)].isfinite()
        if bool(bad.any()) and _has_slopes(exact, wide, i, int(bad.reshape(-1).nonzero()[0])):
            return f"the gradient of input {i} is not finite"
    return ""


def _has_slopes(function: LeavesFunction, point: tuple[Tensor, ...], i: int, element: int) -> bool:
    """Whether one-sided differences stay bounded as the step shrinks; at infinity, whether they vanish."""

    def at(h: float, x: float | None = None) -> Tensor:
        leaf = point[i].clone()
        leaf.view(-1)[element] = h + (leaf.view(-1)[element] if x is None else x)
        moved = values_of(function, (*point[:i], leaf, *point[i + 1 :]))
        return torch.cat([y.double().reshape(-1) for y in moved])

    x = float(point[i].reshape(-1)[element])
    centre = at(0.0)
    if not centre.numel():
        return True
    if math.isinf(x):
        return _has_limit(partial(at, 0.0), centre, math.copysign(1.0, x))
    for sign in (1.0, -1.0):
        coarse, fine = ((at(sign * h) - centre) / h for h in (1e-4, 1e-6))
        if not bool(coarse.isfinite().all()) or not bool(fine.isfinite().all()):
            return False
        if float(fine.abs().max()) > 2 * float(coarse.abs().max()) + 1e-3:
            return False
    return True


def _has_limit(at: Callable[[float], Tensor], limit: Tensor, sign: float) -> bool:
    """Whether values converge at infinity and slopes vanish, so that the derivative there is zero."""
    size = max(1.0, float(limit.abs().max()))
    gaps, slopes = [], []
    for x in _TOWARDS_INFINITY:
        here, further = at(sign * x), at(sign * 1.5 * x)
        gaps.append(float((here - limit).abs().max()))
        slopes.append(float((further - here).abs().max()) / (0.5 * x))
    # NaN compares false.
    return gaps[-1] <= 1e-3 * size and gaps[-1] <= gaps[0] + 1e-9 * size and slopes[-1] <= 1e-6 * size
