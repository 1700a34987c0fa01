"""Rules for sampling from grids, and for the grids of affine maps.

Sampling of an image or a volume between its points, by operators that torch differentiates correctly.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hodiff.corrections.mechanism.declining import INVALID, UNNEEDED, unable
from hodiff.corrections.mechanism.registry import register
from hodiff.corrections.mechanism.values import with_value_of
from hodiff.routes import FORWARD_INSIDE, ROUTES
from hodiff.torch_internals.autograd.differentiation import may_be_differentiated

# In the order of torch's numbers.
MODES = ("bilinear", "nearest", "bicubic")
PADDINGS = ("zeros", "border", "reflection")

# Torch's choice of Keys' free parameter.
_KEYS = -0.75
# Coordinates beyond it lie outside, where integers are not exact in float32.
_FAR = 2.0**30


def sample(input: Tensor, grid: Tensor, mode: str, padding: str, align_corners: bool) -> Tensor:
    r"""Interpolate at the points of a grid, $y = \sum_k \prod_d w_{kd} \, x_k$ over the taps k near each point."""
    # The input is (N, C, H, W) or (N, C, D, H, W), the grid (N, ..., d) in [-1, 1], with the innermost axis of the
    # input first. With `align_corners`, -1 and 1 are the centres of the outer points, else their outer edges.
    sizes = input.shape[2:]
    points = grid.float() if grid.dtype in (torch.float16, torch.bfloat16) else grid
    axes = [
        _TAPS[mode](_unnormalized(points[..., -1 - axis], size, align_corners), size, padding, align_corners)
        for axis, size in enumerate(sizes)
    ]
    flat = input.flatten(2)
    total: Tensor | None = None
    for taps in product(*axes):
        place = torch.zeros_like(taps[0][0])
        weight = None
        inside = None
        for (at, by), size in zip(taps, sizes, strict=True):
            exists = (at >= 0) & (at < size)
            inside = exists if inside is None else inside & exists
            place = place * size + at.clamp(0, size - 1)
            weight = by if weight is None else weight * by
        if weight is None or inside is None:
            continue
        weight = torch.where(inside, weight, 0).unsqueeze(1)
        picked = flat.gather(2, place.flatten(1).unsqueeze(1).expand(-1, flat.shape[1], -1))
        term = picked.unflatten(2, place.shape[1:]) * weight
        total = term if total is None else total + term
    assert total is not None
    return total.to(input.dtype)


Taps = list[tuple[Tensor, Tensor]]


def _unnormalized(x: Tensor, size: int, align_corners: bool) -> Tensor:
    return (x + 1) / 2 * (size - 1) if align_corners else ((x + 1) * size - 1) / 2


def _padded(x: Tensor, size: int, padding: str, align_corners: bool) -> Tensor:
    """Map a coordinate into the image by the padding; as in torch, the derivative is 0 at the border."""
    if padding == "reflection":
        x = _reflected(x, size, align_corners)
    if padding != "zeros":
        within = (x > 0) & (x < size - 1)
        x = torch.where(within, x, x.detach().clamp(0, size - 1))
    # NaN, and numbers that are too large for exact integers, lie outside.
    return torch.where(x.detach().abs() < _FAR, x, -100)


def _reflected(x: Tensor, size: int, align_corners: bool) -> Tensor:
    low, span = (0.0, size - 1) if align_corners else (-0.5, size)
    if not span:
        return torch.where(torch.zeros_like(x, dtype=torch.bool), x, 0)
    distance = x - low
    distance = torch.where(distance < 0, -distance, distance)
    turns = torch.floor(distance.detach() / span)
    rest = distance - turns * span
    return torch.where(turns % 2 == 0, rest, span - rest) + low


def _bilinear(x: Tensor, size: int, padding: str, align_corners: bool) -> Taps:
    x = _padded(x, size, padding, align_corners)
    floor = x.detach().floor()
    part = x - floor
    left = floor.long()
    return [(left, 1 - part), (left + 1, part)]


def _nearest(x: Tensor, size: int, padding: str, align_corners: bool) -> Taps:
    x = _padded(x, size, padding, align_corners)
    # The constant 1, as a function of x with derivative zero.
    one = torch.where(torch.zeros_like(x, dtype=torch.bool), x, 1)
    return [(x.detach().round().long(), one)]


def _bicubic(x: Tensor, size: int, padding: str, align_corners: bool) -> Taps:
    x = torch.where(x.detach().abs() < _FAR, x, -100)
    floor = x.detach().floor()
    t = x - floor
    a = _KEYS
    weights = (_outer(t + 1, a), _inner(t, a), _inner(1 - t, a), _outer(2 - t, a))
    places = (_padded(floor + by, size, padding, align_corners).long() for by in (-1, 0, 1, 2))
    return list(zip(places, weights, strict=True))


def _inner(t: Tensor, a: float) -> Tensor:
    return ((a + 2) * t - (a + 3)) * t * t + 1


def _outer(t: Tensor, a: float) -> Tensor:
    return ((a * t - 5 * a) * t + 8 * a) * t - 4 * a


_TAPS: dict[str, Callable[[Tensor, int, str, bool], Taps]] = {
    "bilinear": _bilinear,
    "nearest": _nearest,
    "bicubic": _bicubic,
}


_HAS_CUBIC_VOLUMES = torch.__version__ >= "2.15"

_no_forward = partial(
    register,
    kind="missing",
    routes=ROUTES[1:],
    reason="no forward rule",
    reference="Jaderberg et al. (2015), eq. 3; Keys (1981), eq. 4",
)


def _fit(input: Tensor, grid: Tensor) -> bool:
    """Whether torch accepts the shapes and dtypes of an image or volume and its grid."""
    return (
        input.is_floating_point()
        and input.dtype == grid.dtype
        and input.dim() == grid.dim()
        and input.dim() in (4, 5)
        and input.shape[0] == grid.shape[0]
        and grid.shape[-1] == input.dim() - 2
        and 0 not in input.shape[1:]
    )


def _sampled(input: Tensor, grid: Tensor, mode: str, padding_mode: str, align_corners: bool) -> Any:
    if not _fit(input, grid) or (mode == "bicubic" and input.dim() == 5 and not _HAS_CUBIC_VOLUMES):
        return INVALID
    half = input.dtype in (torch.float16, torch.bfloat16)
    if not half and not may_be_differentiated((input, grid)):
        return UNNEEDED
    y = sample(input, grid, mode, padding_mode, align_corners)
    if half:  # for which the formula loses fewer digits
        return y
    # The kernel's result at non-finite coordinates depends on its vectors.
    numbers = MODES.index(mode), PADDINGS.index(padding_mode)
    return with_value_of(y, torch.grid_sampler, input, grid, *numbers, align_corners)


@_no_forward(F.grid_sample)
def _grid_sample(
    input: Tensor,
    grid: Tensor,
    mode: str = "bilinear",
    padding_mode: str = "zeros",
    align_corners: bool | None = None,
) -> Any:
    if mode not in MODES or padding_mode not in PADDINGS:
        return INVALID
    if align_corners is None and _fit(input, grid):
        warnings.warn(
            "grid_sample: align_corners is not given, and defaults to False, as in torch since 1.3.0.", stacklevel=4
        )
    return _sampled(input, grid, mode, padding_mode, bool(align_corners))


@_no_forward(torch.grid_sampler)
@_no_forward(torch.grid_sampler_2d)
@_no_forward(torch.grid_sampler_3d)
def _grid_sampler(input: Tensor, grid: Tensor, interpolation_mode: int, padding_mode: int, align_corners: bool) -> Any:
    if not (0 <= interpolation_mode < len(MODES) and 0 <= padding_mode < len(PADDINGS)):
        return INVALID
    return _sampled(input, grid, MODES[interpolation_mode], PADDINGS[padding_mode], align_corners)


@register(
    F.affine_grid,
    kind="missing",
    routes=FORWARD_INSIDE,
    reason="no batching rule, which forward passes along many directions need",
    reference="Jaderberg et al. (2015), eq. 1",
)
def _affine_grid(theta: Tensor, size: Sequence[int], align_corners: bool | None = None) -> Any:
    dimensions = len(size) - 2
    if not theta.is_floating_point() or dimensions not in (2, 3) or min(size) <= 0:
        return INVALID
    if theta.shape != (size[0], dimensions, dimensions + 1):
        return INVALID
    if align_corners is None:
        return unable("align_corners is not given, on which torch remarks")
    if torch.is_autocast_enabled(theta.device.type):
        return unable("autocast lowers the product inside")
    edges = [1.0 if align_corners else (each - 1) / each for each in size[2:]]
    axes = [
        torch.linspace(-edge, edge, each, dtype=theta.dtype, device=theta.device) if each > 1 else theta.new_zeros(1)
        for each, edge in zip(size[2:], edges, strict=True)
    ]
    points = torch.stack([*reversed(torch.meshgrid(*axes, indexing="ij")), theta.new_ones(tuple(size[2:]))], -1)
    return (points.flatten(0, -2) @ theta.mT).unflatten(1, tuple(size[2:]))
