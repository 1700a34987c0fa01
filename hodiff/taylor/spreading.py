"""Conversion of trees of jets to lists of tensors, which torch's transforms accept, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from hodiff.taylor.jets import Jet, new_jet

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
