"""Residuals and their Jacobian as SciPy's least-squares methods call them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from hodiff.derivatives import jacobian
from hodiff.operators import JacobianOperator
from hodiff.optimize.objective import numbers_of
from hodiff.optimize.variables import Variables


class ResidualFunction:
    """Residuals and Jacobian at vectors of NumPy, with counts.

    Args:
        function: Residuals (m,) as a function of the vector of the unknowns.
        variables: The unknowns.
        products: Whether the Jacobian is a SciPy operator of products.
        dense: Whether that operator is converted to a matrix.

    Attributes:
        values: Number of evaluations of the residuals.
        jacobians: Number of Jacobians.
        accepted: Last point of a Jacobian, which SciPy requests at the points that lower the cost.
    """

    def __init__(self, function: Callable[[Tensor], Tensor], variables: Variables, *, products: bool, dense: bool):
        self._function, self._variables, self._products, self._dense = function, variables, products, dense
        self.values = self.jacobians = 0
        self.accepted = variables.start
        self._value: tuple[np.ndarray, np.ndarray] | None = None
        self._matrix: tuple[np.ndarray, Any] | None = None

    def value(self, x: np.ndarray) -> np.ndarray:
        """Compute the residuals (m,); the last ones are cached."""
        if self._value is None or not np.array_equal(x, self._value[0]):
            self.values += 1
            self._value = np.array(x), numbers_of(self._function, x, self._variables)
        return self._value[1].copy()

    def jacobian(self, x: np.ndarray) -> Any:
        """Compute the Jacobian (m, n); the last one is cached."""
        self.accepted = np.array(x)
        if self._matrix is None or not np.array_equal(x, self._matrix[0]):
            self.jacobians += 1
            self._matrix = self.accepted, self._jacobian(self._variables.vector(x))
        matrix = self._matrix[1]
        # SciPy scales matrices in place.
        return matrix.copy() if isinstance(matrix, np.ndarray) else matrix

    def _jacobian(self, x: Tensor) -> Any:
        if not self._products:
            return self._variables.array(jacobian(self._function)(x))
        operator = JacobianOperator(self._function, x)
        return self._variables.array(operator.to_dense()) if self._dense else operator.to_scipy()
