"""Euclidean projection on a box cut by a hyperplane, with derivatives of every order wherever they exist."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from hodiff.common.trees import describe
from hodiff.errors import InputError
from hodiff.rules.arguments import require_dims, require_floating, require_number_or_floating
from hodiff.torch_internals.autograd.differentiation import only_reverse_mode

# Number of parts into which a search splits the range of kinks; operator calls dominate the time of small problems.
WAYS = 8


def project_box_plane(
    x: Tensor,
    normal: Tensor | float,
    level: Tensor | float = 0.0,
    lower: Tensor | float = 0.0,
    upper: Tensor | float = 1.0,
    dim: int = -1,
) -> Tensor:
    r"""Euclidean projection on the part of a hyperplane that lies in a box, $\{y : n^\top y = c, \; l \le y \le u\}$.

    $$ y_i = \min(\max(x_i - \tau n_i, l_i), u_i), \qquad \textstyle\sum_i n_i y_i = c $$

    The left-hand side of the second equation is piecewise linear and decreases with $\tau$. Its kinks are sorted, and a
    search among them finds the exact piece with the value $c$. There, with $F$ the free entries and all other entries
    at their bounds, $\tau = (n^\top y_{\tau=0} - c) / \lVert n_F \rVert^2$. This formula is differentiated in $x$, $n$,
    $c$, $l$ and $u$, to any order, by every route and under `torch.func.vmap`. The dual of a support vector machine
    with bias has this set, with the labels as $n$.

    Args:
        x: Floating-point tensor of at least one dimension.
        normal: $n$: number, or floating-point tensor that broadcasts to the shape of `x`; entries may be zero.
        level: $c$: number, or floating-point tensor that broadcasts with the sums (the shape of
            `x.sum(dim, keepdim=True)`).
        lower: $l$: number or floating-point tensor that broadcasts to the shape of `x`; may be infinite.
        upper: $u \ge l$: number or floating-point tensor that broadcasts to the shape of `x`; may be infinite.
        dim: Dimension of the sums.

    Returns:
        Tensor of the shape of `x`. Entries that just reach a bound may count as free or as fixed. Inside `torch.func`
        transforms or compiled code, which cannot read numbers, the result for an empty set is NaN.

    Raises:
        InputError: If an argument is invalid, or the set is empty.

    Example:
        >>> import torch
        >>> labels = torch.tensor([1.0, 1.0, -1.0])
        >>> project_box_plane(torch.tensor([0.5, -1.0, 0.6]), labels)
        tensor([0.5500, 0.0000, 0.5500])

    Source: P. Brucker, "An O(n) algorithm for quadratic knapsack problems", 1984, section 2; J. Platt, "Sequential
    minimal optimization", 1998, equations 2 and 3 (the set).
    """
    dim, *tensors = _validate(x, normal, level, lower, upper, dim)
    x, n, c, low_bound, high_bound = (each.movedim(dim, -1) for each in (x, *tensors))
    with torch.no_grad():
        fixed = [each.detach() for each in (x, n, c, low_bound, high_bound)]
        free, low, feasible = _active_set(*fixed)
    if only_reverse_mode() and not bool(feasible.all()):
        raise InputError(
            "project_box_plane: level: expected a value that normal @ y reaches in the box, got a value out of reach; "
            f"lower={describe(lower)}, upper={describe(upper)}: check that lower <= upper, and that level is between "
            "the extremes."
        )
    held = torch.where(free, x, torch.where(low, low_bound, high_bound))
    moving = torch.where(free, n, 0.0)
    squared = moving.square().sum(-1, keepdim=True)
    # In a corner no entry is free, and the multiplier does not matter.
    cornered = squared.detach() == 0
    multiplier = ((n * held).sum(-1, keepdim=True) - c) / torch.where(cornered, 1.0, squared)
    projected = torch.where(feasible, held - multiplier * moving, torch.nan)
    return projected.movedim(-1, dim)


def _active_set(x: Tensor, n: Tensor, level: Tensor, lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Find free entries, entries at their lower bound, and whether the set has a point; sums are over dim -1."""
    flat = n == 0
    divisor = torch.where(flat, 1.0, n)
    kinks = [(x - bound) / divisor for bound in (lower, upper)]
    # If n is zero, an entry does not depend on the multiplier: it is always free or never.
    inside = (lower < x) & (x < upper)
    first = torch.where(flat, torch.where(inside, -torch.inf, torch.inf), torch.minimum(*kinks))
    last = torch.where(flat, torch.where(inside, torch.inf, -torch.inf), torch.maximum(*kinks))
    ends = torch.full_like(x[..., :1], torch.inf)
    places = torch.cat([-ends, first, last, ends], dim=-1).sort(-1).values

    # The piece starts between these ends: all kinks between them are finite, and so are the sums there.
    left = (places == -torch.inf).sum(-1, keepdim=True) - 1
    right = (places < torch.inf).sum(-1, keepdim=True)
    cuts = torch.arange(1, WAYS, device=x.device)
    for _ in range(math.ceil(math.log(places.shape[-1], WAYS))):
        ranks = left + (right - left) * cuts // WAYS
        multipliers = places.gather(-1, ranks)[..., None]
        held = torch.clamp(x[..., None, :] - multipliers * n[..., None, :], lower[..., None, :], upper[..., None, :])
        above = ((n[..., None, :] * held).sum(-1) >= level) | (ranks == left)
        ranks = torch.cat([left, ranks, right], dim=-1)
        passed = above.sum(-1, keepdim=True)
        left, right = ranks.gather(-1, passed), ranks.gather(-1, passed + 1)
    here, there = places.gather(-1, left), places.gather(-1, left + 1)

    # NaN counts as free, so that it propagates to the result.
    free = (first <= here) & (there <= last) & (lower < upper) | x.isnan()
    # Beyond its kinks an entry with a positive normal is at its lower bound; with a negative normal it starts there.
    low = torch.where(flat, x <= lower, torch.where(n > 0, last <= here, first >= there))
    # In the limits of the multiplier every entry is at one of its bounds.
    begun, ended = _sum(n, torch.where(n > 0, upper, lower)), _sum(n, torch.where(n > 0, lower, upper))
    scale = _sum(n.abs(), torch.where(lower.isfinite(), lower.abs(), 0) + torch.where(upper.isfinite(), upper.abs(), 0))
    slack = 8 * torch.finfo(x.dtype).eps * torch.maximum(scale, level.abs())
    ordered = (lower <= upper).all(-1, keepdim=True)
    return free, low, ordered & (begun >= level - slack) & (ended <= level + slack)


def _sum(n: Tensor, y: Tensor) -> Tensor:
    """Compute the scalar product without entries whose normal is zero, as these may be infinite."""
    return torch.where(n == 0, 0.0, n * torch.where(n == 0, 0.0, y)).sum(-1, keepdim=True)


def _validate(x: Any, normal: Any, level: Any, lower: Any, upper: Any, dim: Any) -> tuple[Any, ...]:
    name = "project_box_plane"
    require_floating(name, x=x)
    if x.dim() == 0:
        raise InputError(f"{name}: x: expected at least one dimension, got a number; x.unsqueeze(0) adds one.")
    dims = require_dims(name, x, dim)
    if len(dims) > 1 or x.shape[dims[0]] == 0:
        raise InputError(f"{name}: dim: expected one dimension that is not empty, got {dim!r} of {tuple(x.shape)}.")
    sums = tuple(1 if i in dims else size for i, size in enumerate(x.shape))
    given = {"normal": normal, "level": level, "lower": lower, "upper": upper}
    found = []
    for key, value in given.items():
        require_number_or_floating(name, **{key: value})
        shape = sums if key == "level" else tuple(x.shape)
        tensor = value if isinstance(value, Tensor) else torch.full((), float(value), dtype=x.dtype, device=x.device)
        try:
            found.append(tensor.expand(shape))
        except RuntimeError:
            raise InputError(
                f"{name}: {key}: expected a number or a shape that broadcasts to {shape}, got {tuple(tensor.shape)}."
            ) from None
    return dims[0] - x.dim(), *found
