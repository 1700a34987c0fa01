"""Trees of jets as the tensors that they are made of, which torch's transforms take, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from hodiff.taylor.jets import Jet, new_jet

# What a leaf was made of: a kind, what belongs to it, and the same of its parts.
Shape = tuple[str, Any, tuple[Any, ...]]


def spread(tree: Any, flat: list[Any], before: list[int], axes: int = 0) -> Shape:
    """Put the tensors of a jet, a tensor, or a list of them into a list, and how many axes of directions they have."""
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
    """The inverse; `put` is told of each tensor how many axes of directions it has."""
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
    """A tensor whose first axis belongs behind those of directions."""
    return tensor.movedim(0, axes) if axes else tensor
