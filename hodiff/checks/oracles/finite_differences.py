"""Central differences, extrapolated to zero step, with an estimate of their own error."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_leaves, tree_map, tree_unflatten

from hodiff.common.module_state import at_another_point
from hodiff.errors import InputError

RATIO = 4.0
LEVELS = 10
# Beyond this many eliminated powers of the step, rounding of the coarse steps dominates.
DEPTH = 5
# Fewer steps would let a coincidence pass for convergence.
LEAST = 4
# If ten steps find no derivative, as for sin(x) at 1e6 or log(x) at 1e-6, ten more steps begin at this fraction.
FARTHER = RATIO**-8
# Error, relative to the largest element, from which no derivative counts as found.
FOUND = 1e-3
# An error this small, relative to the largest element, cannot change a verdict in float64.
ENOUGH = 1e-11
_DOUBLE = torch.finfo(torch.float64).eps
_SMALL, _LARGE = 1e-3, 1e2


@dataclass(frozen=True)
class DifferenceEstimate:
    """Derivative by differences, with an error estimate.

    Attributes:
        value: The derivative, in the structure of the differentiated function's output.
        error: Estimate of the largest absolute error of an element; ``inf`` if no extrapolation is finite.
        step: The step of the chosen cell of the table.
        smooth: False at a kink, where one-sided differences stay apart as the step shrinks.
    """

    value: Any
    error: float
    step: float
    smooth: bool


@at_another_point
def central_differences(f: Callable[[Any], Any], x: Any, v: Any, *, step: float | None = None) -> DifferenceEstimate:
    r"""Differentiate a function along a direction, without differentiating any of its code.

    .. math:: Df(x)[v] = \lim_{h \to 0} \frac{f(x + h v) - f(x - h v)}{2 h}

    The quotients of up to ten steps, each a quarter of the step before, are extrapolated to a zero step. The
    extrapolation that changed least is returned, with that change as its error estimate. Steps at which f raises or is
    not finite are ignored, and the refinement stops when smaller steps cannot improve the result. Everything runs in
    the dtype of ``x``: pass float64 for an oracle.

    Args:
        f: Maps ``x`` to a tensor or a pytree of tensors.
        x: Tensor or pytree of tensors, floating.
        v: Direction, same structure and shapes as ``x``.
        step: Largest step; by default ``0.1 * max(1, max|x|) / max|v|``.

    Returns:
        The derivative, in the structure of ``f(x)``, with its error estimate.

    Raises:
        InputError: If ``v`` does not match ``x``.

    Example:
        >>> import torch
        >>> x = torch.tensor([1.0, 2.0], dtype=torch.float64)
        >>> estimate = central_differences(torch.exp, x, torch.ones_like(x))
        >>> torch.allclose(estimate.value, x.exp(), rtol=1e-10), estimate.error < 1e-9
        (True, True)

    Source:
        C. J. F. Ridders, Accurate computation of F'(x) and F'(x)F''(x), Advances in Engineering Software 4
        (1982), 75-76; L. F. Richardson (1911) for the extrapolation.
    """
    x, v = tree_map(torch.Tensor.detach, x), tree_map(torch.Tensor.detach, v)
    _require_match(x, v)
    if step is None:
        size, length = _largest(x), _largest(v)
        step = 0.1 * max(1.0, size) / length if length else 0.1
    outputs, structure = tree_flatten(f(x))

    def curve(s: float) -> Tensor:
        moved = tree_map(lambda a, b: a + s * b, x, v)
        return torch.cat([y.detach().reshape(-1) for y in tree_flatten(f(moved))[0]])

    estimate = extrapolate(curve, step, extreme=has_extremes(tree_leaves(x)))
    parts = estimate.value.split([y.numel() for y in outputs])
    value = tree_unflatten([p.reshape(y.shape) for p, y in zip(parts, outputs, strict=True)], structure)
    return DifferenceEstimate(value, estimate.error, estimate.step, estimate.smooth)


def hvp_differences(f: Callable[[Any], Tensor], x: Any, v: Any, *, step: float | None = None) -> DifferenceEstimate:
    r"""Compute a Hessian-vector product by central differences of the gradient.

    .. math:: \nabla^2 f(x)\, v = \lim_{h \to 0} \frac{\nabla f(x + h v) - \nabla f(x - h v)}{2 h}

    It relies on the first derivative only, by ``torch.autograd.grad``.

    Args:
        f: Maps ``x`` to a scalar tensor.
        x: Tensor or pytree of tensors, floating; float64 for an oracle.
        v: Direction, same structure and shapes as ``x``.
        step: Largest step, as in `central_differences`.

    Returns:
        The product, in the structure of ``x``, with its error estimate.

    Raises:
        InputError: If ``v`` does not match ``x``.

    Example:
        >>> import torch
        >>> x = torch.tensor([1.0, 2.0], dtype=torch.float64)
        >>> estimate = hvp_differences(lambda x: (x**4).sum(), x, torch.ones_like(x))
        >>> torch.allclose(estimate.value, 12 * x**2, rtol=1e-9)
        True

    Source:
        J. Nocedal & S. J. Wright, Numerical Optimization, 2nd ed., 2006, equation (8.20).
    """

    def gradient(point: Any) -> Any:
        leaves, structure = tree_flatten(tree_map(lambda a: a.detach().requires_grad_(), point))
        with torch.enable_grad():
            value = f(tree_unflatten(leaves, structure))
            grads = torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True)
        return tree_unflatten(list(grads), structure)

    return central_differences(gradient, x, v, step=step)


def has_extremes(leaves: Iterable[Tensor]) -> bool:
    """Whether an element is so large or so small that the default steps may be far too large for it."""
    sizes = [leaf.detach().abs() for leaf in leaves]
    return any(bool(((each > _LARGE) | ((each > 0) & (each < _SMALL))).any()) for each in sizes)


def extrapolate(
    curve: Callable[[float], Tensor], step: float, eps: float | None = None, *, extreme: bool = False
) -> DifferenceEstimate:
    """Differentiate ``curve`` at zero by Ridders' table, normwise: one cell of the table for all elements.

    Choosing a cell for each element would let lucky coincidences into the error estimate. At extreme points it
    continues with smaller steps. Elsewhere, smaller steps would not resolve changes that are rounded inside.

    Returns:
        The derivative at zero, in the shape of ``curve(0.0)``.
    """
    estimate, found = _by_table(curve, step, eps)
    if found or not extreme or (eps is not None and eps > _DOUBLE):
        return estimate
    nearer, found = _by_table(curve, step * FARTHER, eps)
    return nearer if found else estimate


def _by_table(curve: Callable[[float], Tensor], step: float, eps: float | None) -> tuple[DifferenceEstimate, bool]:
    """Return the derivative by steps from the given step on, and whether it counts as found."""
    centre = curve(0.0)

    def sample(h: float) -> Tensor:
        """Return NaN where the function raises, as outside of its domain."""
        try:
            return curve(h)
        except Exception:
            return torch.full_like(centre, math.nan)

    precise = torch.finfo(centre.dtype).eps
    eps = precise if eps is None else eps
    steps = [step * RATIO**-level for level in range(LEVELS)]
    pairs: dict[float, tuple[Tensor, Tensor]] = {}
    best = DifferenceEstimate(torch.full_like(centre, math.nan), math.inf, steps[-1], smooth=True)
    above: list[Tensor] = []
    for h in steps:
        right, left = pairs[h] = sample(h), sample(-h)
        row = [(right - left) / (2 * h)]
        rounding = eps * max(_largest(right), _largest(left)) / h
        for power, coarse in enumerate(above[:DEPTH], start=1):
            fine = row[-1]
            row.append(fine + (fine - coarse) / (RATIO ** (2 * power) - 1))
            error = max(_largest(row[-1] - fine), _largest(row[-1] - coarse)) + rounding
            if error < best.error:
                best = DifferenceEstimate(row[-1], error, h, smooth=True)
        above = row
        # Every error includes the rounding of its step, which grows as the steps shrink.
        if len(pairs) >= LEAST and best.error <= max(RATIO * rounding, ENOUGH * _largest(best.value)):
            break
    # Two steps distinguish a kink from curvature; for noisy functions, four distinguish it from noise.
    fine_steps = steps[-4:] if eps > precise or len(pairs) == LEVELS else (steps[-3], steps[-1])
    ends = {h: pairs.get(h) or (sample(h), sample(-h)) for h in fine_steps}
    size = _largest(best.value)
    smooth = not _has_kink(centre, ends, size, precise)
    # The smallest step must agree, too: steps over whole waves agree only with each other.
    h, (right, left) = min(ends.items())
    seen = _largest((right - left) / (2 * h) - best.value) <= FOUND * size + 10 * precise * _largest(centre) / h
    estimate = DifferenceEstimate(best.value, best.error, best.step, smooth)
    return estimate, smooth and seen and best.error < FOUND * size


def _has_kink(centre: Tensor, pairs: dict[float, tuple[Tensor, Tensor]], size: float, eps: float) -> bool:
    """Whether the gap between one-sided slopes stays: it shrinks with h if smooth, and grows with 1/h if noise."""
    gaps = [_largest(right + left - 2 * centre) / (2 * h) for h, (right, left) in pairs.items()]
    if not all(map(math.isfinite, (*gaps, size))):
        return False
    noise = 10 * eps * _largest(centre) / min(pairs)
    return min(gaps) > max(0.01 * size, noise) and max(gaps) < 1.5 * min(gaps)


def _largest(tree: Any) -> float:
    return max((float(a.abs().max()) for a in tree_flatten(tree)[0] if a.numel()), default=0.0)


def _require_match(x: Any, v: Any) -> None:
    primals, expected = tree_flatten_with_path(x)
    tangents, got = tree_flatten(v)
    if expected != got:
        raise InputError(f"central_differences: v: expected the structure of x, {expected}, got {got}.")
    for (path, primal), tangent in zip(primals, tangents, strict=True):
        if primal.shape != tangent.shape:
            raise InputError(
                f"central_differences: v{keystr(path)}: expected shape {tuple(primal.shape)}, "
                f"got {tuple(tangent.shape)}."
            )
