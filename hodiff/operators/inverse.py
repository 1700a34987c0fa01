"""The inverse of an operator, whose products are solutions of linear systems."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hodiff.errors import InputError
from hodiff.estimators.solve import METHODS, Solution, solve
from hodiff.operators.base import LinearOperator, require_operator

RECTANGULAR = "lsmr"
FACTORED = "dense"


class InverseOperator(LinearOperator):
    r"""The inverse of a square operator, or the pseudo-inverse of any, known by its products.

    $$ b \mapsto (A + \lambda I)^{-1} b, \qquad\text{for "lsmr"}\quad b \mapsto \arg\min_x \lVert A x - b \rVert $$

    Each product solves a linear system by `hodiff.estimators.solve`, the columns of a block together. Products are as
    exact as `tol` asks; a preconditioner of another solver needs no more than a few digits.

    Args:
        A: The operator (n, n); for "lsmr" (m, n).
        method: "cg" for symmetric positive definite operators, "minres" for symmetric ones, "gmres" for square ones,
            "lsmr" for least squares, "neumann" for a truncated series, "dense" for a matrix that is formed by n
            products and factorized, both once.
        damping: The $\lambda$, 0 or more.
        tol: Relative tolerance of the residual; the default is that of `solve`.
        throw: Whether a product that misses the tolerance raises; else it warns.
        **options: Further ones of `solve`: `preconditioner`, `atol`, `max_iterations`, `restart`, `step_size`,
            `progress`.

    Attributes:
        last_report: What `solve` said about the last product, with iterations and residuals; None before the first.

    Raises:
        InputError: If A is no operator or not square, or the method is none of these; on first use, if an option does
            not fit the method.
        ConvergenceError: On use, if the tolerance is missed and `throw`.

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
        **options: Any,
    ):
        require_operator(A, "InverseOperator", "A")
        if method not in METHODS:
            raise InputError(
                f"InverseOperator: method: expected one of {', '.join(map(repr, METHODS))}, got {method!r}."
            )
        m, n = A.shape
        if m != n and method != RECTANGULAR:
            raise InputError(
                f"InverseOperator: A: expected a square operator for method={method!r}, got {A}; use "
                f"method={RECTANGULAR!r} for least squares, or (A.T @ A).inverse()."
            )
        super().__init__(A.codomain, A.domain, symmetric=A.symmetric)
        self.operator = A
        self.method = method
        self.last_report: Solution | None = None
        self._options = {"damping": damping, "tol": tol, "throw": throw, **options}
        self._factored: _Factored | None = None

    def multiply(self, block: Tensor) -> Tensor:
        """Solve for each column."""
        return self._solve(block, transposed=False)

    def multiply_transposed(self, block: Tensor) -> Tensor:
        """Solve with the transpose, which is the transpose of the inverse."""
        return self._solve(block, transposed=True)

    def _solve(self, block: Tensor, *, transposed: bool) -> Tensor:
        operator = self.operator.T if transposed else self.operator
        if block.shape[1] == 0:
            return block.new_zeros(operator.shape[1], 0)
        with torch.no_grad():
            if self.method == FACTORED:
                if self._factored is None:
                    self._factored = _Factored(self.operator.to_dense(), self._options["damping"])
                matrix, x0 = self._factored.guess(block, transposed=transposed)
                self.last_report = solve(matrix, block, method=self.method, x0=x0, **self._options)
            else:
                self.last_report = solve(_Columns(operator), block, method=self.method, **self._options)
        return self.last_report.value.to(self.dtype)


class _Columns:
    """An operator as `solve` sees it: blocks of columns, and no pytrees for which a block could be taken."""

    def __init__(self, operator: LinearOperator):
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
    """A matrix with its triangular factors, from which `solve` starts, and where they are good also ends."""

    def __init__(self, matrix: Tensor, damping: float):
        self._matrix = matrix
        # Devices without float64 factorize in what they have.
        precise = matrix if matrix.device.type == "mps" else matrix.double()
        damped = precise + damping * torch.eye(len(matrix), dtype=precise.dtype, device=matrix.device)
        self._factors, self._pivots, failed = torch.linalg.lu_factor_ex(damped)
        self._regular = not bool(failed)

    def guess(self, block: Tensor, *, transposed: bool) -> tuple[Tensor, Tensor | None]:
        """The matrix, and the solution where the factors give one."""
        matrix = self._matrix.mT if transposed else self._matrix
        if not self._regular:
            return matrix, None
        found = torch.linalg.lu_solve(self._factors, self._pivots, block.to(self._factors.dtype), adjoint=transposed)
        return matrix, found.to(block.dtype) if bool(torch.isfinite(found).all()) else None
