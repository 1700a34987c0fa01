"""Conversion of unknowns between the caller's pytree and vectors of NumPy or torch."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hodiff.common.trees import PyTree, strided
from hodiff.derivatives.products_by_route import Leaves
from hodiff.errors import InputError
from hodiff.operators.linear.spaces import Space


def require_some(caller: str, space: Space) -> None:
    """Raise if the space has no numbers."""
    if not space.size:
        raise InputError(f"{caller}: x0: expected at least one number to move, got none.")


class Variables:
    """Conversion between the unknowns in their structure, dtypes and devices, and the vectors of solvers."""

    def __init__(self, x0: PyTree):
        self.space = Space.of(x0)
        self.start = self.array(self.space.flatten(x0))
        # A single real tensor in the dtype of vectors is reshaped without a copy.
        self._plain = self.space.dtypes == (self.space.dtype,) and not self.space.joined[0]

    def vector(self, x: np.ndarray | Tensor) -> Tensor:
        """Convert a vector to the device and dtype of the space."""
        found = x if isinstance(x, Tensor) else torch.from_numpy(np.array(x, np.float64))
        return found.to(self.space.device, self.space.dtype)

    def flatten(self, tree: PyTree, caller: str, name: str) -> Tensor:
        """Flatten an argument with the structure of the unknowns to a vector."""
        return self.space.flatten(tree, caller, name)

    @property
    def origin(self) -> Tensor:
        """Start as a float64 vector on the device of the unknowns."""
        return torch.from_numpy(self.start).to(self.space.device)

    def leaves(self, x: np.ndarray | Tensor) -> Leaves:
        """Split a vector of NumPy or torch into real leaves."""
        return self.split(x if isinstance(x, Tensor) else self.vector(x))

    def split(self, x: Tensor) -> Leaves:
        """Split a vector of torch into real leaves."""
        if self._plain:
            return (x.reshape(self.space.shapes[0]).to(self.space.device, self.space.dtype),)
        return tuple(leaf[0] for leaf in self.space.split(x[:, None]))

    def join(self, leaves: Leaves) -> Tensor:
        """Join real leaves to a float64 vector on the device of the unknowns."""
        return self.space.join([leaf[None] for leaf in leaves], 1)[:, 0].to(torch.float64)

    def tree(self, x: np.ndarray) -> PyTree:
        """Convert a vector to a pytree of new tensors."""
        return self.space.tree_of([leaf.clone() for leaf in self.leaves(x)])

    def flat(self, leaves: Leaves) -> np.ndarray:
        """Join real leaves to a new NumPy vector."""
        if self._plain:
            return np.array(self.array(strided(leaves[0])).reshape(-1))
        return self.array(self.space.join([leaf[None] for leaf in leaves], 1)[:, 0])

    @staticmethod
    def array(tensor: Tensor) -> np.ndarray:
        """Convert a tensor to a float64 NumPy array."""
        return tensor.detach().to("cpu", torch.float64).numpy()
