"""Sums of a diagonal matrix and a matrix of low rank, with inverse and determinant in closed form."""

from __future__ import annotations

from functools import cached_property
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hodiff.common.options import require_amount
from hodiff.common.trees import describe
from hodiff.errors import InputError
from hodiff.estimators import DiagonalEstimate, Estimate
from hodiff.estimators.results import precise
from hodiff.estimators.systems.preconditioners import nystrom_eigenpairs
from hodiff.operators.data.watched_point import Point
from hodiff.operators.kfac.factored import AtPoint
from hodiff.operators.linear.constant_points import point_leaves
from hodiff.operators.linear.conversion import Conversion
from hodiff.operators.linear.linear_operator import LinearOperator, require_operator
from hodiff.operators.linear.spaces import Space

CLOSED_FORM = "closed form"


class _Scaled(NamedTuple):
    r"""The operator as $D^{1/2} (I + Q (M - I) Q^\top) D^{1/2}$, and the eigenvalues of M."""

    diagonal: Tensor
    Q: Tensor
    M: Tensor
    eigenvalues: Tensor


class LowRankPlusDiagonalOperator(AtPoint, LinearOperator):
    r"""A diagonal matrix plus a symmetric matrix of low rank.

    $$ A = \operatorname{diag}(d) + U C U^\top $$

    Products cost O(n r), and inverse and determinant O(n r²), by the identity of Woodbury and the determinant lemma for
    the scaled factors $D^{-1/2} U$. `low_rank_approximation` approximates another operator.

    Args:
        diagonal: The numbers d, as a pytree; a flat vector (n,) makes an operator on flat vectors.
        factors: U, (n, r), real; its rows are in the order of the flattened pytree.
        core: C, symmetric (r, r), or its diagonal (r,).

    Attributes:
        entries: The flattened diagonal d, (n,).
        factors: U.
        core: C, (r, r).

    Raises:
        InputError: If a shape or dtype does not fit, or the core is not symmetric.

    Example:
        >>> import torch
        >>> from hodiff.operators import LowRankPlusDiagonalOperator
        >>> A = LowRankPlusDiagonalOperator(torch.ones(3), torch.ones(3, 1), torch.tensor([2.0]))
        >>> A.to_dense()
        tensor([[3., 2., 2.],
                [2., 3., 2.],
                [2., 2., 3.]])
        >>> A.inverse() @ torch.tensor([1.0, 0.0, 0.0])
        tensor([ 0.7143, -0.2857, -0.2857])
        >>> round(A.logdet().value, 4)  # ln 7
        1.9459

    Source: G. H. Golub & C. F. Van Loan, "Matrix computations", 4th ed., 2013, section 2.1.4.
    """

    composed = True

    def __init__(self, diagonal: Any, factors: Tensor, core: Tensor):
        super().__init__(Space.of(diagonal), symmetric=True)
        # Given numbers are the same everywhere.
        self.point = Point(())
        self.entries = self.domain.flatten(diagonal, "LowRankPlusDiagonalOperator", "diagonal")
        self.factors = _matrix("factors", factors, (self.domain.size, None), self.entries)
        r = self.factors.shape[1]
        core = torch.diag_embed(core) if isinstance(core, Tensor) and core.dim() == 1 else core
        self.core = _matrix("core", core, (r, r), self.entries)
        if not torch.allclose(self.core, self.core.mT, rtol=1e-4, atol=float(1e-4 * self.core.detach().abs().sum())):
            raise InputError("LowRankPlusDiagonalOperator: core: expected a symmetric matrix; pass (C + C.T) / 2.")

    def multiply(self, block: Tensor) -> Tensor:
        """Multiply by the diagonal and by the factors."""
        self._require_unchanged()
        return self.entries[:, None] * block + self.factors @ (self.core @ (self.factors.mT @ block))

    def damped(self, damping: Any) -> Any:
        r"""Return the operator $A + \lambda I$, of the same kind if the damping is a number."""
        if not isinstance(damping, Real):
            return super().damped(damping)
        return self._with(self.entries + float(damping), self.factors, self.core)

    def inverse(self, method: str = "exact", *, damping: float = 0.0, **options: Any) -> Any:
        r"""Return the inverse of $A + \lambda I$, which is of the same kind.

        Args:
            method: "exact", or an iterative method of `hodiff.operators.InverseOperator`.
            damping: The $\lambda$, 0 or more.
            **options: Further options of an iterative method.

        Returns:
            An operator.

        Raises:
            InputError: If $A + \lambda I$ is not positive definite to rounding, or an option does not fit the method.
        """
        if method != "exact":
            return super().inverse(method, damping=damping, **options)
        if options:
            name = min(options)
            raise InputError(
                f"LowRankPlusDiagonalOperator.inverse: {name}: expected only damping for method='exact', got "
                f"{options[name]!r}; omit it, or pass an iterative method."
            )
        scaled = self._scaled("inverse", damping)
        root = scaled.diagonal.rsqrt()
        core = torch.linalg.inv(scaled.M) - torch.eye(len(scaled.M), dtype=root.dtype, device=root.device)
        numbers = (1 / scaled.diagonal, root[:, None] * scaled.Q, (core + core.mT) / 2)
        return self._with(*(each.to(self.dtype) for each in numbers))

    def logdet(self, *, damping: float = 0.0, **options: Any) -> Estimate:
        r"""Compute the log-determinant of $A + \lambda I$, $\sum \ln (d_i + \lambda) + \ln \det M$.

        Args:
            damping: The $\lambda$, 0 or more.
            **options: Other options of `hodiff.estimators.logdet`, which are not needed.

        Returns:
            An `Estimate` without error.

        Raises:
            InputError: If $A + \lambda I$ is not positive definite to rounding.
        """
        scaled = self._scaled("logdet", damping)
        return Estimate(
            float(scaled.diagonal.detach().log().sum() + scaled.eigenvalues.log().sum()), 0.0, 0, CLOSED_FORM
        )

    def trace(self, **options: Any) -> Estimate:
        """Compute the trace.

        Args:
            **options: Options of `hodiff.estimators.trace`, which are not needed.

        Returns:
            An `Estimate` without error.
        """
        return Estimate(float(precise(self._diagonal.detach()).sum()), 0.0, 0, CLOSED_FORM)

    def diagonal(self, *, exact: bool = True, **options: Any) -> DiagonalEstimate:
        """Compute the diagonal.

        Args:
            exact: Not needed; the diagonal is always exact.
            **options: Options of `hodiff.estimators.diagonal`, which are not needed.

        Returns:
            A `DiagonalEstimate` without error.
        """
        return DiagonalEstimate(self._diagonal.detach(), torch.zeros_like(self._diagonal), 0, CLOSED_FORM)

    def _require_unchanged(self) -> None:
        # Compiled code watches no tensors.
        if not torch.compiler.is_compiling():
            super()._require_unchanged()

    @property
    def _diagonal(self) -> Tensor:
        self._require_unchanged()
        return self._summed_diagonal

    @cached_property
    def _summed_diagonal(self) -> Tensor:
        return self.entries + ((self.factors @ self.core) * self.factors).sum(1)

    def _scaled(self, caller: str, damping: float) -> _Scaled:
        """Factorize the operator with damping in float64; raise if it is not positive definite."""
        self._require_unchanged()
        where = f"LowRankPlusDiagonalOperator.{caller}"
        require_amount(where, "damping", damping)
        d, U, C = (precise(each) for each in (self.entries, self.factors, self.core))
        d = d + damping
        if not bool((d > 0).all()):
            raise InputError(
                f"{where}: damping: expected a diagonal above 0, got {float(d.min()):.3g} with damping={damping:g}; "
                "pass a larger damping, or the diagonal of the approximated operator."
            )
        Q, R = torch.linalg.qr(d.rsqrt()[:, None] * U)
        M = R @ C @ R.mT
        M = (M + M.mT) / 2 + torch.eye(len(M), dtype=M.dtype, device=M.device)
        mu = torch.linalg.eigvalsh(M.detach())
        if len(mu) and not bool((mu > len(d) * torch.finfo(mu.dtype).eps * mu.abs().max()).all()):
            raise InputError(
                f"{where}: damping: expected a positive definite operator, got one with a negative or vanishing "
                f"eigenvalue with damping={damping:g}; pass a larger damping."
            )
        return _Scaled(d, Q, M, mu)

    def _with(self, entries: Tensor, factors: Tensor, core: Tensor) -> LowRankPlusDiagonalOperator:
        return _at(self.point, LowRankPlusDiagonalOperator(self.domain.unflatten(entries), factors, core))

    def converted(self, conversion: Conversion) -> LowRankPlusDiagonalOperator:
        """See `LinearOperator.to`."""
        self._require_unchanged()
        diagonal = conversion.tree(self.domain.unflatten(self.entries))
        converted = LowRankPlusDiagonalOperator(diagonal, conversion(self.factors), conversion(self.core))
        return _at(Point(list(map(conversion, self.point.leaves))), converted)


def low_rank_approximation(
    A: LinearOperator,
    rank: int,
    *,
    diagonal: Any = None,
    generator: torch.Generator | None = None,
    chunk_size: int | str | None = "auto",
    progress: bool = False,
) -> LowRankPlusDiagonalOperator:
    r"""Approximate a positive semi-definite operator by a matrix of low rank, and optionally a diagonal matrix.

    $$ A \approx \operatorname{diag}(d) + U \Lambda U^\top, \qquad
    U \Lambda U^\top = (A \Omega) (\Omega^\top A \Omega)^{-1} (A \Omega)^\top $$

    The Nyström approximation by a random matrix $\Omega$ with `rank` columns never exceeds A. Its expected error in the
    nuclear norm is at most $(1 + \tfrac{k}{\ell - k - 1})$ times the sum of the eigenvalues after the k-th, for any
    $k < \ell - 1$. With the diagonal of A, the approximation has the same diagonal as A, and drops only the couplings
    outside the low rank: a better inverse where A is a diagonal matrix plus few large directions. Rounding errors are
    relative to the largest eigenvalue: if the diagonal spans nine decades, its smallest rows have seven digits in
    float64, and none in float32.

    Args:
        A: A symmetric positive semi-definite operator (n, n), such as a `hodiff.GaussNewtonOperator`.
        rank: Number $\ell$ of products and stored vectors, 1 to n.
        diagonal: The diagonal of A, such as `A.diagonal(exact=True).value` or `A.diagonal().value`, flat (n,) or a
            pytree; None for d = 0, an approximation that only has an inverse with damping.
        generator: Source of random numbers; by default a new generator with seed 0, so that results repeat.
        chunk_size: Vectors multiplied at a time: a positive int, None for all, or "auto" within a memory budget.
        progress: Whether to show a progress bar.

    Returns:
        A `LowRankPlusDiagonalOperator` on the same pytree, with `inverse` and `logdet`. Entries of d that are negative
        by rounding, or by errors of an estimated diagonal, are 0. It raises after the point of A was changed in place.

    Raises:
        InputError: If A is no such operator, or an argument does not fit.

    Example:
        >>> import torch
        >>> from hodiff.operators import MatrixOperator, low_rank_approximation
        >>> numbers = torch.logspace(2, -8, 50, dtype=torch.float64)
        >>> A = MatrixOperator(torch.diag(numbers), symmetric=True)
        >>> B = low_rank_approximation(A, 40)
        >>> abs(B.logdet(damping=0.1).value - (numbers + 0.1).log().sum().item()) < 0.01
        True

    Source: N. Halko, P. G. Martinsson & J. A. Tropp, "Finding structure with randomness", SIAM Review 53 (2011),
    section 5.4; J. A. Tropp, A. Yurtsever, M. Udell & V. Cevher, "Fixed-rank approximation of a positive-semidefinite
    matrix from streaming data", NeurIPS 2017, algorithm 3 and theorem 4.1.
    """
    caller = "low_rank_approximation"
    require_operator(A, caller, "A")
    A.domain.require_whole(caller, "products A @ v")
    if not A.symmetric:
        raise InputError(
            f"{caller}: A: expected a symmetric operator, got {A!r}; pass 0.5 * (A + A.T), or for a matrix "
            "MatrixOperator(matrix, symmetric=True)."
        )
    values, vectors, _ = nystrom_eigenpairs(caller, A, rank, generator, chunk_size, progress)
    entries = torch.zeros(A.domain.size, dtype=A.dtype, device=A.device)
    if diagonal is not None:
        is_flat = isinstance(diagonal, Tensor) and diagonal.shape == entries.shape
        given = diagonal if is_flat else A.domain.flatten(diagonal, caller, "diagonal")
        # In float64: small entries of d are differences of larger numbers.
        kept = (precise(vectors).square() * precise(values)).sum(1)
        entries = (precise(given) - kept).clamp(min=0).to(entries)
    return _at(Point(point_leaves(A)), LowRankPlusDiagonalOperator(A.domain.unflatten(entries), vectors, values))


def _at(point: Point, operator: LowRankPlusDiagonalOperator) -> LowRankPlusDiagonalOperator:
    """Return an operator that raises after its point was changed in place."""
    operator.point = point
    return operator


def _matrix(name: str, matrix: Any, shape: tuple[int, int | None], like: Tensor) -> Tensor:
    wanted = f"({shape[0]}, {'r' if shape[1] is None else shape[1]})"
    fits = isinstance(matrix, Tensor) and matrix.dim() == 2 and matrix.is_floating_point()
    if not fits or any(size not in (None, n) for size, n in zip(shape, matrix.shape, strict=True)):
        raise InputError(
            f"LowRankPlusDiagonalOperator: {name}: expected a floating-point tensor {wanted}, got {describe(matrix)}; "
            "reshape or convert it."
        )
    return matrix.to(like)
