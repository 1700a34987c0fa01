"""The inverse of an operator, whose products are solutions of linear systems."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hodiff.common.options import require_choice
from hodiff.common.trees import PyTree
from hodiff.errors import InputError
from hodiff.estimators.systems.solve import METHODS, Solution, require_options, solve
from hodiff.operators.linear.constant_points import require_no_gradients
from hodiff.operators.linear.linear_operator import LinearOperator, require_operator

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


class InverseOperator(LinearOperator):
    r"""The inverse of a square operator, or the pseudo-inverse of any, given by its products.

    $$ b \mapsto (A + \lambda I)^{-1} b, \qquad\text{for "lsmr"}\quad b \mapsto \arg\min_x \lVert A x - b \rVert $$

    Each product solves a linear system by `hodiff.estimators.solve`, all columns of a block together. Products are as
    accurate as `tol`; a preconditioner of another solver needs only a few digits.

    Args:
        A: The operator (n, n); for "lsmr" (m, n).
        method: "cg" for symmetric positive definite operators, "minres" for symmetric ones, "gmres" for square ones,
            "lsmr" for least squares, "neumann" for a truncated series, "dense" for a matrix that is formed by n
            products and factorized, once.
        damping: The $\lambda$, 0 or more.
        tol: Relative tolerance of the residual; by default the tolerance of `solve`.
        throw: Whether a product that misses the tolerance raises; if not, it warns.
        preconditioner: As for `hodiff.estimators.solve`.
        atol: Absolute tolerance of the residual.
        max_iterations: Maximum number of iterations, as for `solve`.
        restart: Number of vectors that "gmres" keeps, 50 by default.
        step_size: Step of "neumann", as for `solve`.
        callback: As for `hodiff.estimators.solve`.
        progress: Whether to show a progress bar.

    Attributes:
        last_report: The result of `solve` for the last product, with iterations and residuals; None before the first.

    Raises:
        InputError: If A is not an operator or not square, or an option is invalid or does not fit the method.
        ConvergenceError: On use, if the tolerance is missed and `throw` is set.

    Example:
        >>> import torch
        >>> from hodiff.operators import MatrixOperator
        >>> A = MatrixOperator(torch.tensor([[2.0, 0.0], [0.0, 4.0]]), symmetric=True)
        >>> A.inverse() @ torch.tensor([2.0, 2.0])
        tensor([1.0000, 0.5000])

    Source: as for the methods of `hodiff.estimators.solve`; the inverse as an operator for second-order methods is
    J. Martens, "Deep learning via Hessian-free optimization", ICML 2010, section 3.
    """

    def __init__(
        self,
        A: LinearOperator,
        method: str = "cg",
        *,
        damping: float = 0.0,
        tol: float | None = None,
        throw: bool = True,
        preconditioner: Any = None,
        atol: float = 0.0,
        max_iterations: int | None = None,
        restart: int | None = None,
        step_size: float | None = None,
        callback: Callable[[int, Tensor], None] | None = None,
        progress: bool = False,
    ):
        require_operator(A, "InverseOperator", "A")
        options = {
            "damping": damping,
            "tol": tol,
            "throw": throw,
            "preconditioner": preconditioner,
            "atol": atol,
            "max_iterations": max_iterations,
            "restart": restart,
            "step_size": step_size,
            "callback": callback,
            "progress": progress,
        }
        self._solutions, self._options = Solutions(A, method, options), options
        super().__init__(A.codomain, A.domain, symmetric=A.symmetric)
        self.operator = A
        self.method = method

    def at(self, x: PyTree) -> InverseOperator:
        """See `LinearOperator.at`; a preconditioner stays as it is."""
        return InverseOperator(self.operator.at(x), self.method, **self._options)

    @property
    def last_report(self) -> Solution | None:
        """The result of `solve` for the last product."""
        return self._solutions.last_report

    def multiply(self, block: Tensor) -> Tensor:
        """Solve for each column."""
        require_no_gradients(self)
        return self._solutions.of(block, transposed=False)

    def multiply_transposed(self, block: Tensor) -> Tensor:
        """Solve with the transpose, which is the transpose of the inverse."""
        require_no_gradients(self)
        return self._solutions.of(block, transposed=True)
