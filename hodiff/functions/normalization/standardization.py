r"""Standardization and its derivatives in primitives.

$\hat x = r (x - m(x))$, with the mean $m(\cdot)$ over the numbers that share statistics and
$r = (\operatorname{var} x + \varepsilon)^{-1/2}$. With

$$ P t = t - m(t) - \hat x\, m(t \hat x), \qquad D t = r P t, $$

$D$ is the Jacobian of $\hat x$, and symmetric: both backward and jvp use it. The next derivative is

$$ \partial_x \langle u, D p \rangle = -r^2 \left( \hat x\, m(u P p) + m(p \hat x) P u + m(u \hat x) P p \right), $$

and higher derivatives follow from torch's primitives, which compute these formulas. Without centering (RMS), $m(x)$ and
$m(t)$ are omitted.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hodiff.rules.any_order import in_dtype


class StatisticsLayout(NamedTuple):
    """Layout of the numbers that share statistics and parameters. Dimensions count from the end, after batches."""

    # "trailing" (the last `size` dimensions share statistics, and have a parameter each), "groups" (`size` groups of
    # channels of each sample) or "channels" (each channel over all samples).
    kind: str
    size: int
    # Number of dimensions of the input.
    rank: int
    eps: float
    centered: bool
    parameter_dtype: torch.dtype


def normalized(x: Tensor, weight: Tensor | None, bias: Tensor | None, layout: StatisticsLayout) -> Tensor:
    r"""Compute $y = \hat x w + b$."""
    standardized, _ = standardize(x, layout)
    y = weighted(merge(standardized, layout), weight, layout)
    return in_dtype(y if bias is None else y + aligned(bias, layout), x.dtype)


def gradient(
    cotangent: Tensor, x: Tensor, weight: Tensor | None, layout: StatisticsLayout, wanted: tuple[bool, ...]
) -> tuple[Tensor, ...]:
    """Compute the wanted gradients of input, weight and bias."""
    g = wide(cotangent)
    found = []
    if wanted[0] or wanted[1]:
        standardized, r = standardize(x, layout)
    if wanted[0]:
        p = split(weighted(g, weight, layout), layout)
        found.append(in_dtype(merge(r * project(p, standardized, layout), layout), x.dtype))
    if wanted[1]:
        found.append(in_dtype(reduced(g * merge(standardized, layout), layout), layout.parameter_dtype))
    if wanted[2]:
        found.append(in_dtype(reduced(g, layout), layout.parameter_dtype))
    return tuple(found)


def standardize(x: Tensor, layout: StatisticsLayout) -> tuple[Tensor, Tensor]:
    r"""Compute $\hat x$ and $r$ in the split view."""
    x = split(wide(x), layout)
    if layout.centered:
        x = x - mean(x, layout)
    r = torch.rsqrt(mean(x * x, layout) + layout.eps)
    return x * r, r


def project(t: Tensor, standardized: Tensor, layout: StatisticsLayout) -> Tensor:
    """Compute $P t$ in split views."""
    projected = t - standardized * mean(t * standardized, layout)
    return projected - mean(t, layout) if layout.centered else projected


def curvature(u: Tensor, p: Tensor, standardized: Tensor, r: Tensor, layout: StatisticsLayout) -> Tensor:
    r"""Compute $\partial_x \langle u, D p \rangle$ in split views."""
    pu, pp = project(u, standardized, layout), project(p, standardized, layout)
    shift = standardized * mean(u * pp, layout)
    turn = mean(p * standardized, layout) * pu + mean(u * standardized, layout) * pp
    return -(r * r) * (shift + turn)


def wide(t: Tensor) -> Tensor:
    """Convert 16-bit numbers to float32, so that sums keep their digits."""
    return t.float() if t.dtype in {torch.float16, torch.bfloat16} else t


def split(t: Tensor, layout: StatisticsLayout) -> Tensor:
    """View channels as (groups, channels of a group) if groups share statistics."""
    if layout.kind != "groups":
        return t
    *batch, samples, channels = t.shape[: t.dim() - layout.rank + 2]
    spatial = t.shape[t.dim() - layout.rank + 2 :]
    return t.reshape(*batch, samples, layout.size, channels // layout.size, *spatial)


def merge(t: Tensor, layout: StatisticsLayout) -> Tensor:
    """The inverse of `split`."""
    if layout.kind != "groups":
        return t
    *batch, groups, channels = t.shape[: t.dim() - layout.rank + 2]
    spatial = t.shape[t.dim() - layout.rank + 2 :]
    return t.reshape(*batch, groups * channels, *spatial)


def mean(t: Tensor, layout: StatisticsLayout) -> Tensor:
    """Mean over the numbers that share statistics, kept as dimensions of size 1; split view."""
    return t.mean(statistics_dims(layout), keepdim=True)


def statistics_dims(layout: StatisticsLayout) -> list[int]:
    """Dimensions of the split view over which statistics are taken."""
    rank = layout.rank
    if layout.kind == "trailing":
        return list(range(-layout.size, 0))
    if layout.kind == "groups":
        return list(range(1 - rank, 0))
    return [-rank, *range(2 - rank, 0)]


def aligned(parameter: Tensor, layout: StatisticsLayout) -> Tensor:
    """Reshape a parameter, after any batch dimensions, to broadcast with the input."""
    own = layout.size if layout.kind == "trailing" else 1
    batch, shape = parameter.shape[: parameter.dim() - own], parameter.shape[parameter.dim() - own :]
    if layout.kind == "trailing":
        return parameter.reshape(*batch, *[1] * (layout.rank - own), *shape)
    return parameter.reshape(*batch, 1, *shape, *[1] * (layout.rank - 2))


def reduced(t: Tensor, layout: StatisticsLayout) -> Tensor:
    """Sum over the dimensions that share a parameter."""
    rank = layout.rank
    dims = list(range(-rank, -layout.size)) if layout.kind == "trailing" else [-rank, *range(2 - rank, 0)]
    return t.sum(dims) if dims else t


def weighted(t: Tensor, weight: Tensor | None, layout: StatisticsLayout) -> Tensor:
    """Multiply by the weight, if any."""
    return t if weight is None else t * aligned(weight, layout)


def plus(a: Any, b: Any) -> Any:
    """Add two terms; None is zero."""
    if a is None or b is None:
        return b if a is None else a
    return a + b
