"""Conversion of pytrees of tensors to vectors for solvers."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hodiff.common.trees import PyTree, describe, leaf_names
from hodiff.errors import InputError


class Ravel:
    """Conversion of a tree of real tensors to vectors of the promoted dtype, and back."""

    def __init__(self, tree: PyTree):
        self.like, self.spec = pytree.tree_flatten(tree)
        self.shapes = [each.shape for each in self.like]
        self.sizes = [math.prod(shape) for shape in self.shapes]
        self.size = sum(self.sizes)
        self.dtype = self.like[0].dtype
        for each in self.like[1:]:
            self.dtype = torch.promote_types(self.dtype, each.dtype)

    def vector(self, tree: PyTree) -> Tensor:
        """Join all elements to one vector."""
        return torch.cat([each.reshape(-1).to(self.dtype) for each in pytree.tree_leaves(tree)])

    def tree(self, vector: Tensor) -> PyTree:
        """Convert a vector to a tree, the inverse of `vector`."""
        return self.spec.unflatten([
            part.reshape(shape).to(each.dtype)
            for part, shape, each in zip(vector.split(self.sizes), self.shapes, self.like, strict=True)
        ])

    def residual(self, tree: PyTree, solver: str) -> Tensor:
        """Return the vector of a residual for a solver for roots, after a check for one equation per unknown."""
        leaves = pytree.tree_leaves(tree)
        shapes = [each.shape if isinstance(each, Tensor) else None for each in leaves]
        if shapes != self.shapes:
            remedy = "there must be as many equations as unknowns, in the structure of x0"
            if shapes == [()]:
                remedy += f"; to minimise by argmin, pass stationary({solver}()) as its solver"
            self.require_same(tree, f"{solver}: residual: result", remedy)
        return self.vector(leaves)

    def require_same(self, tree: PyTree, where: str, remedy: str) -> list[Tensor]:
        """Return the leaves of a user's result, which must have this structure, these shapes and dtypes."""
        leaves, spec = pytree.tree_flatten(tree)
        if spec != self.spec:
            raise InputError(
                f"{where}: expected the structure of x0, {_outline(self.like, self.spec)}, "
                f"got {_outline(leaves, spec)}; {remedy}."
            )
        for index, (leaf, like) in enumerate(zip(leaves, self.like, strict=True)):
            if not isinstance(leaf, Tensor) or leaf.shape != like.shape or leaf.dtype != like.dtype:
                raise InputError(
                    f"{where}{leaf_names(tree)[index]}: expected {describe(like)}, got {describe(leaf)}; {remedy}."
                )
        return leaves


def _outline(leaves: list[Any], spec: pytree.TreeSpec) -> str:
    if spec.is_leaf():
        return f"a bare {type(leaves[0]).__name__}"
    return str(spec.unflatten([type(each).__name__ for each in leaves])).replace("'", "")
