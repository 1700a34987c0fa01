"""The unknowns of a problem between the caller's pytree and vectors of NumPy or torch."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hodiff.common.trees import PyTree, strided
from hodiff.derivatives.products_by_route import Leaves
from hodiff.errors import InputError
from hodiff.operators.linear.spaces import Space


def require_some(caller: str, space: Space) -> None:
    """Refuse a start without numbers."""
    if not space.size:
        raise InputError(f"{caller}: x0: expected at least one number to move, got none.")


class Variables:
    """The unknowns between their own structure, dtypes and devices, and the vectors of solvers."""

    def __init__(self, x0: PyTree):
        self.space = Space.of(x0)
        self.start = self.array(self.space.flatten(x0))
        # One real tensor, in whose dtype vectors are: it is the vector itself, in another shape, without a copy.
        self._plain = self.space.dtypes == (self.space.dtype,) and not self.space.joined[0]

    def vector(self, x: np.ndarray | Tensor) -> Tensor:
        """A vector as one of the space."""
        found = x if isinstance(x, Tensor) else torch.from_numpy(np.array(x, np.float64))
        return found.to(self.space.device, self.space.dtype)

    def flatten(self, tree: PyTree, caller: str, name: str) -> Tensor:
        """An argument like the unknowns as a vector."""
        return self.space.flatten(tree, caller, name)

    @property
    def origin(self) -> Tensor:
        """Where to begin, as a float64 vector on the device of the unknowns."""
        return torch.from_numpy(self.start).to(self.space.device)

    def leaves(self, x: np.ndarray | Tensor) -> Leaves:
        """A vector as real leaves."""
        return self.split(x if isinstance(x, Tensor) else self.vector(x))

    def split(self, x: Tensor) -> Leaves:
        """A vector of torch as real leaves."""
        if self._plain:
            return (x.reshape(self.space.shapes[0]).to(self.space.device, self.space.dtype),)
        return tuple(leaf[0] for leaf in self.space.split(x[:, None]))

    def join(self, leaves: Leaves) -> Tensor:
        """Real leaves as a float64 vector on the device of the unknowns."""
        return self.space.join([leaf[None] for leaf in leaves], 1)[:, 0].to(torch.float64)

    def tree(self, x: np.ndarray) -> PyTree:
        """A vector as a pytree, of tensors of its own."""
        return self.space.tree_of([leaf.clone() for leaf in self.leaves(x)])

    def flat(self, leaves: Leaves) -> np.ndarray:
        """Real leaves as a vector, numbers of its own."""
        if self._plain:
            return np.array(self.array(strided(leaves[0])).reshape(-1))
        return self.array(self.space.join([leaf[None] for leaf in leaves], 1)[:, 0])

    @staticmethod
    def array(tensor: Tensor) -> np.ndarray:
        """A tensor as float64 numbers."""
        return tensor.detach().to("cpu", torch.float64).numpy()
