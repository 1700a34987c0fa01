"""Functions made of pieces: which piece is decided by the value, and ties as torch's derivatives decide them."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from hodiff.taylor.elementwise import Derivatives
from hodiff.taylor.jets import Jet
from hodiff.taylor.registry import rule
from hodiff.taylor.rules.arithmetic import aligned, of_one, series_of, widened
from hodiff.taylor.series import Frame, plus, times
from hodiff.taylor.substitution import Batched, along_directions, call, moves, value_of


def chosen(frame: Frame, value: Any, weight: Any, a: Any, b: Any) -> Any:
    """The share `weight` of a and the rest of b, as for the larger of two."""
    u, v = aligned(frame, a, b)
    rest = [plus(times(weight, x), times(1 - weight, y)) for x, y in zip(u[1:], v[1:], strict=True)]
    return widened(frame, [value, *rest])


def _extreme(frame: Frame, func: Any, a: Any, b: Any, sign: int) -> Any:
    x, y = value_of(frame, a), value_of(frame, b)
    value = func(x, y)
    weight = torch.heaviside(
        sign * (x - y).to(value.dtype), torch.full((), 0.5, dtype=value.dtype, device=value.device)
    )
    return chosen(frame, value, weight, a, b)


@rule("fmax")
def fmax(frame: Frame, func: Any, a: Any, b: Any, *, out: None = None) -> Any:
    """The larger one's; the first one's at ties, and where the second is NaN."""
    x, y = value_of(frame, a), value_of(frame, b)
    return chosen(frame, torch.fmax(x, y), ((x >= y) | torch.isnan(y)).to(torch.fmax(x, y).dtype), a, b)


@rule("fmin")
def fmin(frame: Frame, func: Any, a: Any, b: Any, *, out: None = None) -> Any:
    """The smaller one's; the first one's at ties, and where the second is NaN."""
    x, y = value_of(frame, a), value_of(frame, b)
    return chosen(frame, torch.fmin(x, y), ((x <= y) | torch.isnan(y)).to(torch.fmin(x, y).dtype), a, b)


@rule("maximum")
def maximum(frame: Frame, func: Any, a: Any, b: Any, *, out: None = None) -> Any:
    """The larger one's; half of each at ties."""
    return _extreme(frame, func, a, b, 1)


@rule("minimum")
def minimum(frame: Frame, func: Any, a: Any, b: Any, *, out: None = None) -> Any:
    """The smaller one's; half of each at ties."""
    return _extreme(frame, func, a, b, -1)


def _slope(frame: Frame, u: Any, value: Any, slope: Any) -> Any:
    """A function of pieces that are lines; bounds may have a higher rank than u."""
    lines = Derivatives(lambda x, m: value if m == 0 else slope if m == 1 else None)
    return widened(frame, lines.series(frame, series_of(frame, u, value.ndim)))


@rule("clamp")
def clamp(frame: Frame, func: Any, x: Any, min: Any = None, max: Any = None, *, out: None = None) -> Any:
    """Slope 1 from bound to bound, both among them; bounds that move are maximum and minimum."""
    if moves(frame, min) or moves(frame, max):
        x = x if min is None else torch.where(value_of(frame, x) >= value_of(frame, min), x, min)
        return x if max is None else torch.where(value_of(frame, x) <= value_of(frame, max), x, max)
    u = x.value
    inside = torch.ones_like(u, dtype=torch.bool)
    inside = inside if min is None else inside & (u >= min)
    inside = inside if max is None else inside & (u <= max)
    return _slope(frame, x, torch.clamp(u, min, max), inside.to(u.dtype))


@rule("clamp_min")
def clamp_min(frame: Frame, func: Any, x: Any, min: Any, *, out: None = None) -> Any:
    """As clamp."""
    return torch.clamp(x, min=min)


@rule("clamp_max")
def clamp_max(frame: Frame, func: Any, x: Any, max: Any, *, out: None = None) -> Any:
    """As clamp."""
    return torch.clamp(x, max=max)


@rule("nn.hardtanh")
def hardtanh(
    frame: Frame, func: Any, x: Any, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False
) -> Any:
    """Slope 1 strictly inside."""
    u = x.value
    return _slope(frame, x, functional.hardtanh(u, min_val, max_val), ((u > min_val) & (u < max_val)).to(u.dtype))


@rule("nn.relu6")
def relu6(frame: Frame, func: Any, x: Any, inplace: bool = False) -> Any:
    """Hardtanh from 0 to 6."""
    return functional.hardtanh(x, 0.0, 6.0)


@rule("nn.relu")
def relu(frame: Frame, func: Any, x: Any, inplace: bool = False) -> Any:
    """As torch.relu."""
    return torch.relu(x)


@rule("nn.leaky_relu")
def leaky_relu(frame: Frame, func: Any, x: Any, negative_slope: float = 0.01, inplace: bool = False) -> Any:
    """Two slopes."""
    u = x.value
    return _slope(
        frame, x, functional.leaky_relu(u, negative_slope), torch.where(u > 0, torch.ones_like(u), negative_slope)
    )


@rule("prelu", "nn.prelu")
def prelu(frame: Frame, func: Any, x: Any, weight: Any) -> Any:
    """A slope that may move."""
    rank = value_of(frame, x).ndim
    slope = weight.reshape(-1, *[1] * (rank - 2)) if rank > 1 and value_of(frame, weight).numel() > 1 else weight
    return torch.where(value_of(frame, x) > 0, x, slope * x)


@rule("nn.threshold", "threshold")
def threshold(frame: Frame, func: Any, x: Any, threshold: float, value: float, inplace: bool = False) -> Any:
    """X above, a constant below."""
    return torch.where(x.value > threshold, x, torch.full((), value, dtype=x.value.dtype, device=x.value.device))


@rule("nn.hardshrink", "hardshrink")
def hardshrink(frame: Frame, func: Any, x: Any, lambd: float = 0.5) -> Any:
    """X outside, 0 inside."""
    u = x.value
    return _slope(frame, x, functional.hardshrink(u, lambd), ((u > lambd) | (u < -lambd)).to(u.dtype))


@rule("nn.softshrink")
def softshrink(frame: Frame, func: Any, x: Any, lambd: float = 0.5) -> Any:
    """Slope 1 outside."""
    u = x.value
    return _slope(frame, x, functional.softshrink(u, lambd), ((u > lambd) | (u < -lambd)).to(u.dtype))


@rule("nn.hardsigmoid")
def hardsigmoid(frame: Frame, func: Any, x: Any, inplace: bool = False) -> Any:
    """Slope 1/6 strictly inside."""
    u = x.value
    return _slope(frame, x, functional.hardsigmoid(u), ((u > -3) & (u < 3)).to(u.dtype) / 6)


@rule("nn.hardswish")
def hardswish(frame: Frame, func: Any, x: Any, inplace: bool = False) -> Any:
    """A parabola from -3 to 3, the line above."""

    def coefficient(u: Any, m: int) -> Any:
        if m == 0:
            return functional.hardswish(u)
        inside = ((u > -3) & (u < 3)).to(u.dtype)
        return inside * (u / 3 + 0.5) + (u >= 3).to(u.dtype) if m == 1 else inside / 6 if m == 2 else None

    return of_one(frame, x, Derivatives(coefficient))


@rule("remainder", "fmod")
def remainder(frame: Frame, func: Any, a: Any, b: Any, *, out: None = None) -> Any:
    """A less a multiple of b that is constant between jumps."""
    x, y = value_of(frame, a), value_of(frame, b)
    rounding = "floor" if getattr(func, "__name__", "").startswith("rem") else "trunc"
    multiple = torch.div(x, y, rounding_mode=rounding)
    found = a - multiple * b
    return Jet(frame, [func(x, y), *found.coefficients[1:]])


@rule("copysign")
def copysign(frame: Frame, func: Any, a: Any, b: Any, *, out: None = None) -> Any:
    """The magnitude of a with the sign of b, which is constant."""
    value = torch.copysign(value_of(frame, a), value_of(frame, b))
    if not moves(frame, a):
        return value
    u, _ = aligned(frame, a, b)
    sign = torch.sign(value) * torch.sign(u[0])
    return widened(frame, [value, *(times(sign, each) for each in u[1:])])


def picked(frame: Frame, x: Any, function: Any) -> Any:
    """Each coefficient through a function that picks elements."""
    return Jet(
        frame,
        [
            None if each is None else along_directions(function, (Batched(each, frame.has_axis(k)),), {})
            for k, each in enumerate(x.coefficients)
        ],
    )


def _with_indices(frame: Frame, func: Any, x: Any, args: Any, kwargs: Any, dim: int, keepdim: bool) -> Any:
    """A function that returns values and indices along a dimension."""
    found = func(x.value, *args, **kwargs)
    _, indices = found

    def take(each: Any) -> Any:
        if each.ndim == 0:
            return each
        at = indices if keepdim else indices.unsqueeze(dim)
        taken = torch.gather(each, dim, at)
        return taken if keepdim else taken.squeeze(dim)

    moved = picked(frame, x, take)
    return type(found)((moved, indices)) if type(found) in (tuple, list) else type(found)([moved, indices])


@rule("sort", "topk", "msort", "cummax", "cummin", "kthvalue", "median", "nanmedian", "mode", "max", "min")
def ordered(frame: Frame, func: Any, x: Any, *args: Any, out: None = None, **kwargs: Any) -> Any:
    """What is picked by order, by the indices of the value."""
    name = getattr(func, "__name__", "")
    if name in ("max", "min") and args and not isinstance(args[0], int):
        return {"max": torch.maximum, "min": torch.minimum}[name](x, args[0])
    if name in ("max", "min") and "other" in kwargs:
        return {"max": torch.maximum, "min": torch.minimum}[name](x, kwargs["other"])
    if name in ("max", "min") and not args and "dim" not in kwargs:
        return {"max": torch.amax, "min": torch.amin}[name](x)
    if name == "msort":
        return torch.sort(x, 0)[0]
    if name in ("median", "nanmedian") and not args and "dim" not in kwargs:
        return call(func, (x.reshape(-1), 0), {})[0]
    first_of_args = name in ("sort", "median", "nanmedian", "mode", "max", "min", "cummax", "cummin")
    position = 0 if first_of_args else 1
    dim = args[position] if len(args) > position else kwargs.get("dim", -1)
    keeps = name in ("sort", "topk", "cummax", "cummin")
    keepdim = keeps or (args[position + 1] if len(args) > position + 1 else kwargs.get("keepdim", False))
    return _with_indices(frame, func, x, args, kwargs, dim, bool(keepdim))


@rule("amax", "amin")
def amax(frame: Frame, func: Any, x: Any, dim: Any = (), keepdim: bool = False, *, out: None = None) -> Any:
    """The mean over those that are the extreme."""
    value = func(x.value, dim, True)
    among = (x.value == value).to(x.value.dtype)
    dims = tuple(range(x.value.ndim)) if dim in ((), []) else dim
    weight = among / among.sum(dims, keepdim=True) if x.value.ndim else among
    moved = (x * weight).sum(dims, keepdim=keepdim) if x.value.ndim else x * weight
    return Jet(frame, [func(x.value, dim, keepdim), *moved.coefficients[1:]])


def _pooling(rank: int) -> None:
    name = f"max_pool{rank}d"
    with_indices = getattr(functional, f"{name}_with_indices")

    def pool(frame: Frame, func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        wanted = kwargs.pop("return_indices", False) or func is with_indices
        _, indices = with_indices(x.value, *args, **kwargs)

        def take(each: Any) -> Any:
            return each.flatten(-rank).gather(-1, indices.flatten(-rank)).reshape(indices.shape)

        moved = picked(frame, x, take)
        return (moved, indices) if wanted else moved

    for each in (f"nn.{name}", f"nn.{name}_with_indices", name):
        rule(each)(pool)


for _rank in (1, 2, 3):
    _pooling(_rank)


@rule("nn.adaptive_max_pool1d", "nn.adaptive_max_pool2d", "nn.adaptive_max_pool3d")
def adaptive_max_pool(frame: Frame, func: Any, x: Any, output_size: Any, return_indices: bool = False) -> Any:
    """By the indices of the maxima."""
    rank = next(n for n in (1, 2, 3) if f"{n}d" in getattr(func, "__name__", ""))
    _, indices = getattr(functional, f"adaptive_max_pool{rank}d")(x.value, output_size, return_indices=True)
    moved = picked(frame, x, lambda each: each.flatten(-rank).gather(-1, indices.flatten(-rank)).reshape(indices.shape))
    return (moved, indices) if return_indices else moved
