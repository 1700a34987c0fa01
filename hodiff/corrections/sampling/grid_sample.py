"""Rules for sampling from grids, and for the grids of affine maps."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hodiff.corrections.declining import INVALID, UNNEEDED, unable
from hodiff.corrections.registry import register
from hodiff.corrections.sampling.interpolation import MODES, PADDINGS, sample
from hodiff.corrections.values import with_value_of
from hodiff.routes import FORWARD_INSIDE, ROUTES
from hodiff.torch_internals.autograd.differentiation import may_be_differentiated

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
            "grid_sample: align_corners is not given and taken for False, as torch has done since 1.3.0.", stacklevel=4
        )
    return _sampled(input, grid, mode, padding_mode, bool(align_corners))


@_no_forward(torch.grid_sampler, name="torch.grid_sampler")
@_no_forward(torch.grid_sampler_2d, name="torch.grid_sampler_2d")
@_no_forward(torch.grid_sampler_3d, name="torch.grid_sampler_3d")
def _grid_sampler(input: Tensor, grid: Tensor, interpolation_mode: int, padding_mode: int, align_corners: bool) -> Any:
    if not (0 <= interpolation_mode < len(MODES) and 0 <= padding_mode < len(PADDINGS)):
        return INVALID
    return _sampled(input, grid, MODES[interpolation_mode], PADDINGS[padding_mode], align_corners)


@register(
    F.affine_grid,
    kind="missing",
    routes=FORWARD_INSIDE,
    reason="no batching rule, by which forward passes go along many directions",
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
