"""Lanczos process with full re-orthogonalization, shared by the spectral estimators."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from scipy.linalg import eigh_tridiagonal
from torch import Tensor

from hodiff.estimators.dense_matrix import refuse_asymmetry
from hodiff.estimators.view import View

# Rounding of long sums in float64. As many roundings in float32 would hide the bulk of a spectrum with outliers.
SUMS = 64 * torch.finfo(torch.float64).eps


class Chain:
    r"""Orthonormal $q_1, \dots, q_m$ from one start, with $A Q = Q T + \beta_m q_{m+1} e_m^T$ and T tridiagonal.

    Vectors stay on the operator's device in its working dtype; the numbers of T are float64 on the host.

    Args:
        view: Symmetric operator.
        start: First vector, (n,), of any nonzero length.
        steps: Maximum number of vectors.
        locked: Orthonormal columns, (n, k); operator and start are restricted to their complement.
    """

    def __init__(self, view: View, start: Tensor, steps: int, locked: Tensor | None = None):
        self._view = view
        self._locked = start.new_zeros(view.n, 0) if locked is None else locked
        self._dimension = view.total - self._locked.shape[1]
        self._capacity = min(steps, self._dimension)
        self._basis = torch.empty(self._capacity, view.n, dtype=view.dtype, device=view.device)
        start = self._complement(self._complement(start))
        self._basis[0] = start / self._norm(start)
        self._alphas: list[float] = []
        self._betas: list[float] = []
        self._scale = 0.0

    def __len__(self) -> int:
        return len(self._alphas)

    @property
    def exhausted(self) -> bool:
        """Whether the current vectors span an invariant subspace."""
        return bool(self._betas) and self._betas[-1] == 0.0

    @property
    def full(self) -> bool:
        """Whether the chain has reached its capacity or the dimension."""
        return len(self) == self._capacity

    @property
    def basis(self) -> Tensor:
        """Vectors as rows."""
        return self._basis[: len(self)]

    @property
    def newest(self) -> Tensor:
        """Vector whose product extends the chain."""
        return self._basis[len(self)]

    def extend(self, image: Tensor) -> None:
        """Extend the chain by the product with the newest vector."""
        j = len(self)
        known = self._basis[: j + 1]
        image = self._complement(image)
        overlaps = self._overlaps(known, image)
        rest = self._complement(image - overlaps @ known)
        again = self._overlaps(known, rest)
        rest = rest - again @ known
        total = (overlaps + again).cpu()
        alpha, beta = total[j].item(), self._norm(rest)
        self._scale = max(self._scale, abs(alpha), self._norm(image))
        self._require_symmetry(total[:j].clone())
        # An image within the span leaves only rounding errors, which must not become the next vector.
        if j + 1 == self._dimension or beta <= max(2 * self._view.rounding, SUMS) * self._scale:
            beta = 0.0
        self._alphas.append(alpha)
        self._betas.append(beta)
        if beta and not self.full:
            self._basis[j + 1] = rest / beta

    def restart(self, vector: Tensor) -> None:
        """Continue an exhausted chain in a new direction, orthogonalized to all current vectors."""
        for _ in range(2):
            vector = self._complement(vector)
            vector = vector - self._overlaps(self.basis, vector) @ self.basis
        self._basis[len(self)] = vector / self._norm(vector)

    def ritz(self, count: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Compute ascending eigenvalues and eigenvectors (columns) of T, or of its leading `count` rows and columns."""
        count = len(self) if count is None else count
        return eigh_tridiagonal(np.array(self._alphas[:count]), np.array(self._betas[: count - 1]))

    def residuals(self, vectors: np.ndarray) -> np.ndarray:
        r"""Compute $\|A y - \theta y\|$ of the Ritz vectors y for eigenvectors of T, without a product."""
        return self._betas[-1] * np.abs(vectors[-1])

    def _complement(self, vector: Tensor) -> Tensor:
        return vector - self._locked @ self._overlaps(self._locked.T, vector) if self._locked.shape[1] else vector

    def _overlaps(self, rows: Tensor, vector: Tensor) -> Tensor:
        """Compute the inner products of rows with a vector."""
        return self._view.gram(rows.T, vector[:, None])[:, 0]

    def _norm(self, vector: Tensor) -> float:
        return self._view.norms(vector[:, None]).item()

    def _require_symmetry(self, couplings: Tensor) -> None:
        """Raise if a product overlaps with more than the last two vectors, as a symmetric operator's does not."""
        if len(couplings):
            couplings[-1] -= self._betas[-1]
            view, gap = self._view, couplings.abs().max().item() / self._scale if self._scale else 0.0
            if gap > view.rounding**0.5 and not (view.finds_coarser() and gap <= view.rounding**0.5):
                refuse_asymmetry(view)


def advance(view: View, chains: Sequence[Chain]) -> bool:
    """Extend all chains that can go on by a joint product; return False if none can."""
    going = [chain for chain in chains if not chain.full and not chain.exhausted]
    if going:
        images = view.matmat(torch.stack([chain.newest for chain in going], 1))
        for chain, image in zip(going, images.unbind(1), strict=True):
            chain.extend(image)
    return bool(going)
