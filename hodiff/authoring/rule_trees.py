"""Arguments and results of rules as flat lists of tensors, and what a rule must return."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hodiff.common.options import is_number
from hodiff.errors import InputError

_PLAIN = (Tensor, torch.nn.Parameter)


class TreeLayout:
    """The structure of a pytree, and its leaves that are no tensors.

    Attributes:
        spec: The structure.
        constants: The leaves, with `TENSOR` where a tensor stands.
    """

    TENSOR = object()

    __slots__ = ("constants", "spec")

    def __init__(self, spec: pytree.TreeSpec, constants: list[Any]):
        self.spec = spec
        self.constants = constants

    def fill(self, tensors: Sequence[Any]) -> Any:
        """The tree with these tensors."""
        stream = iter(tensors)
        return self.spec.unflatten([next(stream) if each is self.TENSOR else each for each in self.constants])

    def fill_tangents(self, tangents: Sequence[Any], symbolic_zeros: bool) -> Any:
        """The tree of tangents: those of numbers are the number zero, those of anything else None."""
        stream = iter(tangents)
        return self.spec.unflatten([
            next(stream) if each is self.TENSOR else 0.0 if not symbolic_zeros and is_number(each) else None
            for each in self.constants
        ])

    def locate(self, tensor: int) -> tuple[int, str]:
        """Of a tuple's layout, the item where a tensor sits and the path from there."""
        paths = [path for path, _ in pytree.tree_flatten_with_path(self.spec.unflatten(self.constants))[0]]
        path = self.pick(paths)[tensor]
        return path[0].idx, pytree.keystr(path[1:])

    def pick(self, leaves: Sequence[Any]) -> list[Any]:
        """Of the leaves of another tree of this structure, those that belong to tensors."""
        return [leaf for leaf, each in zip(leaves, self.constants, strict=True) if each is self.TENSOR]


def plain_tensors(values: Sequence[Any]) -> bool:
    """Whether these are nothing but tensors of torch's own types, whose structure is then trivial."""
    return all(type(each) in _PLAIN for each in values)


def flatten(tree: Any) -> tuple[list[Tensor], TreeLayout]:
    """The tensors of a tree and what puts them back."""
    leaves, spec = pytree.tree_flatten(tree)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return tensors, TreeLayout(spec, [TreeLayout.TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves])


def flatten_like(tree: Any, spec: pytree.TreeSpec, where: str) -> list[Any]:
    """Leaves of a tree in the order of a structure, where None may stand for any part of it.

    Args:
        tree: What a rule returned.
        spec: The structure that it must have.
        where: What the tree is, for the message.

    Returns:
        One leaf for each of the structure; None where the tree has None.

    Raises:
        InputError: If the tree has another structure.
    """
    if tree is None:
        return [None] * spec.num_leaves
    if spec.is_leaf():
        if pytree.tree_structure(tree).is_leaf():
            return [tree]
        raise InputError(f"{where}: expected a tensor or None, got {type(tree).__name__}.")
    if type(tree) is not spec.type:
        raise InputError(f"{where}: expected {spec.type.__name__} or None, got {type(tree).__name__}.")
    children, context = pytree.SUPPORTED_NODES[spec.type].flatten_fn(tree)
    if len(children) != spec.num_children or context != spec.context:
        raise InputError(f"{where}: expected the structure {spec}, got {pytree.tree_structure(tree)}.")
    return [
        leaf for child, part in zip(children, spec.children(), strict=True) for leaf in flatten_like(child, part, where)
    ]


def differentiable(tensor: Tensor) -> bool:
    """Whether a derivative by or of this tensor can exist."""
    return tensor.is_floating_point() or tensor.is_complex()


def kind(value: Any) -> str:
    """What a rule returned, in words."""
    return f"{type(value).__name__} of {len(value)}" if isinstance(value, (tuple, list)) else type(value).__name__
