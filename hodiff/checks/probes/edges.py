"""Large arguments and edges of the domain: HD111, HD112."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from hodiff.checks.comparison import Failure, attempt
from hodiff.checks.probes.cause import Cause, nothing

Many = Callable[..., tuple[Tensor, ...]]

SCALES = (10.0, -10.0, 100.0, -100.0, 1000.0, -1000.0)
# Below this a float32 result has no correct digit; a right one loses a few at most.
LOST = 0.1
_LARGEST = 1e30
_ROUNDING = 2.0**-23


def large_arguments(function: Many, leaves: tuple[Tensor, ...], location: str) -> list[Cause]:
    """Run in float32 and in float64 at large arguments; what float32 can hold, it has to get right."""
    if any(True for _ in _disagreements(function, tuple(leaf.float() for leaf in leaves))):
        return []
    bad: dict[str, list[str]] = {}
    for i, leaf in enumerate(leaves):
        for scale in SCALES:
            moved = tuple((each * scale if i == j else each).float() for j, each in enumerate(leaves))
            if not leaf.numel():
                continue
            for what, seen in _disagreements(function, moved):
                bad.setdefault(what, []).append(f"{what} {seen} where input {i} is {scale:g} times as large")
    evidence = [texts[0] for what, texts in bad.items() if len(texts) > 1 or "not finite" in texts[0]]
    return [Cause("HD111", tuple(evidence), nothing, location, severity="warning")] if evidence else []


def _disagreements(function: Many, single: tuple[Tensor, ...]) -> Iterator[tuple[str, str]]:
    double = tuple(each.double() for each in single)
    nearby = tuple(each * (1 + _ROUNDING) for each in double)
    pairs = [
        (what, *(attempt(rule, function, point) for point in (single, double, nearby)))
        for what, rule in (("the value", _values), ("the gradient", _gradients))
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
                yield what, "is not finite in float32"
                return
            size = float(truth.abs().max())
            error = float((y.double() - truth).abs().max())
            # No formula can do better than what rounding of the inputs does to its result, and a derivative that
            # vanishes but for rounding is no worse than the rounding of the values.
            allowed = max(LOST * size, 1e3 * float((moved - truth).abs().max()), 1e-3 * spread)
            if error > allowed and size > 1e-30:
                yield what, f"is off by {error / size:.0e} in float32"
                return


def _values(function: Many, leaves: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    with torch.no_grad():
        return tuple(_real(y) for y in function(*(leaf.clone() for leaf in leaves)))


def _gradients(function: Many, leaves: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    tracked = [leaf.clone().requires_grad_() for leaf in leaves]
    with torch.enable_grad():
        outputs = [_real(y) for y in function(*(leaf.clone() for leaf in tracked))]
        total = sum(((y * _weights(y)).sum() for y in outputs), torch.zeros(()))
        gradients = torch.autograd.grad(total, tracked, allow_unused=True, materialize_grads=True)
    return tuple(gradient.detach() for gradient in gradients)


def _weights(y: Tensor) -> Tensor:
    """Different ones: many functions have outputs whose sum is a constant."""
    return torch.cos(torch.arange(y.numel(), dtype=torch.float64)).reshape(y.shape).to(y)


def _real(y: Tensor) -> Tensor:
    return torch.view_as_real(y) if y.is_complex() else y


def edges(function: Many, leaves: tuple[Tensor, ...], location: str) -> list[Cause]:
    """Go to zeros and ties; where the function has slopes from both sides, its derivatives have to be finite."""
    for name, point in _edges(leaves):
        outcome = attempt(_bad_gradient, function, point)
        if isinstance(outcome, str) and outcome:
            return [Cause("HD112", (f"{outcome} {name}",), nothing, location, severity="warning")]
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


def _bad_gradient(function: Many, point: tuple[Tensor, ...]) -> str:
    values = _values(function, point)
    if not all(bool(y.isfinite().all()) for y in values):
        return ""
    gradients = _gradients(function, point)
    for i, gradient in enumerate(gradients):
        bad = ~gradient.isfinite()
        if bool(bad.any()) and _has_slopes(function, point, i, int(bad.reshape(-1).nonzero()[0])):
            return f"the gradient of input {i} is not finite"
    return ""


def _has_slopes(function: Many, point: tuple[Tensor, ...], i: int, element: int) -> bool:
    """Whether differences from both sides stay bounded as the step shrinks."""

    def at(h: float) -> Tensor:
        leaf = point[i].clone()
        leaf.view(-1)[element] += h
        return torch.cat([y.double().reshape(-1) for y in _values(function, (*point[:i], leaf, *point[i + 1 :]))])

    centre = at(0.0)
    for sign in (1.0, -1.0):
        coarse, fine = ((at(sign * h) - centre) / h for h in (1e-4, 1e-6))
        if not bool(coarse.isfinite().all()) or not bool(fine.isfinite().all()):
            return False
        if float(fine.abs().max()) > 2 * float(coarse.abs().max()) + 1e-3:
            return False
    return True
