"""Algorithms of `eigsh`, which compute eigenvalues and eigenvectors; `eigsh` checks them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from scipy.sparse.linalg import ArpackNoConvergence, lobpcg
from scipy.sparse.linalg import eigsh as arpack
from torch import Tensor

from hodiff.errors import InputError
from hodiff.estimators.dense_matrix import host_operator, symmetric_matrix_of
from hodiff.estimators.probes import draw
from hodiff.estimators.results import precise
from hodiff.estimators.spectra.lanczos import Chain
from hodiff.estimators.view import View
from hodiff.torch_internals.autograd.wrapped_tensors import numbers_in

POWER_STEPS = 5
# An end of the spectrum is resolved once the residual there is below this fraction of the spectrum's width.
SEEN = 0.01

# Order of eigenvalues by distance towards an end.
RANK: dict[str, Callable[[np.ndarray], np.ndarray]] = {"LM": np.abs, "LA": np.asarray, "SA": np.negative}

# Indexes of the selected eigenvalues among the ascending ones, in ascending order.
SELECT: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {
    "LM": lambda values, k: np.sort(np.argsort(np.abs(values))[-k:]),
    "SM": lambda values, k: np.sort(np.argsort(np.abs(values))[:k]),
    "LA": lambda values, k: np.arange(len(values))[-k:],
    "SA": lambda values, k: np.arange(len(values))[:k],
}


class SpentError(Exception):
    """Raised if a refinement exceeds its number of products."""


@dataclass(eq=False)
class EigenProblem:
    """Arguments of `eigsh`, with counters; `largest` is the largest ||A v|| / ||v|| so far, a lower bound of ||A||."""

    view: View
    k: int
    which: str
    start: Tensor
    tol: float
    max_iterations: int | None
    generator: torch.Generator
    largest: float = 0.0
    iterations: int = 0
    most: float = math.inf

    def matmat(self, block: Tensor) -> Tensor:
        """Multiply a block, which counts as one iteration; raise `SpentError` beyond the allowed number of products."""
        if self.view.products + block.shape[1] > self.most:
            raise SpentError
        image = self.view.matmat(block)
        norms = self.view.norms(block).clamp(min=torch.finfo(block.dtype).tiny)
        ratios = (self.view.norms(image) / norms).tolist()
        self.largest = max(self.largest, *ratios, 0.0)
        self.iterations += 1
        return image


def _by_arpack(problem: EigenProblem) -> tuple[Tensor, Tensor]:
    if not bool(problem.matmat(problem.start).any()):
        # ARPACK rejects a start whose product is zero.
        return _by_lanczos(problem)
    if problem.which != "SM":
        return _to_device(problem.view, *_arpack_end(problem, problem.which))
    # ARPACK's own "SM" has returned interior eigenvalues that are not the smallest.
    for end, sign in (("SA", 1), ("LA", -1)):
        values, vectors = _arpack_end(problem, end)
        if not len(values) or (sign * values).min() >= -problem.tol * problem.largest:
            return _to_device(problem.view, values, vectors)
    raise InputError(
        "eigsh: which: 'SM' needs a factorization if eigenvalues have both signs, as here; use "
        'method="dense", or which="SA" with A.T @ A.'
    )


def _arpack_end(problem: EigenProblem, which: str) -> tuple[np.ndarray, np.ndarray]:
    # ARPACK's tolerance is relative to each eigenvalue, which eigenvalues near zero never meet. They are therefore
    # shifted by two norms, to at most three, and the tolerance shrinks accordingly.
    shift = 0.0 if which == "LM" else {"SA": 2, "LA": -2}[which] * _rough_norm(problem)
    tol = problem.tol if which == "LM" else problem.tol / 3
    # ARPACK takes eigenvalues below eps^(2/3) for converged, so it gets an operator of size one.
    unit = 2.0 ** math.frexp(problem.largest)[1]
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


def _rough_norm(problem: EigenProblem) -> float:
    """Estimate the largest absolute eigenvalue within a small factor, by a few power iterations."""
    vector = problem.start[:, :1]
    for _ in range(POWER_STEPS):
        vector = problem.matmat(vector / torch.linalg.vector_norm(vector))
        if not bool(vector.any()):
            break
    return problem.largest


def complete(
    problem: EigenProblem, which: str, values: np.ndarray, vectors: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Add eigenvalues that a single start has missed: further copies of multiple eigenvalues."""
    for _ in range(problem.k if problem.k > 1 else 0):
        missed = _beyond(problem, which, values, vectors)
        if missed is None:
            break
        values, vectors = np.append(values, missed[0]), np.column_stack([vectors, missed[1]])
        order = np.argsort(values)
        chosen = order[SELECT[which](values[order], problem.k)]
        values, vectors = values[chosen], vectors[:, chosen]
    return values, vectors


def _beyond(
    problem: EigenProblem, which: str, values: np.ndarray, vectors: np.ndarray
) -> tuple[float, np.ndarray] | None:
    """Search the complement of the known eigenpairs for one further out, by a separate chain."""
    view, rank = problem.view, RANK[which]
    found = torch.from_numpy(vectors).to(view.device, view.dtype)
    start = draw(view, "gaussian", 1, problem.generator)[:, 0]
    chain = Chain(view, start, problem.max_iterations or max(100, 20 * problem.k), locked=found)
    slack = 4 * problem.tol * problem.largest
    limit = rank(values).min() + slack
    while True:
        chain.extend(problem.matmat(chain.newest[:, None])[:, 0])
        ritz, rows = chain.ritz()
        index = int(rank(ritz).argmax())
        residual = chain.residuals(rows[:, index : index + 1])[0]
        outside = rank(ritz)[index] > limit
        # Before a chain has resolved the ends, an end far inside the limit is no evidence.
        inside = rank(ritz)[index] + residual <= limit and residual <= SEEN * (ritz[-1] - ritz[0])
        settled = residual <= problem.tol * problem.largest if outside else inside
        if settled or chain.full or chain.exhausted:
            return (ritz[index], numbers_in(_ritz_vectors(chain, rows[:, index]))) if outside else None


def _ritz_vectors(chain: Chain, rows: np.ndarray) -> Tensor:
    basis = precise(chain.basis)
    return basis.T @ torch.from_numpy(rows).to(basis)


def _by_lobpcg(problem: EigenProblem) -> tuple[Tensor, Tensor]:
    start = numbers_in(torch.linalg.qr(precise(problem.start))[0].to("cpu", problem.view.dtype))
    operator = host_operator(problem.view, problem.matmat, problem.view.dtype)
    problem.matmat(problem.start)
    with warnings.catch_warnings():
        # SciPy warns if LOBPCG stops early; the residuals decide whether it matters.
        warnings.simplefilter("ignore", UserWarning)
        values, vectors = lobpcg(
            operator,
            start,
            largest=problem.which == "LA",
            tol=problem.tol * problem.largest,
            maxiter=problem.max_iterations or 1000,
        )
    return _to_device(problem.view, values, vectors)


def _by_lanczos(problem: EigenProblem) -> tuple[Tensor, Tensor]:
    """Run one chain, restarted in a new direction if it is exhausted before there are k eigenvalues."""
    view, k = problem.view, problem.k
    steps = min(view.total, problem.max_iterations or max(100, 20 * k))
    chain = Chain(view, problem.start[:, 0], steps)
    while True:
        chain.extend(problem.matmat(chain.newest[:, None])[:, 0])
        if len(chain) >= k and (chain.exhausted or chain.full or len(chain) % 5 == 0 or len(chain) <= 20):
            values, vectors = chain.ritz()
            chosen = SELECT[problem.which](values, k)
            limit = problem.tol * max(abs(values[0]), abs(values[-1]))
            settled = chain.residuals(vectors[:, chosen]).max() <= limit
            if settled or chain.full:
                break
        if chain.exhausted:
            chain.restart(draw(view, "gaussian", 1, problem.generator)[:, 0])
    found = numbers_in(_ritz_vectors(chain, vectors[:, chosen]))
    if chain.full:
        return _to_device(view, values[chosen], found)
    return _to_device(view, *complete(problem, problem.which, values[chosen], found))


def _by_dense(problem: EigenProblem) -> tuple[Tensor, Tensor]:
    values, vectors = torch.linalg.eigh(symmetric_matrix_of(problem.view))
    chosen = SELECT[problem.which](numbers_in(values), problem.k)
    problem.iterations = problem.view.n
    problem.largest = values.abs().max().item()
    return _to_device(problem.view, numbers_in(values)[chosen], numbers_in(vectors)[:, chosen])


def _to_device(view: View, values: np.ndarray, vectors: np.ndarray) -> tuple[Tensor, Tensor]:
    return tuple(torch.tensor(each, dtype=view.dtype, device=view.device) for each in (values, vectors))  # type: ignore[return-value]


METHODS: dict[str, Callable[[EigenProblem], tuple[Tensor, Tensor]]] = {
    "arpack": _by_arpack,
    "lanczos": _by_lanczos,
    "lobpcg": _by_lobpcg,
    "dense": _by_dense,
}
UNAVAILABLE = {"lanczos": ("SM",), "lobpcg": ("LM", "SM")}
