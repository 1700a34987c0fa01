"""Scalar function of a pytree as a function of one float64 vector, with counts, recorded once at each point.

Functions of a pytree that return several numbers, as functions of vectors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hodiff.common.trees import PyTree, describe, tensors_in
from hodiff.corrections import Corrections
from hodiff.derivatives import hessian_matrix
from hodiff.derivatives.bound_function import bind
from hodiff.derivatives.products_by_route import Leaves
from hodiff.errors import InputError
from hodiff.optimize.hessian_factors import DenseMatrix, Shifted, SparseMatrix
from hodiff.optimize.recorded_point import Counts, Point
from hodiff.optimize.sparse_derivatives import sparse_hessian, unknown_matrix
from hodiff.optimize.variables import Variables, require_some


def vector_function(
    caller: str, argument: str, function: Callable[..., Any], args: tuple[Any, ...], variables: Variables
) -> Callable[[Tensor], Tensor]:
    """Wrap a function as one from the vector of the unknowns to the vector of its outputs, within `corrected()`."""

    def values(x: Tensor) -> Tensor:
        with Corrections():
            found = function(variables.space.unflatten(x), *args)
        return vector_of(caller, argument, found, x)

    return values


def vector_of(caller: str, argument: str, found: Any, like: Tensor) -> Tensor:
    """Join the outputs of a function to one vector; raise if they are no pytree of real tensors."""
    tensors = tensors_in(found)
    if not tensors or len(tensors) != len(pytree.tree_leaves(found)):
        raise InputError(
            f"{caller}: {argument}: expected a function that returns a tensor or a pytree of tensors, got "
            f"{describe(found)}."
        )
    if any(each.is_complex() for each in tensors):
        raise InputError(
            f"{caller}: {argument}: expected a function that returns real numbers, got complex ones; return "
            "torch.view_as_real(...) of the result."
        )
    return torch.cat([each.reshape(-1).to(like) for each in tensors])


def numbers_of(values: Callable[[Tensor], Tensor], x: np.ndarray, variables: Variables) -> np.ndarray:
    """Compute the values at x as a NumPy vector; the function itself may differentiate with respect to x."""
    with torch.enable_grad():
        return variables.array(values(variables.vector(x).requires_grad_()))


class Objective:
    """Value, gradient and Hessian of a scalar function for minimisers.

    Args:
        caller: Name of the public function, for messages.
        f: User's function.
        x0: Start.
        args: Further arguments of `f`.
        curved: Whether to record gradients for products with the Hessian.
        sparse: Whether the Hessian is a sparse matrix, which then gives the products, too; or its coloring.

    Attributes:
        counts: Numbers of evaluations.
        best: Smallest value so far and its point; None before the first evaluation.
        strayed: Whether any value or derivative was not finite.
    """

    def __init__(
        self,
        caller: str,
        f: Callable[..., Any],
        x0: PyTree,
        args: tuple[Any, ...],
        *,
        curved: bool,
        sparse: Any = False,
    ):
        self.function = bind(caller, f, (x0, *args), name="x0", complex_too=True)
        self.variables = Variables(x0)
        require_some(caller, self.variables.space)
        self.counts = Counts()
        self.best: tuple[float, Any] | None = None
        self.strayed = False
        self._sparse = None if sparse is False else sparse_hessian(caller, f, sparse, x0, self.variables.space)
        self._curved = curved and self._sparse is None
        self._here: Point | None = None
        # The best point, and the gradient there, which results need after other points were evaluated.
        self._best_gradient: tuple[Any, np.ndarray] | None = None
        self._matrix: tuple[np.ndarray, Any] | None = None

    def value(self, x: np.ndarray) -> float:
        """Compute $f(x)$."""
        value = self._at(x).value
        self.strayed |= not np.isfinite(value)
        return value

    def ranked_value(self, x: np.ndarray) -> float:
        """Compute $f(x)$, with infinity in place of NaN after a finite value: trust regions do not shrink after NaN."""
        value = self.value(x)
        return math.inf if math.isnan(value) and self.best is not None and math.isfinite(self.best[0]) else value

    def gradient(self, x: np.ndarray) -> np.ndarray:
        """Compute the gradient of f at x; at the best point so far, no further evaluation is needed."""
        if self._best_gradient is not None and np.array_equal(x, self._best_gradient[0]):
            return self._best_gradient[1].copy()
        here = self._at(x)
        found = self._seen(here.gradient)
        if self.best is not None and self.best[1] is here.x:
            self._best_gradient = here.x, found.copy()
        return found

    def product(self, x: np.ndarray, v: np.ndarray) -> np.ndarray:
        """Compute the Hessian at x times a vector."""
        self.counts.products += 1
        if self._sparse is not None:
            return np.asarray(self.hessian(x) @ v)
        # Scaling by a power of two is exact and keeps small and large v within the range of float32.
        unit = float(np.ldexp(1.0, np.frexp(np.abs(v).max())[1]))
        return unit * self._seen(self._at(x).product(self.variables.leaves(v / unit)))

    def _seen(self, leaves: Leaves) -> np.ndarray:
        flat = self.variables.flat(leaves)
        self.strayed |= not np.isfinite(flat).all()
        return flat

    def hessian(self, x: np.ndarray) -> Any:
        """Return the Hessian (n, n), an array or a sparse matrix, cached until the next point."""
        if self._matrix is None or not np.array_equal(x, self._matrix[0]):
            self._matrix = np.array(x), self._hessian(x)
        return self._matrix[1]

    def _hessian(self, x: np.ndarray) -> Any:
        n = self.variables.space.size
        if not np.isfinite(self.gradient(x)).all():
            # The result reports the non-finite gradient; computing the Hessian would only warn about it.
            self.counts.hessians += 1
            return np.full((n, n), np.nan) if self._sparse is None else unknown_matrix(n)
        if self._sparse is not None:
            return self._matrix_of(x)
        matrix = self.variables.array(self._matrix_of(x))
        self.strayed |= not np.isfinite(matrix).all()
        return matrix

    def factorable(self, x: Any) -> Shifted:
        """Return the Hessian for a Newton method to factorise, at a vector where the gradient is finite."""
        matrix = self._matrix_of(x)
        return DenseMatrix(matrix.to(self.variables.origin)) if self._sparse is None else SparseMatrix(matrix)

    def _matrix_of(self, x: Any) -> Any:
        """Compute the Hessian as a tensor or as SciPy's CSR array."""
        self.counts.hessians += 1
        _, *args = self.function.args
        if self._sparse is not None:
            return self._sparse(self.variables.vector(x), *args)
        return hessian_matrix(self.function.f, self.variables.tree(x), *args)

    def point(self, x: Any) -> Point:
        """Record the function at a vector of NumPy or torch."""
        function = replace(self.function, leaves=self.variables.leaves(x))
        point = Point(x, function, self.variables, self.counts, self._curved)
        if self.best is None or point.value < self.best[0] or math.isnan(self.best[0]):
            self.best = (point.value, x)
        return point

    def _at(self, x: np.ndarray) -> Point:
        if self._here is None or not np.array_equal(x, self._here.x):
            # Free the old graph before the new one is recorded.
            self._here = None
            self._here = self.point(np.array(x))
        return self._here
