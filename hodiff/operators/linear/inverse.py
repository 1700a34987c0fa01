"""Solutions of linear systems with an operator, which are the products of its inverse."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hodiff.common.options import require_choice
from hodiff.errors import InputError
from hodiff.estimators.systems.solve import METHODS, Solution, require_options, solve

RECTANGULAR = "lsmr"
FACTORED = "dense"


class Solutions:
    """Solves for blocks of right-hand sides by `hodiff.estimators.solve`; `last_report` is the last result."""

    def __init__(self, operator: Any, method: str, options: dict[str, Any]):
        require_choice("InverseOperator", "method", method, METHODS)
        operator.domain.require_whole("InverseOperator", "A.solve(b), which supports them")
        m, n = operator.shape
        if m != n and method != RECTANGULAR:
            raise InputError(
                f"InverseOperator: A: expected a square operator for method={method!r}, got {operator}; use "
                f"method={RECTANGULAR!r} for least squares, or (A.T @ A).inverse()."
            )
        require_options("InverseOperator", method, m == n, **options)
        self.last_report: Solution | None = None
        self._operator = operator
        self._method = method
        self._options = options
        self._factored: _Factored | None = None

    def of(self, block: Tensor, *, transposed: bool) -> Tensor:
        """Solve for each column, with the operator or its transpose."""
        operator = self._operator.T if transposed else self._operator
        if block.shape[1] == 0:
            self._require_unchanged()
            return block.new_zeros(operator.shape[1], 0)
        matrix: Any = _Columns(operator)
        start: dict[str, Any] = {}
        with torch.no_grad():
            if self._method == FACTORED:
                if self._factored is not None:
                    self._require_unchanged()
                else:
                    self._factored = _Factored(self._operator.to_dense(), self._options["damping"])
                matrix, start["x0"] = self._factored.guess(block, transposed=transposed)
            self.last_report = solve(matrix, block, method=self._method, **start, **self._options)
        return self.last_report.value.to(operator.dtype)

    def _require_unchanged(self) -> None:
        """Raise if the operator would, because its point was changed in place: multiply no columns."""
        A = self._operator
        A.multiply(torch.empty(A.shape[1], 0, dtype=A.dtype, device=A.device))


class _Columns:
    """An operator in the form that `solve` expects: it multiplies blocks of columns, and no pytrees."""

    def __init__(self, operator: Any):
        self._operator = operator
        self.shape = operator.shape
        self.dtype = operator.dtype
        self.device = operator.device

    @property
    def T(self) -> _Columns:  # noqa: N802 - the name that every matrix has
        return _Columns(self._operator.T)

    def __matmul__(self, block: Tensor) -> Tensor:
        return self._operator.multiply(block.to(self._operator.domain.dtype))


class _Factored:
    """A matrix with its triangular factors; `solve` starts from their solution, and returns it if it is good enough."""

    def __init__(self, matrix: Tensor, damping: float):
        self._matrix = matrix
        # Devices without float64 factorize in their own precision.
        precise = matrix if matrix.device.type == "mps" else matrix.double()
        damped = precise + damping * torch.eye(len(matrix), dtype=precise.dtype, device=matrix.device)
        self._factors, self._pivots, failed = torch.linalg.lu_factor_ex(damped)
        self._regular = not bool(failed)

    def guess(self, block: Tensor, *, transposed: bool) -> tuple[Tensor, Tensor | None]:
        """Return the matrix, and the solution by its factors, or None if it is not finite."""
        matrix = self._matrix.mT if transposed else self._matrix
        if not self._regular:
            return matrix, None
        found = torch.linalg.lu_solve(self._factors, self._pivots, block.to(self._factors.dtype), adjoint=transposed)
        return matrix, found.to(block.dtype) if bool(torch.isfinite(found).all()) else None
