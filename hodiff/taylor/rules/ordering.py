"""Rules for sorting, selection, max pooling, maxima and minima, with torch's derivatives at ties."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from hodiff.taylor.jets import new_jet
from hodiff.taylor.jets_in_arguments import Batched, along_directions, call, value_of
from hodiff.taylor.registry import name_of, rule
from hodiff.taylor.rules.arithmetic import aligned, widened
from hodiff.taylor.series import Frame, plus, times


def chosen(frame: Frame, value: Any, weight: Any, a: Any, b: Any) -> Any:
    """Combine the derivatives of a, weighted by `weight`, and of b, weighted by 1 - `weight`."""
    u, v = aligned(frame, a, b)
    rest = [plus(times(weight, x), times(1 - weight, y)) for x, y in zip(u[1:], v[1:], strict=True)]
    return widened(frame, [value, *rest])


def _extreme(frame: Frame, func: Any, a: Any, b: Any, sign: int) -> Any:
    x, y = value_of(frame, a), value_of(frame, b)
    value = func(x, y)
    x, y = torch.as_tensor(x), torch.as_tensor(y)
    weight = (x > y if sign > 0 else x < y).to(value.dtype) + 0.5 * (x == y).to(value.dtype)
    return chosen(frame, value, weight, a, b)


# Weight of the first argument at a tie of fmax and fmin.
_FIRST = 0.5 if torch.__version__ >= "2.14" else 1.0


@rule("fmax")
def fmax(frame: Frame, func: Any, a: Any, b: Any, *, out: None = None) -> Any:
    """Maximum that ignores NaN; weights at ties depend on torch's version."""
    x, y = value_of(frame, a), value_of(frame, b)
    return _of_numbers(frame, torch.fmax(x, y), x > y, a, b)


@rule("fmin")
def fmin(frame: Frame, func: Any, a: Any, b: Any, *, out: None = None) -> Any:
    """Minimum that ignores NaN; weights at ties depend on torch's version."""
    x, y = value_of(frame, a), value_of(frame, b)
    return _of_numbers(frame, torch.fmin(x, y), x < y, a, b)


def _of_numbers(frame: Frame, value: Any, is_first: Any, a: Any, b: Any) -> Any:
    x, y = value_of(frame, a), value_of(frame, b)
    weight = (is_first | torch.isnan(y)).to(value.dtype) + _FIRST * (x == y).to(value.dtype)
    return chosen(frame, value, weight, a, b)


@rule("maximum")
def maximum(frame: Frame, func: Any, a: Any, b: Any, *, out: None = None) -> Any:
    """Maximum; ties take half of each derivative."""
    return _extreme(frame, func, a, b, 1)


@rule("minimum")
def minimum(frame: Frame, func: Any, a: Any, b: Any, *, out: None = None) -> Any:
    """Minimum; ties take half of each derivative."""
    return _extreme(frame, func, a, b, -1)


@rule("amax", "amin")
def amax(frame: Frame, func: Any, x: Any, dim: Any = (), keepdim: bool = False, *, out: None = None) -> Any:
    """Extreme element, with the mean derivative of all elements that attain it."""
    value = func(x.value, dim, True)
    among = (x.value == value).to(x.value.dtype)
    dims = tuple(range(x.value.ndim)) if dim in ((), []) else dim
    weight = among / among.sum(dims, keepdim=True) if x.value.ndim else among
    moved = (x * weight).sum(dims, keepdim=keepdim) if x.value.ndim else x * weight
    return new_jet(frame, [func(x.value, dim, keepdim), *moved.coefficients[1:]])


def picked(frame: Frame, x: Any, function: Any) -> Any:
    """Apply a function that picks elements to each coefficient."""
    return new_jet(
        frame,
        [
            None if each is None else along_directions(function, (Batched(each, frame.has_axis(k)),), {})
            for k, each in enumerate(x.coefficients)
        ],
    )


def _with_indices(frame: Frame, func: Any, x: Any, args: Any, kwargs: Any, dim: int, keepdim: bool) -> Any:
    """Apply a function that returns values and indices along a dimension."""
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
    """Sort or select elements, by the indices of the value."""
    name = name_of(func)
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
    """Adaptive max pooling, by the indices of the maxima."""
    rank = next(n for n in (1, 2, 3) if f"{n}d" in name_of(func))
    _, indices = getattr(functional, f"adaptive_max_pool{rank}d")(x.value, output_size, return_indices=True)
    moved = picked(frame, x, lambda each: each.flatten(-rank).gather(-1, indices.flatten(-rank)).reshape(indices.shape))
    return (moved, indices) if return_indices else moved
