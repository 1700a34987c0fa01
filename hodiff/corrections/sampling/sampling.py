"""Rules for sampling from grids, and for dropout."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hodiff.corrections.registry import register
from hodiff.corrections.sampling.grids import MODES, PADDINGS, sample
from hodiff.routes import FORWARD_INSIDE, ROUTES

_no_forward = partial(
    register,
    kind="missing",
    routes=ROUTES[1:],
    reason="no forward rule",
    reference="Jaderberg et al. (2015), eq. 3; Keys (1981), eq. 4",
)


def _fits(input: Any, grid: Any) -> bool:
    return (
        isinstance(input, Tensor)
        and isinstance(grid, Tensor)
        and input.is_floating_point()
        and input.dtype == grid.dtype
        and input.dim() == grid.dim()
        and input.dim() in (4, 5)
        and input.shape[0] == grid.shape[0]
        and grid.shape[-1] == input.dim() - 2
        and 0 not in input.shape[1:]
    )


def _covers(
    input: Any, grid: Any, mode: Any = "bilinear", padding_mode: Any = "zeros", align_corners: Any = None
) -> bool:
    del align_corners
    return (
        _fits(input, grid)
        and mode in MODES
        and padding_mode in PADDINGS
        and not (mode == "bicubic" and input.dim() == 5)
    )


@_no_forward(F.grid_sample, covers=_covers)
def _grid_sample(
    input: Tensor,
    grid: Tensor,
    mode: str = "bilinear",
    padding_mode: str = "zeros",
    align_corners: bool | None = None,
) -> Tensor:
    if align_corners is None:
        warnings.warn(
            "grid_sample: align_corners is not given and taken for False, as torch has done since 1.3.0.", stacklevel=4
        )
    return sample(input, grid, mode, padding_mode, bool(align_corners))


def _numbered_covers(
    input: Any, grid: Any, interpolation_mode: Any = 0, padding_mode: Any = 0, align_corners: Any = False
) -> bool:
    numbers = (0, 1, 2)
    return (
        interpolation_mode in numbers
        and padding_mode in numbers
        and _covers(input, grid, MODES[interpolation_mode], PADDINGS[padding_mode], align_corners)
    )


@_no_forward(torch.grid_sampler, name="torch.grid_sampler", covers=_numbered_covers)
@_no_forward(torch.grid_sampler_2d, name="torch.grid_sampler_2d", covers=_numbered_covers)
@_no_forward(torch.grid_sampler_3d, name="torch.grid_sampler_3d", covers=_numbered_covers)
def _grid_sampler(
    input: Tensor, grid: Tensor, interpolation_mode: int, padding_mode: int, align_corners: bool
) -> Tensor:
    return sample(input, grid, MODES[interpolation_mode], PADDINGS[padding_mode], align_corners)


def _affine(theta: Any, size: Any, align_corners: Any = None) -> bool:
    dimensions = len(size) - 2
    return (
        isinstance(theta, Tensor)
        and theta.is_floating_point()
        and dimensions in (2, 3)
        and theta.shape == (size[0], dimensions, dimensions + 1)
        and min(size) > 0
        and align_corners is not None
        and not torch.is_autocast_enabled(theta.device.type)
    )


@register(
    F.affine_grid,
    kind="missing",
    routes=FORWARD_INSIDE,
    reason="no batching rule, by which forward passes go along many directions",
    reference="Jaderberg et al. (2015), eq. 1",
    covers=_affine,
)
def _affine_grid(theta: Tensor, size: Sequence[int], align_corners: bool) -> Tensor:
    edges = [1.0 if align_corners else (each - 1) / each for each in size[2:]]
    axes = [
        torch.linspace(-edge, edge, each, dtype=theta.dtype, device=theta.device) if each > 1 else theta.new_zeros(1)
        for each, edge in zip(size[2:], edges, strict=True)
    ]
    points = torch.stack([*reversed(torch.meshgrid(*axes, indexing="ij")), theta.new_ones(tuple(size[2:]))], -1)
    return (points.flatten(0, -2) @ theta.mT).unflatten(1, tuple(size[2:]))


def _drops(input: Any, p: Any, train: Any) -> bool:
    return isinstance(input, Tensor) and input.is_floating_point() and bool(train) and 0 < p < 1


@register(
    torch.native_dropout,
    kind="missing",
    routes=ROUTES[1:],
    reason="its backward has no forward rule",
    reference="Srivastava et al. (2014), section 4",
    covers=_drops,
)
def _native_dropout(input: Tensor, p: float, train: bool) -> tuple[Tensor, Tensor]:
    _, kept = torch.native_dropout(input.detach(), p, train)
    return input * kept.to(input.dtype) * (1 / (1 - p)), kept


def _fused(input: Any, p: Any = 0.5, training: Any = True, inplace: Any = False) -> bool:
    # Elsewhere torch multiplies by a mask itself.
    return _drops(input, p, training) and input.is_cuda and not inplace


@register(
    F.dropout,
    kind="missing",
    routes=ROUTES[1:],
    reason="on a GPU its backward has no forward rule",
    reference="Srivastava et al. (2014), section 4",
    covers=_fused,
)
def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    del inplace
    return _native_dropout(input, p, training)[0]


@register(
    torch.ops.aten.native_dropout_backward,
    torch.ops.aten.native_dropout_backward.default,
    name="torch.ops.aten.native_dropout_backward",
    kind="missing",
    routes=ROUTES[1:],
    reason="no forward rule",
    reference="it is linear",
)
def _native_dropout_backward(grad_output: Tensor, mask: Tensor, scale: float) -> Tensor:
    return grad_output * mask.to(grad_output.dtype) * scale
