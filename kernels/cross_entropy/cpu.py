"""Rows of a tile of logits on a CPU, in float32 and float64: calls of the C++ kernels, which write over their input."""

from __future__ import annotations

import torch
from torch import Tensor

from hodiff.kernels import fused_library

_KERNELS = {torch.float32: "float", torch.float64: "double"}


def takes(*tiles: Tensor) -> bool:
    """Whether the kernels may read and write over these logits and tangents of logits."""
    dtype, shape = tiles[0].dtype, tiles[0].shape
    plain = dtype in _KERNELS and len(shape) == 2 and all(each.shape == shape for each in tiles)
    return plain and fused_library.takes(*tiles, dtype=dtype)


def cotangent_(z: Tensor, lse: Tensor, g: Tensor, t: Tensor | None, r: Tensor | None, place: Tensor) -> Tensor:
    """Write $g P + r$ over the logits, t more at the target, whose place is negative where it is elsewhere."""
    _run("cotangent", [z], [lse, g, t, r], place)
    return z


def curvature_(
    z: Tensor,
    z_t: Tensor,
    lse: Tensor,
    g: Tensor,
    mean: Tensor,
    at_target: tuple[Tensor | None, Tensor | None],
    everywhere: tuple[Tensor | None, Tensor | None],
    place: Tensor,
) -> tuple[Tensor, Tensor]:
    r"""Write $g P + r$ and $P (g \dot z - m) + \dot r$ over logits and tangent; at the target t and its tangent."""
    (t, t_t), (r, r_t) = at_target, everywhere
    _run("curvature", [z, z_t], [lse, g, mean, t, r, t_t, r_t], place)
    return z, z_t


def _run(name: str, tiles: list[Tensor], numbers: list[Tensor | None], place: Tensor) -> None:
    """Numbers a row are (rows, 1), of any dtype and strides."""
    z = tiles[0]
    # They have to live until the kernel is done.
    numbers = [None if each is None else each.to(z.dtype).contiguous() for each in numbers]
    place = place.contiguous()
    pointers = [None if each is None else each.data_ptr() for each in (*tiles, *numbers, place)]
    fused_library.run(f"hodiff_logits_{name}_{_KERNELS[z.dtype]}", *pointers, *z.shape)
