"""Conversion of rule arguments and results between pytrees and flat lists of tensors."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hodiff.common.options import is_number
from hodiff.errors import InputError

_PLAIN = (Tensor, torch.nn.Parameter)


class TreeLayout:
    """The structure of a pytree and its non-tensor leaves.

    Attributes:
        spec: The structure.
        constants: The leaves, with `TENSOR` instead of tensors.
    """

    TENSOR = object()

    __slots__ = ("constants", "spec")

    def __init__(self, spec: pytree.TreeSpec, constants: list[Any]):
        self.spec = spec
        self.constants = constants

    def fill(self, tensors: Sequence[Any]) -> Any:
        """Rebuild the tree with the given tensors."""
        stream = iter(tensors)
        return self.spec.unflatten([next(stream) if each is self.TENSOR else each for each in self.constants])

    def fill_tangents(self, tangents: Sequence[Any], symbolic_zeros: bool) -> Any:
        """Rebuild the tree of tangents; numbers get 0.0 (None if `symbolic_zeros`), other constants None."""
        stream = iter(tangents)
        return self.spec.unflatten([
            next(stream) if each is self.TENSOR else 0.0 if not symbolic_zeros and is_number(each) else None
            for each in self.constants
        ])

    def locate(self, tensor: int) -> tuple[int, str]:
        """Return the index of the tuple item that holds a tensor, and the path inside the item."""
        paths = [path for path, _ in pytree.tree_flatten_with_path(self.spec.unflatten(self.constants))[0]]
        path = self.pick(paths)[tensor]
        return path[0].idx, pytree.keystr(path[1:])

    def pick(self, leaves: Sequence[Any]) -> list[Any]:
        """Select the tensor leaves from the leaves of another tree with this structure."""
        return [leaf for leaf, each in zip(leaves, self.constants, strict=True) if each is self.TENSOR]


def plain_tensors(values: Sequence[Any]) -> bool:
    """Whether all values are tensors of torch's own types, so that their structure is trivial."""
    return all(type(each) in _PLAIN for each in values)


def flatten(tree: Any) -> tuple[list[Tensor], TreeLayout]:
    """Return the tensors of a tree, and the layout that rebuilds it."""
    leaves, spec = pytree.tree_flatten(tree)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return tensors, TreeLayout(spec, [TreeLayout.TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves])


def flatten_like(tree: Any, spec: pytree.TreeSpec, where: str) -> list[Any]:
    """Flatten a tree in the order of a structure; None may replace any part of the tree.

    Args:
        tree: What a rule returned.
        spec: The structure that it must have.
        where: Name of the tree in the message.

    Returns:
        One leaf per leaf of the structure; None where the tree has None.

    Raises:
        InputError: If the tree has another structure.
    """
    if tree is None:
        return [None] * spec.num_leaves
    if spec.is_leaf():
        if pytree.tree_structure(tree).is_leaf():
            return [tree]
        raise InputError(f"{where}: expected a tensor or None, got {type(tree).__name__}.")
    # Torch has one entry for all namedtuples, with the class as its context.
    expected = spec.context if spec.type is namedtuple else spec.type
    if type(tree) is not expected:
        raise InputError(f"{where}: expected {expected.__name__} or None, got {type(tree).__name__}.")
    children, context = pytree.SUPPORTED_NODES[spec.type].flatten_fn(tree)
    if len(children) != spec.num_children or context != spec.context:
        raise InputError(f"{where}: expected the structure {spec}, got {pytree.tree_structure(tree)}.")
    return [
        leaf for child, part in zip(children, spec.children(), strict=True) for leaf in flatten_like(child, part, where)
    ]


def differentiable(tensor: Tensor) -> bool:
    """Whether the tensor is floating-point or complex, so that it can have derivatives."""
    return tensor.is_floating_point() or tensor.is_complex()


def kind(value: Any) -> str:
    """Describe the type of a rule's result."""
    return f"{type(value).__name__} of {len(value)}" if isinstance(value, (tuple, list)) else type(value).__name__
