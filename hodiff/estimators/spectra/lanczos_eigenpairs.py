"""Eigenpairs by thick-restarted Lanczos chains, and the search for further copies of multiple eigenvalues."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hodiff.estimators.checkpoints import Keep, Stages, State
from hodiff.estimators.probes import draw
from hodiff.estimators.spectra.lanczos import Chain
from hodiff.estimators.view import View
from hodiff.torch_internals.autograd.wrapped_tensors import numbers_in

# Default number of products of "lanczos", in multiples of the vectors that it keeps.
ROUNDS = 10
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
    """Arguments of `eigsh`, with counters; `largest` is the largest ||A v|| / ||v|| so far, a lower bound of ||A||.

    A `given` start is the user's, whose products may stay for long within the span of some eigenvectors.
    """

    view: View
    k: int
    which: str
    start: Tensor
    tol: float
    max_iterations: int | None
    generator: torch.Generator
    kept: int
    stages: Stages
    given: bool = False
    label: str = ""
    largest: float = 0.0
    iterations: int = 0
    most: float = math.inf

    @property
    def least(self) -> int:
        """Number of products from which on eigenvalues from a given start are accepted: ARPACK's default."""
        return min(self.view.total, max(2 * self.k + 1, 20)) if self.given else 0

    def matmat(self, block: Tensor) -> Tensor:
        """Multiply a block, which counts as one iteration; raise `SpentError` beyond the allowed number of products."""
        if self.view.products + block.shape[1] > self.most:
            raise SpentError
        image = self.view.matmat(block)
        norms = self.view.rough_norms(block).clamp(min=torch.finfo(block.dtype).tiny)
        ratios = (self.view.rough_norms(image) / norms).tolist()
        self.largest = max(self.largest, *ratios, 0.0)
        self.iterations += 1
        return image

    def state(self, state: State) -> State:
        """Return a state with the counters."""
        counters = {"largest": self.largest, "iterations": self.iterations, "most": self.most}
        return State({**state.numbers, **counters}, state.blocks)

    def restore(self, state: State) -> State:
        """Set the counters from a state, and return it."""
        self.largest, self.iterations, self.most = (state.numbers[name] for name in ("largest", "iterations", "most"))
        return state


def complete(
    problem: EigenProblem, which: str, values: np.ndarray, vectors: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Add eigenvalues that one start has missed: further copies of multiple ones, and others if the start is given."""
    for search in range(problem.k if problem.k > 1 or problem.given else 0):
        missed = _beyond(problem, which, values, vectors, f"{problem.label}complement {search}, {which}")
        if missed is None:
            break
        values, vectors = np.append(values, missed[0]), np.column_stack([vectors, missed[1]])
        order = np.argsort(values)
        chosen = order[SELECT[which](values[order], problem.k)]
        values, vectors = values[chosen], vectors[:, chosen]
    return values, vectors


def _beyond(
    problem: EigenProblem, which: str, values: np.ndarray, vectors: np.ndarray, stage: str
) -> tuple[float, np.ndarray] | None:
    """Search the complement of the known eigenpairs for one further out, by a separate chain."""
    view, rank = problem.view, RANK[which]
    limit = rank(values).min() + 4 * problem.tol * problem.largest
    steps = max(problem.max_iterations or default_kept(problem.k), problem.least)

    def search(saved: State | None, keep: Keep) -> State:
        found = torch.from_numpy(vectors).to(view.device, view.dtype)
        start = problem.restore(saved) if saved else draw(view, "gaussian", 1, problem.generator)[:, 0]
        chain = Chain(view, start, min(problem.kept, steps), found, problem.largest)
        while True:
            chain.extend(problem.matmat(chain.newest[:, None])[:, 0])
            ritz, rows = chain.ritz()
            index = int(rank(ritz).argmax())
            residual = chain.residuals(rows[:, index : index + 1])[0]
            outside = rank(ritz)[index] > limit
            # Before a chain has resolved the ends, an end far inside the limit is no evidence.
            inside = rank(ritz)[index] + residual <= limit and residual <= SEEN * (ritz[-1] - ritz[0])
            settled = residual <= problem.tol * problem.largest if outside else inside
            if settled or chain.complete or chain.exhausted or chain.products >= steps:
                count = int(outside)
                vector = chain.combined(rows[:, index : index + count])
                return problem.state(State({"values": ritz[index : index + count].tolist()}, {"vectors": vector}))
            _make_room(chain, which, 1, ritz, rows)
            keep(lambda: problem.state(chain.state))

    outcome = problem.restore(problem.stages.stage(stage, search))
    missed: list[float] = outcome.numbers["values"]
    return (missed[0], numbers_in(outcome.blocks["vectors"])[:, 0]) if missed else None


def by_lanczos(problem: EigenProblem) -> tuple[Tensor, Tensor]:
    """Run one chain, restarted in a new direction if it is exhausted before there are k eigenvalues."""
    view, k, select = problem.view, problem.k, SELECT[problem.which]
    steps = max(problem.max_iterations or ROUNDS * problem.kept, problem.least)

    def run(saved: State | None, keep: Keep) -> State:
        chain = Chain(view, problem.restore(saved) if saved else problem.start[:, 0], min(problem.kept, steps))
        while True:
            chain.extend(problem.matmat(chain.newest[:, None])[:, 0])
            last = chain.complete or chain.products >= steps
            ready = len(chain) >= k and (chain.products >= problem.least or chain.full)
            if last or (ready and (chain.exhausted or chain.full or len(chain) % 5 == 0 or len(chain) <= 20)):
                values, vectors = chain.ritz()
                chosen = select(values, k)
                limit = problem.tol * max(abs(values[0]), abs(values[-1]))
                settled = bool(chain.residuals(vectors[:, chosen]).max() <= limit) and len(chosen) == k
                settled = settled and chain.products >= problem.least
                if settled or last:
                    outcome = {"values": values[chosen].tolist(), "complete": chain.complete or not settled}
                    return problem.state(State(outcome, {"vectors": chain.combined(vectors[:, chosen])}))
                _make_room(chain, problem.which, k, values, vectors)
            if chain.exhausted:
                chain.restart(draw(view, "gaussian", 1, problem.generator)[:, 0])
            keep(lambda: problem.state(chain.state))

    outcome = problem.restore(problem.stages.stage(f"{problem.label}chain", run))
    values, vectors = np.array(outcome.numbers["values"]), numbers_in(outcome.blocks["vectors"])
    if outcome.numbers["complete"]:
        return to_device(view, values, vectors)
    return to_device(view, *complete(problem, problem.which, values, vectors))


def _make_room(chain: Chain, which: str, k: int, values: np.ndarray, vectors: np.ndarray) -> None:
    """Shorten a full chain to the Ritz vectors for k eigenvalues at an end, and to half of the others next to them."""
    if chain.full:
        kept = SELECT[which](values, (k + len(values)) // 2)
        chain.shorten(values[kept], vectors[:, kept])


def default_kept(k: int) -> int:
    """Return the number of vectors that "lanczos" keeps by default."""
    return max(100, 20 * k)


def to_device(view: View, values: np.ndarray, vectors: np.ndarray) -> tuple[Tensor, Tensor]:
    """Convert eigenvalues and eigenvectors to the view's dtype and device."""
    kind: dict[str, Any] = {"dtype": view.dtype, "device": view.device}
    return torch.tensor(values, **kind), torch.tensor(vectors, **kind)
