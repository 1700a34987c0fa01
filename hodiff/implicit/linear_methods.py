"""Solvers of a linear system by products, for many right-hand sides, in a table by name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import scipy.sparse.linalg as krylov
import torch
from torch import Tensor

from hodiff.common.chunks import ByteCount, resolve_chunk_size
from hodiff.estimators.results import norms_of
from hodiff.estimators.systems.neumann import neumann_series
from hodiff.implicit.diagnostics import rounding
from hodiff.implicit.sparse_matrices import solve_by_factors

VectorMap = Callable[[Tensor], Tensor]
# A dense matrix of this size needs 8 MB in float64, and as many products as it has columns.
DENSE_UP_TO = 1024
# Rounding in products keeps Krylov methods from the tolerance in one run; the next run starts from the residual.
_RUNS = 3


@dataclass
class SquareSystem:
    """Square linear system, given by its products."""

    product: VectorMap
    # Returns the product of the transpose, for methods that need it.
    transposed: Callable[[], VectorMap]
    # Returns the sparse matrix.
    matrix: Callable[[], Any]
    tol: float
    max_iterations: int | None
    # Problems of the matrix that a method found.
    trouble: list[str] = field(default_factory=list)


def dense(system: SquareSystem, rhs: Tensor) -> Tensor:
    """Solve by LU factors of the dense matrix, for all right-hand sides at once."""
    if not rhs.any():
        return rhs
    matrix = _columns(system.product, rhs[0])
    # Equations may have any units, so singularity is tested after scaling the rows.
    rows = matrix.abs().amax(1, keepdim=True)
    rows = torch.where(rows > 0, rows, 1)
    factors, pivots, _ = torch.linalg.lu_factor_ex(matrix / rows)
    diagonal = factors.diagonal().abs()
    ratio = (diagonal.min() / diagonal.max().clamp(min=torch.finfo(rhs.dtype).tiny)).item()
    if not ratio > len(matrix) * torch.finfo(rhs.dtype).eps:
        system.trouble.append(f"the Jacobian is singular: the smallest pivot is {ratio:.1e} of the largest")
    return torch.linalg.lu_solve(factors, pivots, rhs.T / rows).T


def sparse(system: SquareSystem, rhs: Tensor) -> Tensor:
    """Solve by LU factors of the sparse matrix, for all right-hand sides at once."""
    if not rhs.any():
        return rhs
    x, trouble = solve_by_factors(system.matrix(), rhs)
    if trouble:
        system.trouble.append(trouble)
    return x


def neumann(system: SquareSystem, rhs: Tensor) -> Tensor:
    """Sum the Neumann series, which converges if I - A contracts."""

    def product(column: Tensor) -> Tensor:
        return system.product(column[:, 0])[:, None]

    columns = [each[:, None] for each in rhs]
    most = 1000 if system.max_iterations is None else system.max_iterations
    found = [neumann_series(product, b, system.tol * norms_of(b), 1.0, most)[0] for b in columns]
    return torch.cat(found, 1).T


def scipys(solve: Callable[..., Any]) -> Callable[[SquareSystem, Tensor], Tensor]:
    """Wrap a SciPy method, which is run again on the residual until it is small."""

    def method(system: SquareSystem, rhs: Tensor) -> Tensor:
        return torch.stack([_refined(solve, system, each) for each in rhs])

    return method


def _refined(solve: Callable[..., Any], system: SquareSystem, b: Tensor) -> Tensor:
    n, working = len(b), torch.float64 if b.dtype == torch.float64 else torch.float32

    def on_arrays(product: VectorMap) -> Callable[[np.ndarray], np.ndarray]:
        return lambda v: (
            product(torch.from_numpy(np.array(v).reshape(-1)).to(b)).detach().to("cpu", working, copy=True).numpy()
        )

    @functools.cache
    def transposed() -> Callable[[np.ndarray], np.ndarray]:
        return on_arrays(system.transposed())

    operator = krylov.LinearOperator(
        (n, n),
        matvec=on_arrays(system.product),
        rmatvec=lambda v: transposed()(v),
        dtype=np.dtype(str(working).removeprefix("torch.")),
    )
    x, bound = torch.zeros_like(b), system.tol * b.norm()
    r = b
    for _ in range(_RUNS):
        if r.norm() <= bound or not r.isfinite().all():
            break
        # A residual divided by its norm has the right size for the method's own tests.
        scale = r.norm()
        # Numbers are not finite after a breakdown; the residual shows it.
        with np.errstate(all="ignore"):
            part, done = solve(
                operator, (r / scale).cpu().to(working).numpy(), system.tol, system.max_iterations or 10 * n
            )
        x = x + scale * torch.from_numpy(np.array(part)).to(b)
        r = b - system.product(x)
        if not done:
            break
    return x


def _cg(operator: Any, b: np.ndarray, tol: float, most: int) -> tuple[np.ndarray, bool]:
    x, info = krylov.cg(operator, b, rtol=tol, atol=0.0, maxiter=most)
    return x, info == 0


def _minres(operator: Any, b: np.ndarray, tol: float, most: int) -> tuple[np.ndarray, bool]:
    x, info = krylov.minres(operator, b, rtol=tol, maxiter=most)
    return x, info == 0


def _gmres(operator: Any, b: np.ndarray, tol: float, most: int) -> tuple[np.ndarray, bool]:
    restart = min(len(b), 50, most)
    x, info = krylov.gmres(operator, b, rtol=tol, atol=0.0, restart=restart, maxiter=-(-most // restart))
    return x, info == 0


def _lsmr(operator: Any, b: np.ndarray, tol: float, most: int) -> tuple[np.ndarray, bool]:
    x, why, *_ = krylov.lsmr(operator, b, atol=tol, btol=tol, conlim=0.0, maxiter=most)
    return x, why != 7


METHODS: dict[str, Callable[[SquareSystem, Tensor], Tensor]] = {
    "dense": dense,
    "sparse": sparse,
    "cg": scipys(_cg),
    "minres": scipys(_minres),
    "gmres": scipys(_gmres),
    "lsmr": scipys(_lsmr),
    "neumann": neumann,
}


def default_tolerance(method: Any, dtype: torch.dtype) -> float:
    """Return the relative residual that a method can reach, by elimination or by iterations."""
    return rounding(dtype, 0.5 if method in {"dense", "sparse"} else 2 / 3)


def _columns(product: VectorMap, like: Tensor) -> Tensor:
    n = like.numel()
    basis = torch.eye(n, dtype=like.dtype, device=like.device)
    with ByteCount() as count:
        first = product(basis[0]).detach()
    chunk_size = resolve_chunk_size("auto", n, count.bytes + like.nbytes, like.device)
    try:
        rest: Any = torch.func.vmap(product, chunk_size=chunk_size)(basis[1:]) if n > 1 else basis[1:]
    except RuntimeError:
        # Code that reads values, or an operator without a batching rule, needs one vector at a time.
        rest = torch.stack([product(each) for each in basis[1:]])
    return torch.cat([first[None], rest.detach()]).T
