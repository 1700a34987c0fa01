"""Rows of a tile of logits on a CPU, in float32 and float64, by C++ kernels that overwrite their input."""

from __future__ import annotations

import torch
from torch import Tensor

from hodiff.kernels import fused_library

_KERNELS = {torch.float32: "float", torch.float64: "double"}


def takes(*tiles: Tensor) -> bool:
    """Whether the kernels support these logits and tangents of logits, which they overwrite."""
    dtype, shape = tiles[0].dtype, tiles[0].shape
    plain = dtype in _KERNELS and len(shape) == 2 and all(each.shape == shape for each in tiles)
    return plain and fused_library.takes(*tiles, dtype=dtype)


def cotangent_(z: Tensor, lse: Tensor, g: Tensor, t: Tensor | None, r: Tensor | None, place: Tensor) -> Tensor:
    """Overwrite logits with $g P + r$, plus t at the target; its place is negative if it is not in the tile."""
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
    r"""Overwrite logits and tangent by $g P + r$ and $P (g \dot z - m) + \dot r$, plus $t$, $\dot t$ at the target."""
    (t, t_t), (r, r_t) = at_target, everywhere
    _run("curvature", [z, z_t], [lse, g, mean, t, r, t_t, r_t], place)
    return z, z_t


def _run(name: str, tiles: list[Tensor], numbers: list[Tensor | None], place: Tensor) -> None:
    """Run a kernel; numbers per row are (rows, 1), of any dtype and strides."""
    z = tiles[0]
    # The converted tensors have to live until the kernel is done.
    numbers = [None if each is None else each.to(z.dtype).contiguous() for each in numbers]
    place = place.contiguous()
    pointers = [None if each is None else each.data_ptr() for each in (*tiles, *numbers, place)]
    fused_library.run(f"hodiff_logits_{name}_{_KERNELS[z.dtype]}", *pointers, *z.shape)
