"""Conversion of unknowns between the caller's pytree and vectors of NumPy or torch.

Characteristic sizes of unknowns, as `least_squares` takes them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from hodiff.common.options import is_number
from hodiff.common.trees import PyTree, strided
from hodiff.derivatives.products_by_route import Leaves
from hodiff.errors import InputError
from hodiff.operators.linear.spaces import Space


def require_some(caller: str, space: Space) -> None:
    """Raise if the space has no numbers."""
    if not space.size:
        raise InputError(f"{caller}: x0: expected at least one element, got none.")


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


def scales_of(x_scale: Any, variables: Variables) -> Any:
    """Validate `x_scale` and return it in SciPy's form."""
    if isinstance(x_scale, str) and x_scale == "jac":
        return x_scale
    if is_number(x_scale):
        _require_positive(float(x_scale))
        return x_scale
    if isinstance(x_scale, str):
        raise InputError(
            f"least_squares: x_scale: expected a number, 'jac', a pytree like x0 or None, got {x_scale!r}."
        )
    scales = variables.array(variables.flatten(x_scale, "least_squares", "x_scale"))
    _require_positive(float(scales.min()))
    return scales


def _require_positive(least: float) -> None:
    if not least > 0:
        raise InputError(f"least_squares: x_scale: expected positive numbers, got {least:g} among them.")


def scale_vector(x_scale: Any, variables: Variables) -> Tensor | None:
    """Return scales for "lm-geodesic", by default 1; None to compute them from the Jacobian's columns."""
    scales = scales_of(1.0 if x_scale is None else x_scale, variables)
    if isinstance(scales, str):
        return None
    return torch.as_tensor(scales, device="cpu").to(variables.origin).expand(variables.space.size)
