"""Algorithms of `eigsh`, which compute eigenvalues and eigenvectors; `eigsh` checks them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import numpy as np
import torch
from scipy.sparse.linalg import ArpackNoConvergence, lobpcg
from scipy.sparse.linalg import eigsh as arpack
from torch import Tensor

from hodiff.errors import InputError
from hodiff.estimators.dense_matrix import host_operator, symmetric_matrix_of
from hodiff.estimators.results import norms_of, precise
from hodiff.estimators.spectra.lanczos_eigenpairs import SELECT, EigenProblem, by_lanczos, complete, to_device
from hodiff.torch_internals.autograd.wrapped_tensors import numbers_in

POWER_STEPS = 5


def _by_arpack(problem: EigenProblem) -> tuple[Tensor, Tensor]:
    if not bool(problem.matmat(problem.start).any()):
        # ARPACK rejects a start whose product is zero.
        return by_lanczos(problem)
    if problem.which != "SM":
        return to_device(problem.view, *_arpack_end(problem, problem.which))
    # ARPACK's own "SM" has returned interior eigenvalues that are not the smallest.
    for end, sign in (("SA", 1), ("LA", -1)):
        values, vectors = _arpack_end(problem, end)
        if not len(values) or (sign * values).min() >= -problem.tol * problem.largest:
            return to_device(problem.view, values, vectors)
    raise InputError(
        "eigsh: which: 'SM' needs a factorization if eigenvalues have both signs, as here; use "
        'method="dense", or which="SA" with A.T @ A.'
    )


def _arpack_end(problem: EigenProblem, which: str) -> tuple[np.ndarray, np.ndarray]:
    # ARPACK's tolerance is relative to each eigenvalue, which eigenvalues near zero never meet. They are therefore
    # shifted by two norms, to at most three, and the tolerance shrinks accordingly.
    shift = 0.0 if which == "LM" else {"SA": 2, "LA": -2}[which] * _rough_norm(problem)
    tol = problem.tol if which == "LM" else problem.tol / 3
    unit = _size(problem)
    operator = host_operator(
        problem.view, lambda block: (problem.matmat(block) - shift * block) / unit, problem.view.dtype
    )
    try:
        values, vectors = arpack(
            operator,
            k=problem.k,
            which=which,
            v0=numbers_in(problem.start[:, 0]),
            maxiter=problem.max_iterations or 1000,
            tol=tol,
        )
    except ArpackNoConvergence as error:
        return unit * error.eigenvalues + shift, error.eigenvectors
    return complete(problem, which, unit * values + shift, vectors)


def _size(problem: EigenProblem) -> float:
    """Return a power of two near the operator's norm, by which SciPy's methods get it divided.

    ARPACK takes eigenvalues below eps^(2/3) for converged, and LOBPCG squares products in their own dtype.
    """
    return 2.0 ** math.frexp(problem.largest)[1]


def _rough_norm(problem: EigenProblem) -> float:
    """Estimate the largest absolute eigenvalue within a small factor, by a few power iterations."""
    vector = problem.start[:, :1]
    for _ in range(POWER_STEPS):
        vector = problem.matmat((precise(vector) / norms_of(vector)).to(vector.dtype))
        if not bool(vector.any()):
            break
    return problem.largest


def _by_lobpcg(problem: EigenProblem) -> tuple[Tensor, Tensor]:
    start = numbers_in(torch.linalg.qr(precise(problem.start))[0].to("cpu", problem.view.dtype))
    problem.matmat(problem.start)
    unit = _size(problem)
    operator = host_operator(problem.view, lambda block: problem.matmat(block) / unit, problem.view.dtype)
    with warnings.catch_warnings():
        # SciPy warns if LOBPCG stops early; the residuals decide whether it matters.
        warnings.simplefilter("ignore", UserWarning)
        values, vectors = lobpcg(
            operator,
            start,
            largest=problem.which == "LA",
            tol=problem.tol * problem.largest / unit,
            maxiter=problem.max_iterations or 1000,
        )
    values = unit * values.astype(np.float64)
    if problem.given:
        # A given start may be the eigenvectors of other eigenvalues, which no iteration would leave.
        values, vectors = complete(problem, problem.which, values, vectors)
    return to_device(problem.view, values, vectors)


def _by_dense(problem: EigenProblem) -> tuple[Tensor, Tensor]:
    values, vectors = torch.linalg.eigh(symmetric_matrix_of(problem.view))
    chosen = SELECT[problem.which](numbers_in(values), problem.k)
    problem.iterations = problem.view.n
    problem.largest = values.abs().max().item()
    return to_device(problem.view, numbers_in(values)[chosen], numbers_in(vectors)[:, chosen])


METHODS: dict[str, Callable[[EigenProblem], tuple[Tensor, Tensor]]] = {
    "arpack": _by_arpack,
    "lanczos": by_lanczos,
    "lobpcg": _by_lobpcg,
    "dense": _by_dense,
}
UNAVAILABLE = {"lanczos": ("SM",), "lobpcg": ("LM", "SM")}
