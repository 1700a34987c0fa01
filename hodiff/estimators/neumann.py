"""The Neumann series of an inverse, truncated: gradient descent with a constant step."""

from __future__ import annotations

import torch
from torch import Tensor

from hodiff.estimators.probes import draw, generator_or_default
from hodiff.estimators.systems import Correction, System, norms_of

POWER_STEPS = 10
DIVERGED = 1e4


def correct(system: System, residual: Tensor, targets: Tensor) -> Correction:
    r"""Sum $\alpha \sum_j (I - \alpha A)^j r$ until what is left, $(I - \alpha A)^j r$, meets the targets.

    Args:
        system: The system, positive definite.
        residual: What the correction is to remove, (n, k).
        targets: Norms to which the columns are to be reduced.

    Returns:
        The correction.

    Source: Lorraine, Vicol, Duvenaud, "Optimizing millions of hyperparameters by implicit differentiation", AISTATS
    2020, algorithm 3.
    """
    if system.step_size is None:
        system.step_size = _safe_step(system)
    step = torch.zeros_like(residual)
    term = residual.clone()
    limit = DIVERGED * norms_of(residual)
    reasons: list[str | None] = [None] * residual.shape[1]
    for iteration in range(1, system.left + 1):
        step += system.step_size * term
        term = term - system.step_size * system.apply(term)
        norms = norms_of(term)
        system.advance_to(iteration)
        system.report(norms)
        if bool((norms > limit).any()):
            reason = f"diverged with step_size={system.step_size:.3g}; lower it or raise damping, or use another method"
            reasons = [reason if grown else None for grown in (norms > limit).tolist()]
            break
        if bool((norms <= targets).all()):
            break
    return Correction(step, reasons)


def _safe_step(system: System) -> float:
    r"""Nearly $1 / \|A + \lambda I\|$, by a few power iterations; any step below twice that converges."""
    vector = draw(system.view, "gaussian", 1, generator_or_default(None))
    norm = 0.0
    for _ in range(POWER_STEPS):
        vector = vector / torch.linalg.vector_norm(vector)
        vector = system.apply(vector)
        norm = torch.linalg.vector_norm(vector).item()
        if norm == 0:
            return 1.0
    return 0.9 / norm
