"""Rules for operators that add elements into others: scatters with accumulation, and gradients of linear operators."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from scipy.sparse import coo_array
from torch import Tensor

from hodiff.sparse.detection.call import Call, rule
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


def added(call: Call, kept: Any, source: Any, target: Tensor) -> list[Supports | None]:
    """Union of `kept` and of the elements of `source` whose flat `target` an element is."""
    shape = call.outputs[0].shape
    kept, source = call.supports(kept), call.supports(source)
    source = source.broadcast(target.shape)
    return [kept.broadcast(shape) | source.merged(target.numpy().astype(np.int64), shape)]


def positions(x: Tensor) -> Tensor:
    """Flat position of each element of a contiguous tensor of the same shape."""
    return torch.arange(x.numel()).reshape(x.shape)


def _indices_move(call: Call, *names: str) -> bool:
    indices = [
        each for name in names for each in (call[name] if isinstance(call[name], list | tuple) else [call[name]])
    ]
    return not all(call.is_fixed(each) for each in indices if each is not None)


def along_dimension(call: Call) -> list[Supports | None]:
    """Gather or scatter by indices that depend on the inputs: each may be any place along the dimension."""
    own, shape = call.supports(call["self"]), call.outputs[0].shape
    if not own.shape or not call["index"].dim():
        return list(call.dense())
    dim = call["dim"] % len(shape)
    if call.name in {"gather", "index_select"}:
        return [_anywhere(own, dim, shape)]
    source = call.get("src", call.get("source"))
    if not isinstance(source, Tensor):
        return [own]
    given = call.supports(source)
    if call.name.startswith("scatter"):
        given = given.take(given.which[tuple(map(slice, call["index"].shape))])
    return [own | _anywhere(given, dim, shape)]


def _anywhere(x: Supports, dim: int, shape: Any) -> Supports:
    """Union along a dimension, at each place along it; other dimensions are cut off, or continued by empty sets."""
    united = x.over((dim,), keepdim=True)
    which = np.zeros([1 if d == dim else size for d, size in enumerate(shape)], dtype=np.int64)
    common = tuple(map(slice, np.minimum(which.shape, united.shape)))
    which[common] = united.which[common]
    return united.take(which).broadcast(shape)


@rule("index_add", "index_reduce")
def index_add(call: Call) -> list[Supports | None]:
    """Add slices at indices along a dimension."""
    if _indices_move(call, "index"):
        return along_dimension(call)
    target = positions(call.outputs[0])
    if target.dim():
        target = target.index_select(call["dim"], call["index"].cpu())
    return added(call, call["self"], call["source"], target)


@rule("scatter_add", "scatter_reduce")
def scatter_add(call: Call) -> list[Supports | None]:
    """Add elements at indices along a dimension."""
    if _indices_move(call, "index"):
        return along_dimension(call)
    index = call["index"].cpu()
    target = positions(call.outputs[0])
    # A gather may not reach beyond the other dimensions of what it reads, as a scatter may not.
    target = target.gather(call["dim"], index) if target.dim() else target.expand(index.shape)
    source = call["src"][tuple(map(slice, index.shape))] if target.dim() else call["src"]
    return added(call, call["self"], source, target)


@rule("index_put", "unsafe_index_put", "index_put_impl")
def index_put(call: Call) -> list[Supports | None]:
    """Write or add elements at a tuple of indices; elements that are replaced lose their supports."""
    if _indices_move(call, "indices"):
        return list(call.dense())
    indices = [None if each is None else each.cpu() for each in call["indices"]]
    target = torch.ops.aten.index.Tensor(positions(call.outputs[0]), indices)
    if call["accumulate"]:
        return added(call, call["self"], call["values"], target)
    replaced = np.zeros(call.outputs[0].numel(), dtype=bool)
    replaced[target.reshape(-1).numpy()] = True
    before = call.supports(call["self"]).only(~replaced.reshape(call.outputs[0].shape))
    # If several values are written to one element, any of them may remain.
    values = call.supports(call["values"]).broadcast(target.shape)
    return [before | values.merged(target.numpy(), call.outputs[0].shape)]


@rule("embedding_dense_backward")
def embedding_dense_backward(call: Call) -> list[Supports | None]:
    """Add rows of the gradient at rows of the table."""
    if _indices_move(call, "indices"):
        return list(call.dense())
    return added(call, None, call["grad_output"], positions(call.outputs[0])[call["indices"].cpu()])


@rule("put")
def put(call: Call) -> list[Supports | None]:
    """Write or add elements at flat positions; elements that are replaced keep their supports."""
    if _indices_move(call, "index"):
        return list(call.dense())
    target = positions(call.outputs[0]).reshape(-1)[call["index"].cpu()]
    return added(call, call["self"], call["source"].reshape(target.shape), target)


@rule("unfold_backward")
def unfold_backward(call: Call) -> list[Supports | None]:
    """Add windows along a dimension, which may overlap."""
    target = positions(call.outputs[0]).unfold(call["dim"], call["size"], call["step"])
    return added(call, None, call["grad_in"], target)


@rule("take_backward")
def take_backward(call: Call) -> list[Supports | None]:
    """Add elements at flat positions."""
    if _indices_move(call, "indices"):
        return list(call.dense())
    return added(call, None, call["grad"], call["indices"].cpu())
