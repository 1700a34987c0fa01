"""Lanczos process with full re-orthogonalization, shared by the spectral estimators."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from scipy.linalg import eigh_tridiagonal
from torch import Tensor

from hodiff.estimators.checkpoints import State
from hodiff.estimators.dense_matrix import refuse_asymmetry
from hodiff.estimators.results import precise
from hodiff.estimators.view import View

# Rounding of long sums in float64. As many roundings in float32 would hide the bulk of a spectrum with outliers.
SUMS = 64 * torch.finfo(torch.float64).eps
# Numbers of a vector that are converted to high precision at a time.
GROUP = 2**16


class Chain:
    r"""Orthonormal $q_1, \dots, q_m$ from one start, with $A Q = Q T + \beta_m q_{m+1} e_m^T$ and T tridiagonal.

    Vectors stay on the operator's device in its working dtype; the numbers of T are float64 on the host. A full chain
    goes on after `shorten`, which replaces its vectors by some Ritz vectors y; $q_{m+1}$ then couples to all of them.

    Args:
        view: Symmetric operator.
        start: First vector, (n,), of any nonzero length, or the saved state of a chain.
        steps: Maximum number of vectors.
        locked: Orthonormal columns, (n, k); operator and start are restricted to their complement.
        scale: A lower bound of the operator's norm, to which rounding is relative also where products are small.

    Source: Wu, Simon, "Thick-restart Lanczos method for large symmetric eigenvalue problems", SIAM J. Matrix Anal.
    Appl. 22 (2000), section 2.
    """

    def __init__(self, view: View, start: Tensor | State, steps: int, locked: Tensor | None = None, scale: float = 0.0):
        self._view = view
        self._basis = torch.empty(0, view.n, dtype=view.dtype, device=view.device)
        self._locked = self._basis.new_zeros(view.n, 0) if locked is None else locked
        self._dimension = view.total - self._locked.shape[1]
        self._capacity = min(steps, self._dimension)
        self._basis = self._basis.new_empty(self._capacity, view.n)
        # The vector after those of a full chain.
        self._next: Tensor | None = None
        self._alphas: list[float] = []
        self._betas: list[float] = []
        # Couplings of the first Ritz vectors to the vector after them.
        self._spokes: list[float] = []
        self._scale = scale
        self.products = 0
        if isinstance(start, State):
            self._resume(start)
        else:
            start = self._complement(self._complement(start))
            self._basis[0] = start / self._norm(start)

    def _resume(self, state: State) -> None:
        saved = state.numbers
        self._alphas, self._betas, self._spokes = saved["alphas"], saved["betas"], saved["spokes"]
        self._scale, self.products = saved["scale"], saved["products"]
        vectors = state.blocks["vectors"].T
        self._basis[: len(vectors)] = vectors

    @property
    def state(self) -> State:
        """State from which an equal chain is created; a chain that cannot go on has no newest vector."""
        numbers = {"alphas": self._alphas, "betas": self._betas, "spokes": self._spokes}
        count = len(self) if self.full or self.exhausted else len(self) + 1
        return State({**numbers, "scale": self._scale, "products": self.products}, {"vectors": self._basis[:count].T})

    def __len__(self) -> int:
        return len(self._alphas)

    @property
    def exhausted(self) -> bool:
        """Whether the current vectors span an invariant subspace."""
        coupled = len(self) == len(self._spokes) and any(self._spokes)
        return bool(self._betas) and self._betas[-1] == 0.0 and not coupled

    @property
    def full(self) -> bool:
        """Whether the chain has reached its capacity or the dimension."""
        return len(self) == self._capacity

    @property
    def complete(self) -> bool:
        """Whether the chain has reached the dimension."""
        return len(self) == self._dimension

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
        # A symmetric operator couples to these vectors alone. One pass over all vectors then removes the rounding.
        near = 0 if j == len(self._spokes) else j - 1
        total = torch.zeros(j + 1, dtype=image.dtype, device=image.device)
        total[near:] = self._overlaps(known[near:], image)
        rest = self._complement(_without(image, known[near:], total[near:]))
        for _ in range(2):
            again = self._overlaps(known, rest)
            rest = _without(rest, known, again)
            total += again
            beta = self._norm(rest)
            if float(again.norm()) <= beta:
                break
        total = total.cpu()
        alpha = total[j].item()
        self._scale = max(self._scale, abs(alpha), self._norm(image))
        self._require_symmetry(total[:j].clone())
        self.products += 1
        # An image within the span leaves only rounding errors, which must not become the next vector.
        if j + 1 == self._dimension or beta <= max(2 * self._view.rounding, SUMS) * self._scale:
            beta = 0.0
        self._alphas.append(alpha)
        self._betas.append(beta)
        if beta and self.full:
            self._next = rest / beta
        elif beta:
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
        alphas, betas = np.array(self._alphas[:count]), np.array(self._betas[: count - 1])
        if not self._spokes:
            return eigh_tridiagonal(alphas, betas)
        matrix, hub = np.diag(alphas) + np.diag(betas, -1), len(self._spokes)
        if hub < count:
            matrix[hub, :hub] = self._spokes
        return np.linalg.eigh(matrix)

    def shorten(self, values: np.ndarray, vectors: np.ndarray) -> None:
        """Replace all vectors by the Ritz vectors for some eigenvalues and eigenvectors of T: a thick restart."""
        kept = len(values)
        self._spokes = (self._betas[-1] * vectors[-1]).tolist()
        rows = torch.from_numpy(vectors).to(precise(self._basis[:0]))
        for part in self.basis.split(GROUP, 1):
            part[:kept] = rows.T @ precise(part)
        self._alphas, self._betas = values.tolist(), [0.0] * kept
        if self._next is not None:
            self._basis[kept], self._next = self._next, None

    def combined(self, vectors: np.ndarray) -> Tensor:
        """Compute the Ritz vectors for eigenvectors of T, as columns in high precision."""
        rows = torch.from_numpy(vectors).to(precise(self._basis[:0]))
        return torch.cat([precise(part).T @ rows for part in self.basis.split(GROUP, 1)])

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
            if len(couplings) == len(self._spokes):
                couplings -= torch.tensor(self._spokes, dtype=couplings.dtype)
            else:
                couplings[-1] -= self._betas[-1]
            view, gap = self._view, couplings.abs().max().item() / self._scale if self._scale else 0.0
            if gap > view.rounding**0.5 and not (view.finds_coarser() and gap <= view.rounding**0.5):
                refuse_asymmetry(view)


def _without(vector: Tensor, rows: Tensor, coefficients: Tensor) -> Tensor:
    """Subtract a combination of rows from a vector."""
    return torch.addmv(vector, rows.T, coefficients, alpha=-1)


def advance(view: View, chains: Sequence[Chain]) -> bool:
    """Extend all chains that can go on by a joint product; return False if none can."""
    going = [chain for chain in chains if not chain.full and not chain.exhausted]
    if going:
        images = view.matmat(torch.stack([chain.newest for chain in going], 1))
        for chain, image in zip(going, images.unbind(1), strict=True):
            chain.extend(image)
    return bool(going)
