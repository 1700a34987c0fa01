"""`torch.func.vmap` and `functional_call` of functions of jets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hodiff.taylor.jets import Jet
from hodiff.taylor.jets_in_arguments import at_the_moment, gathered, spread
from hodiff.torch_internals.autograd import func_calls
from hodiff.torch_internals.autograd.func_calls import dims_of_leaves, vmap_of
from hodiff.torch_internals.autograd.wrapped_tensors import is_batched
from hodiff.torch_internals.modules import tables_of


def swap_member(module: nn.Module, name: str, tensor: Any, allow_missing: bool = False) -> Any:
    """Put a tensor or a jet into a module, and return the previous member."""
    if isinstance(tensor, Jet):
        # torch refuses objects that are not tensors, but the module's tables accept them.
        for table in tables_of(module):
            if name in table:
                held, table[name] = table[name], tensor
                return held
    return func_calls.swap_member(module, name, tensor, allow_missing)


def vmap(
    function: Callable[..., Any],
    in_dims: Any,
    out_dims: Any,
    randomness: str,
    chunk_size: int | None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Map a function over arguments; jets that are not mapped, or that the function closes over, stay as they are."""
    args, kwargs = at_the_moment((args, kwargs))
    leaves, spec = pytree.tree_flatten(args)
    dims = dims_of_leaves(in_dims, spec) if isinstance(in_dims, (int, tuple, list)) else None
    if dims is None:
        # torch raises the error.
        return vmap_of(function, in_dims, out_dims, randomness, chunk_size, *args, **kwargs)
    flat: list[Any] = []
    flat_dims: list[int | None] = []
    shapes: list[Any] = []
    for leaf, dim in zip(leaves, dims, strict=True):
        if not isinstance(leaf, Jet):
            flat.append(leaf)
            flat_dims.append(dim)
            shapes.append(None)
        elif dim is None:
            shapes.append(("constant", leaf, ()))
        else:
            before: list[int] = []
            shapes.append(spread(leaf, flat, before))
            flat_dims += [dim % max(leaf.ndim, 1) + axes for axes in before]
    noted: dict[str, Any] = {}

    def on_tensors(*tensors: Any) -> tuple[Any, ...]:
        rest = iter(tensors)
        given = [next(rest) if shape is None else gathered(shape, rest) for shape in shapes]
        result = at_the_moment(function(*pytree.tree_unflatten(given, spec), **kwargs))
        found, noted["spec"] = pytree.tree_flatten(result)
        noted["dims"] = _dims_of_outputs(out_dims, noted["spec"], result)
        outputs: list[Any] = []
        noted["shapes"] = [_output(leaf, dim, outputs) for leaf, dim in zip(found, noted["dims"], strict=True)]
        return tuple(outputs)

    name = getattr(function, "__name__", None)
    if name is not None:
        # torch's messages show the name.
        on_tensors.__name__ = name
    rest = iter(vmap_of(on_tensors, tuple(flat_dims), 0, randomness, chunk_size, *flat))
    outputs = []
    for shape, dim in zip(noted["shapes"], noted["dims"], strict=True):

        def put(tensor: Any, axes: int, dim: int | None = dim) -> Any:
            where = dim or 0
            return tensor.movedim(0, where % (tensor.ndim - axes) + axes)

        outputs.append(gathered(shape, rest, put))
    return pytree.tree_unflatten(outputs, noted["spec"])


def _dims_of_outputs(out_dims: Any, spec: Any, result: Any) -> list[int | None]:
    """Return the output dimension of each leaf, as torch reads out_dims."""
    if isinstance(result, (Tensor, Jet)) and isinstance(out_dims, tuple) and len(out_dims) == 1:
        return list(out_dims)
    found = dims_of_leaves(out_dims, spec)
    if found is None:
        raise ValueError(f"vmap: out_dims={out_dims} is not compatible with the structure of outputs, {spec}")
    return found


def _output(leaf: Any, dim: int | None, outputs: list[Any]) -> Any:
    """Append the tensors of an output to a list; an output without a dimension stays as it is."""
    if dim is not None:
        if isinstance(leaf, (Tensor, Jet)):
            return spread(leaf, outputs, [])
        # torch raises an error for it.
        outputs.append(leaf)
        return ("tensor", 0, ())
    made: list[Any] = []
    spread(leaf, made, [])
    if any(is_batched(each) for each in made):
        raise ValueError("vmap: a function can not return a BatchedTensor when out_dim is None")
    return ("constant", leaf, ())
