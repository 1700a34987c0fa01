"""Substitution of coefficients for the jets in a function's arguments.

Conversion of trees of jets to lists of tensors, which torch's transforms accept, and back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import MethodDescriptorType, WrapperDescriptorType
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hodiff.taylor.jets import Jet, new_jet
from hodiff.taylor.running import frames, is_constant_here, some_are_constant
from hodiff.taylor.series import Frame
from hodiff.torch_internals.autograd.func_calls import plain_vmap

# Structure of a leaf: its kind, the data of that kind, and the structures of its parts.
Shape = tuple[str, Any, tuple[Any, ...]]


def spread(tree: Any, flat: list[Any], before: list[int], axes: int = 0) -> Shape:
    """Append a tree's tensors to `flat` and their numbers of direction axes to `before`; return the structure."""
    if isinstance(tree, Jet):
        frame = tree.frame
        parts = tuple(
            None if each is None else spread(each, flat, before, axes + frame.has_axis(k))
            for k, each in enumerate(tree.coefficients)
        )
        return ("jet", frame, parts)
    if type(tree) in (list, tuple):
        return ("list", type(tree), tuple(spread(each, flat, before, axes) for each in tree))
    if not isinstance(tree, Tensor):
        return ("constant", tree, ())
    flat.append(tree)
    before.append(axes)
    return ("tensor", axes, ())


def gathered(shape: Shape, tensors: Iterator[Any], put: Callable[[Any, int], Any] | None = None) -> Any:
    """Rebuild a tree from its structure and tensors; `put` takes a tensor and its number of direction axes."""
    kind, what, parts = shape
    if kind == "jet":
        return new_jet(what, [None if each is None else gathered(each, tensors, put) for each in parts])
    if kind == "list":
        return what([gathered(each, tensors, put) for each in parts])
    if kind == "constant":
        return what
    tensor = next(tensors)
    return tensor if put is None else put(tensor, what)


def behind(tensor: Any, axes: int) -> Any:
    """Move the first axis of a tensor behind its direction axes."""
    return tensor.movedim(0, axes) if axes else tensor


_METHODS = (MethodDescriptorType, WrapperDescriptorType)


def moves(frame: Frame, x: Any) -> bool:
    """Whether an argument, or an element of a list, is a jet of this frame."""
    if isinstance(x, Jet):
        return x.frame is frame
    return isinstance(x, (list, tuple)) and any(moves(frame, each) for each in x)


def value_of(frame: Frame, tree: Any) -> Any:
    """Replace this frame's jets in arguments by their values."""
    if isinstance(tree, Jet) and tree.frame is frame:
        return tree.value
    if isinstance(tree, dict):
        return {key: value_of(frame, each) for key, each in tree.items()}
    if isinstance(tree, (list, tuple)) and moves(frame, tree):
        return type(tree)(value_of(frame, each) for each in tree)
    return tree


def at_the_moment(tree: Any) -> Any:
    """Replace jets in a tree by tensors, where they are evaluated at a point or are constant."""
    if not some_are_constant() and not any(frame.moment is not None for frame in frames()):
        return tree
    return pytree.tree_map_only(Jet, _point, tree)


def _point(jet: Any) -> Any:
    while isinstance(jet, Jet):
        if jet.frame.moment is not None:
            jet = jet.frame.moment(jet)
        elif is_constant_here(jet.frame):
            jet = jet.value
        else:
            break
    return jet


def coefficients_of(frame: Frame, x: Any) -> list[Any]:
    """Coefficients of a jet of this frame, or of a constant."""
    return list(x.coefficients) if isinstance(x, Jet) and x.frame is frame else [x, *[None] * frame.order]


def part_of(frame: Frame, tree: Any, k: int) -> Any:
    """Replace the jets in a linear argument by their coefficients k, and constants by zero."""
    if isinstance(tree, Jet) and tree.frame is frame:
        found = tree.coefficients[k]
        return Batched(torch.zeros_like(tree.value), False) if found is None else Batched(found, frame.has_axis(k))
    if isinstance(tree, (list, tuple)):
        return type(tree)(part_of(frame, each, k) for each in tree)
    if isinstance(tree, (Tensor, Jet)):
        constant: Any = tree
        return Batched(torch.zeros_like(constant), False)
    return 0 if isinstance(tree, (int, float, complex)) else tree


def call(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call a function of tensors, which may be jets of an outer call."""
    if args and isinstance(args[0], Jet) and isinstance(func, _METHODS):
        # A tensor method rejects an object that is not a tensor, before it calls `__torch_function__`.
        return args[0].__torch_function__(func, (), tuple(args), kwargs)
    return func(*args, **kwargs)


class Batched:
    """A tensor, and whether its first axis is the axis of directions."""

    def __init__(self, tensor: Any, axis: bool):
        self.tensor = tensor
        self.axis = axis


def along_directions(
    function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], *, randomness: str = "error"
) -> Any:
    """Call a function, mapped over directions if any of its `Batched` arguments has the axis."""
    found = list(_batched((args, kwargs)))

    def apply(*tensors: Any) -> Any:
        given, named = _exchanged((args, kwargs), iter(tensors))
        return call(function, given, named)

    def apply_to_tensors(*tensors: Any) -> Any:
        result = apply(*tensors)
        if type(result) is not Tensor and any(isinstance(each, Jet) for each in pytree.tree_leaves(result)):
            raise RuntimeError("a vmap takes no jets of functions that close over them")
        return result

    tensors = [each.tensor for each in found]
    if not any(each.axis for each in found):
        return apply(*tensors)
    axes = tuple(0 if each.axis else None for each in found)
    if any(isinstance(each, Jet) for each in tensors):
        return _over_jets(apply, tensors, axes)
    try:
        return plain_vmap(apply_to_tensors, axes, 0, randomness)(*tensors)
    except RuntimeError:
        # Usually a batching rule is missing; an error of the function itself is raised again.
        return one_after_another(apply, found)


def one_after_another(
    function: Callable[..., Any], given: Sequence[Batched], before: Callable[[], object] = lambda: None
) -> Any:
    """Map a function over directions in a loop, as `torch.func.vmap` does; `before` runs ahead of each call."""
    rows = []
    for i in range(next(len(each.tensor) for each in given if each.axis)):
        before()
        rows.append(function(*(each.tensor[i] if each.axis else each.tensor for each in given)))
    columns = zip(*(pytree.tree_leaves(row) for row in rows), strict=True)
    return pytree.tree_unflatten([torch.stack(column) for column in columns], pytree.tree_structure(rows[0]))


def _over_jets(function: Callable[..., Any], tensors: Sequence[Any], axes: Sequence[int | None]) -> Any:
    """Apply `torch.func.vmap` to a function of jets, whose coefficients may have an axis before the mapped axis."""
    flat: list[Any] = []
    dims: list[int | None] = []
    shapes = []
    for each, axis in zip(tensors, axes, strict=True):
        before: list[int] = []
        shapes.append(spread(each, flat, before))
        dims += [None if axis is None else axis + own for own in before]
    marks: list[Any] = []

    def apply(*leaves: Any) -> Any:
        rest = iter(leaves)
        found: list[Any] = []
        marks[:] = [spread(function(*[gathered(shape, rest) for shape in shapes]), found, [])]
        return tuple(found)

    found = plain_vmap(apply, tuple(dims))(*flat)
    return gathered(marks[0], iter(found), behind)


def _batched(tree: Any) -> Iterator[Batched]:
    if isinstance(tree, Batched):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for each in tree:
            yield from _batched(each)
    elif isinstance(tree, dict):
        for each in tree.values():
            yield from _batched(each)


def _exchanged(tree: Any, tensors: Iterator[Any]) -> Any:
    if isinstance(tree, Batched):
        return next(tensors)
    if isinstance(tree, (list, tuple)) and type(tree) in (list, tuple):
        return type(tree)([_exchanged(each, tensors) for each in tree])
    if isinstance(tree, dict):
        return {key: _exchanged(each, tensors) for key, each in tree.items()}
    return tree
