"""Preconditioners for `solve`, computed from products with the operator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hodiff.common.options import require_amount, require_int
from hodiff.errors import InputError
from hodiff.estimators.adapted_operators import view_of
from hodiff.estimators.probes import draw, generator_or_default
from hodiff.estimators.results import precise
from hodiff.estimators.traces.diagonal import diagonal


def jacobi_preconditioner(
    A: Any,
    damping: float = 0.0,
    *,
    floor: float = 1e-3,
    method: str = "xdiag",
    products: int = 100,
    probes: str = "rademacher",
    generator: torch.Generator | None = None,
    chunk_size: int | str | None = "auto",
    progress: bool = False,
) -> Tensor:
    r"""Inverse of the diagonal of a damped operator, for `solve(..., preconditioner=)`.

    $$ P^{-1} = \mathrm{diag}(d_1, \dots, d_n)^{-1}, \qquad
    d_i = \max(|A_{ii} + \lambda|, \epsilon \max_j |A_{jj} + \lambda|) $$

    The floor keeps the preconditioner positive definite if the diagonal, or its estimate, is not.

    Args:
        A: A square operator, as for `trace`.
        damping: The $\lambda$ of the system.
        floor: The $\epsilon$, between 0 and 1.
        method: Method that estimates the diagonal, as for `diagonal`.
        products: Number of products, as for `diagonal`.
        probes: Kind of random vectors, as for `diagonal`.
        generator: Source of random numbers; by default a new generator with seed 0, so that results repeat.
        chunk_size: Vectors multiplied at a time: a positive int, None for all, or "auto" within a memory budget.
        progress: Whether to show a progress bar.

    Returns:
        Tensor (n,).

    Raises:
        InputError: If an option is out of range, or the diagonal is zero.

    Example:
        >>> import torch
        >>> jacobi_preconditioner(torch.diag(torch.tensor([4.0, 2.0, 1.0])), damping=1.0)
        tensor([0.2000, 0.3333, 0.5000])

    Source: Saad, "Iterative methods for sparse linear systems" (SIAM 2003), section 10.2.
    """
    require_amount("jacobi_preconditioner", "damping", damping)
    require_amount("jacobi_preconditioner", "floor", floor, positive=True)
    if floor > 1:
        raise InputError(f"jacobi_preconditioner: floor: expected at most 1, got {floor!r}.")
    estimate = diagonal(
        A,
        method=method,
        products=products,
        probes=probes,
        generator=generator,
        chunk_size=chunk_size,
        progress=progress,
    )
    size = (estimate.value + damping).abs()
    largest = size.max().item()
    if largest == 0:
        raise InputError("jacobi_preconditioner: A: expected a diagonal that is not zero; pass damping.")
    return 1 / size.clamp(min=floor * largest)


@dataclass(frozen=True, eq=False)
class NystromPreconditioner:
    r"""Nyström preconditioner, a callable for blocks (n, k), with its approximation $A \approx U \Lambda U^T$.

    Attributes:
        eigenvalues: Diagonal of $\Lambda$, descending, (rank,).
        eigenvectors: U, (n, rank).
        damping: The $\lambda$ of the preconditioner.
        products: Number of products.
    """

    eigenvalues: Tensor
    eigenvectors: Tensor
    damping: float
    products: int

    def __call__(self, block: Tensor) -> Tensor:
        """Apply the preconditioner to a block (n, k) or a vector (n,)."""
        inside = self.eigenvectors.T @ block
        scale = (self.eigenvalues[-1] + self.damping) / (self.eigenvalues + self.damping) - 1
        return block + self.eigenvectors @ ((scale if block.dim() == 1 else scale[:, None]) * inside)


def nystrom_preconditioner(
    A: Any,
    rank: int,
    damping: float,
    *,
    generator: torch.Generator | None = None,
    chunk_size: int | str | None = "auto",
    progress: bool = False,
) -> NystromPreconditioner:
    r"""Randomized Nyström preconditioner of a damped positive semi-definite operator, by `rank` products.

    $$ P^{-1} = (\hat\lambda_\ell + \lambda)\, U (\Lambda + \lambda I)^{-1} U^T + (I - U U^T), \qquad
    U \Lambda U^T = (A \Omega) (\Omega^T A \Omega)^{-1} (A \Omega)^T $$

    With a rank of about twice the effective dimension, conjugate gradients converge in a number of iterations that does
    not depend on A.

    Args:
        A: A symmetric positive semi-definite operator, as for `trace`.
        rank: Number $\ell$ of products and stored vectors, 1 to n.
        damping: The $\lambda$ of the system, positive.
        generator: Source of random numbers; by default a new generator with seed 0, so that results repeat.
        chunk_size: Vectors multiplied at a time: a positive int, None for all, or "auto" within a memory budget.
        progress: Whether to show a progress bar.

    Returns:
        A `NystromPreconditioner`, a callable.

    Raises:
        InputError: If A is no positive semi-definite real operator, or an option is out of range.

    Example:
        >>> import torch
        >>> A = torch.diag(torch.logspace(3, -3, 100, dtype=torch.float64))
        >>> b = torch.ones(100, dtype=torch.float64)
        >>> from hodiff.estimators import solve
        >>> plain = solve(A, b, damping=0.1)
        >>> fast = solve(A, b, damping=0.1, preconditioner=nystrom_preconditioner(A, 40, 0.1))
        >>> fast.iterations < plain.iterations / 3
        True

    Source: Frangella, Tropp, Udell, "Randomized Nyström preconditioning", SIAM J. Matrix Anal. Appl. 44 (2023),
    algorithm 2.1 and eq. 1.3.
    """
    require_amount("nystrom_preconditioner", "damping", damping, positive=True)
    values, vectors, products = nystrom_eigenpairs("nystrom_preconditioner", A, rank, generator, chunk_size, progress)
    return NystromPreconditioner(values, vectors, damping, products)


def nystrom_eigenpairs(
    caller: str,
    A: Any,
    rank: int,
    generator: torch.Generator | None,
    chunk_size: int | str | None,
    progress: bool,
) -> tuple[Tensor, Tensor, int]:
    """Return eigenvalues (rank,) and eigenvectors (n, rank) of the Nyström approximation, and the products."""
    view = view_of(A, caller, chunk_size=chunk_size)
    require_int(caller, "rank", rank, 1)
    if rank > view.n:
        raise InputError(f"{caller}: rank: expected at most n = {view.n}, got {rank}.")
    probes = draw(view, "gaussian", rank, generator_or_default(caller, generator))
    probes = torch.linalg.qr(precise(probes))[0].to(view.dtype)
    with view.counting(rank, progress):
        image = precise(view.matmat(probes))
    omega, size = precise(probes), image.norm().item()
    if not size:
        return torch.zeros(rank, dtype=view.dtype, device=view.device), probes, view.products
    while True:
        # A shift by rounding makes the factorization succeed, and is subtracted again.
        shift = view.rounding * size
        shifted = image + shift * omega
        core = omega.T @ shifted
        factor, failed = torch.linalg.cholesky_ex((core + core.T) / 2)
        if not bool(failed) or not view.finds_coarser():
            break
    if bool(failed):
        raise InputError(
            f"{caller}: A: expected a positive semi-definite operator, got one with negative curvature; "
            f"use a Gauss-Newton operator{' or jacobi_preconditioner' * (caller == 'nystrom_preconditioner')}."
        )
    root = torch.linalg.solve_triangular(factor, shifted.T, upper=False).T
    vectors, singular, _ = torch.linalg.svd(root, full_matrices=False)
    values = (singular.square() - shift).clamp(min=0)
    return values.to(view.dtype), vectors.to(view.dtype), view.products
