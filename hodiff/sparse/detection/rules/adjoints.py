"""Gradients of linear operators, which depend on the same elements as the operators' outputs (transposed)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from scipy.sparse import coo_array

from hodiff.sparse.detection.call import Call
from hodiff.sparse.detection.registry import rule
from hodiff.sparse.detection.supports import Supports
from hodiff.torch_internals.operators import operator_named

# Operator of each gradient, and number of dimensions of a plane that it works on.
_ADJOINTS = {
    **{f"upsample_nearest{rank}d_backward": (f"upsample_nearest{rank}d", rank) for rank in (1, 2, 3)},
    **{f"upsample_nearest_exact{rank}d_backward": (f"upsample_nearest_exact{rank}d", rank) for rank in (1, 2, 3)},
    "upsample_linear1d_backward": ("upsample_linear1d", 1),
    "upsample_bilinear2d_backward": ("upsample_bilinear2d", 2),
    "upsample_bicubic2d_backward": ("upsample_bicubic2d", 2),
    "upsample_trilinear3d_backward": ("upsample_trilinear3d", 3),
    "adaptive_avg_pool2d_backward": ("adaptive_avg_pool2d", 2),
    "adaptive_avg_pool3d_backward": ("adaptive_avg_pool3d", 3),
    **{f"reflection_pad{rank}d_backward": (f"reflection_pad{rank}d", rank) for rank in (1, 2, 3)},
    **{f"replication_pad{rank}d_backward": (f"replication_pad{rank}d", rank) for rank in (1, 2, 3)},
}


@rule(*_ADJOINTS)
def adjoint(call: Call) -> list[Supports | None]:
    """Transpose the operator, plane by plane, from the results that one plane of unit vectors reaches."""
    name, rank = _ADJOINTS[call.name]
    g, shape = call.supports(call["grad_output"]), call.outputs[0].shape
    size, results = shape[-rank:], g.shape[-rank:]
    reached = _reached(name, tuple(size), _options(call, results))
    planes = int(np.prod(shape[:-rank]))
    groups = np.arange(planes)[:, None] * int(np.prod(size)) + reached.col
    which = g.which.reshape(planes, -1)[:, reached.row]
    return [g.take(which).merged(groups, shape)]


def _options(call: Call, results: Any) -> dict[str, Any]:
    given = {name: value for name, value in call.arguments.items() if name not in {"grad_output", "self", "input_size"}}
    return {"output_size": list(results)} if call.name.startswith("adaptive") else given


def _reached(name: str, size: tuple[int, ...], options: dict[str, Any]) -> coo_array:
    """Matrix of the results (rows) of the operator to which elements (columns) of one plane contribute."""
    count = int(np.prod(size))
    units = torch.eye(count, dtype=torch.float64).reshape(count, 1, *size)
    images = operator_named(name).default(units, **options)
    return coo_array(images.reshape(count, -1).numpy().T != 0)
