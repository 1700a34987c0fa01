"""MINRES, GMRES and LSMR by SciPy, column by column, on the host in float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from numpy.linalg import norm
from scipy.sparse.linalg import LinearOperator as ScipyOperator
from scipy.sparse.linalg import gmres, lsmr, minres
from torch import Tensor

from hodiff.errors import InputError
from hodiff.estimators.dense_matrix import host_operator
from hodiff.estimators.results import norms_of
from hodiff.estimators.systems.damped_systems import DampedSystem, Increment, Solver
from hodiff.torch_internals.autograd.wrapped_tensors import numbers_in

LOOK_EVERY = 10  # iterations of MINRES between checks, which cost a product


class _Reached(Exception):  # noqa: N818 - it is no error
    """Exception that returns a solution from SciPy's callback."""


class _Unusable(Exception):  # noqa: N818 - it ends one column
    """Exception that ends SciPy's algorithm with the reason why it cannot use the preconditioner."""


# Solves a column: operator, residual, factor of its reduction, remaining iterations, and system.
ColumnSolve = Callable[[ScipyOperator, np.ndarray, float, int, DampedSystem], np.ndarray]


def _minres(A: ScipyOperator, r: np.ndarray, reduction: float, left: int, system: DampedSystem) -> np.ndarray:
    # SciPy's test compares the residual with ||A|| ||x||, which may be a thousand times ||b||.
    target = reduction * norm(r)
    count = 0

    def look(x: np.ndarray) -> None:
        nonlocal count
        count += 1
        if count % LOOK_EVERY == 0 and norm(r - A @ x) <= target:
            raise _Reached(x.copy())

    try:
        return minres(A, r, rtol=1e-15, maxiter=left, M=_host_preconditioner(system, positive=True), callback=look)[0]
    except _Reached as reached:
        return reached.args[0]


def _gmres(A: ScipyOperator, r: np.ndarray, reduction: float, left: int, system: DampedSystem) -> np.ndarray:
    length = min(system.restart or min(50, system.view.n), left)
    cycles = -(-left // length)
    preconditioner = _host_preconditioner(system)
    return gmres(A, r, rtol=reduction / 2, restart=length, maxiter=cycles, M=preconditioner)[0]


def _lsmr(A: ScipyOperator, r: np.ndarray, reduction: float, left: int, system: DampedSystem) -> np.ndarray:
    return lsmr(A, r, atol=reduction * 1e-3, btol=0.0, conlim=0.0, maxiter=left)[0]


def _by_columns(solve: ColumnSolve) -> Callable[[DampedSystem, Tensor, Tensor], Increment]:
    def increment(system: DampedSystem, residual: Tensor, targets: Tensor) -> Increment:
        sizes = norms_of(residual) if solve is not _lsmr else normal_residual(system, residual)
        solutions = []
        reasons: list[str | None] = []
        for column, size, target in zip(residual.unbind(1), sizes.tolist(), targets.tolist(), strict=True):
            counted = _Counted(system)
            A = host_operator(system.view, counted.apply, torch.float64, counted.apply_transposed)
            right = numbers_in(column.to("cpu", torch.float64))
            # SciPy's tests compare the operator with 1 and with the right-hand side.
            operator, unit = _Scale(A), _power_of_two(float(norm(right)))
            try:
                x, reason = solve(operator.scaled, right / unit, target / size, system.left, system), None
            except _Unusable as unusable:
                x, reason = np.zeros(system.view.n), str(unusable)
            solutions.append(x / operator.unit * unit)
            reasons.append(reason)
        step = torch.from_numpy(np.stack(solutions, 1)).to(residual.device, residual.dtype)
        return Increment(step, reasons)

    return increment


class _Scale:
    """Operator divided by a power of two near its size, which its first product measures."""

    def __init__(self, operator: ScipyOperator):
        self.unit = 1.0
        self._measured = False
        self.scaled = ScipyOperator(
            operator.shape, self._through(operator.matvec), self._through(operator.rmatvec), dtype=operator.dtype
        )

    def _through(self, apply: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray], np.ndarray]:
        def run(vector: np.ndarray) -> np.ndarray:
            image = apply(vector)
            # Before there is an image that is not zero, the unit does not matter.
            if not self._measured and image.any():
                self.unit, self._measured = _power_of_two(float(norm(image) / norm(vector))), True
            return image / self.unit

        return run


def _power_of_two(size: float) -> float:
    """Return the power of two above a size."""
    return math.ldexp(1.0, math.frexp(size)[1])


class _Counted:
    """Products of the system for one column, which are counted as iterations."""

    def __init__(self, system: DampedSystem):
        self._system = system
        self._count = 0

    def apply(self, block: Tensor) -> Tensor:
        self._count += 1
        self._system.advance_to(self._count)
        return self._system.apply(block)

    def apply_transposed(self, block: Tensor) -> Tensor:
        return transposed(self._system, block)


def transposed(system: DampedSystem, block: Tensor) -> Tensor:
    """Multiply with the damped transpose; raise if there is none."""
    image = system.apply_transposed(block)
    if image is None:
        raise InputError(
            'solve: A: method="lsmr" multiplies with the transpose, which this operator does not have; define A.T, or '
            'use method="gmres" (or "minres" if A is symmetric).'
        )
    return image


def normal_residual(system: DampedSystem, residual: Tensor) -> Tensor:
    r"""Compute the norms of $A^T r$, which vanish at a minimum of $\|A x - b\|$, zero or not."""
    return norms_of(transposed(system, residual))


def _host_preconditioner(system: DampedSystem, *, positive: bool = False) -> ScipyOperator | None:
    """Return the preconditioner; its products raise if it is singular or, where asked, not positive definite."""
    if system.precondition is None:
        return None
    scaled = _Scale(host_operator(system.view, system.precondition, torch.float64)).scaled

    def apply(vector: np.ndarray) -> np.ndarray:
        image = scaled.matvec(vector)
        if np.isfinite(vector).all() and not np.isfinite(image).all():
            raise InputError(
                f"{system.view.caller}: preconditioner: expected finite products, got inf or nan; check its numbers, "
                "or omit it."
            )
        size = float(norm(vector) * norm(image))
        if vector.any() and not image.any():
            raise _Unusable("the preconditioner is singular; make it positive definite")
        if positive and size > np.finfo(np.float64).tiny and float(vector.ravel() @ image.ravel()) <= 0:
            raise _Unusable("the preconditioner is not positive definite; make it so")
        return image

    return ScipyOperator(scaled.shape, apply, dtype=scaled.dtype)


SOLVERS: dict[str, Solver] = {"minres": _by_columns(_minres), "gmres": _by_columns(_gmres), "lsmr": _by_columns(_lsmr)}
