"""Truncated Neumann series of an inverse: gradient descent with a constant step."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from hodiff.estimators.probes import draw
from hodiff.estimators.results import norms_of
from hodiff.estimators.systems.damped_systems import DampedSystem, Increment

POWER_STEPS = 10
DIVERGED = 1e4


def neumann_series(
    product: Callable[[Tensor], Tensor],
    b: Tensor,
    targets: Tensor,
    step_size: float,
    max_terms: int,
    *,
    growth: float = math.inf,
    watch: Callable[[int, Tensor], None] | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Sum $\alpha \sum_j (I - \alpha A)^j b$ until the residual $(I - \alpha A)^j b$ meets the targets.

    Args:
        product: Product with a block.
        b: Right-hand sides, (n, k).
        targets: Norms that residuals must reach, (k,).
        step_size: $\alpha$.
        max_terms: Maximum number of terms.
        growth: Ratio of a residual's norm to the right-hand side's at which the sum ends.
        watch: Called after each term as `watch(terms, norms)`.

    Returns:
        Sum (n, k), and for each column whether its residual has grown beyond the limit.

    Source: Lorraine, Vicol, Duvenaud, "Optimizing millions of hyperparameters by implicit differentiation", AISTATS
    2020, algorithm 3.
    """
    total, residual = torch.zeros_like(b), b
    limit = growth * norms_of(b)
    within = torch.ones_like(limit, dtype=torch.bool)
    for terms in range(1, max_terms + 1):
        total.add_(residual, alpha=step_size)
        residual = torch.sub(residual, product(residual), alpha=step_size)
        norms = norms_of(residual)
        if watch is not None:
            watch(terms, norms)
        if bool((norms <= targets).all()):
            break
        within = norms <= limit  # NaN is not within the limit
        if not bool(within.all()):
            break
    return total, ~within


def safe_step_size(product: Callable[[Tensor], Tensor], vector: Tensor, power_steps: int) -> float:
    r"""Estimate $0.9 / \|A\|$ by power iterations from a vector (n, 1); any step below $2 / \|A\|$ converges."""
    norm = 0.0
    for _ in range(power_steps):
        vector = product(vector / torch.linalg.vector_norm(vector))
        norm = torch.linalg.vector_norm(vector).item()
        if norm == 0:
            return 1.0
    return 0.9 / norm


def increment(system: DampedSystem, residual: Tensor, targets: Tensor) -> Increment:
    """Solve a positive definite system for an increment by the series."""
    if system.step_size is None:
        start = draw(system.view, "gaussian", 1, torch.Generator().manual_seed(0))
        system.step_size = safe_step_size(system.apply, start, POWER_STEPS)
    step, diverged = neumann_series(
        system.apply, residual, targets, system.step_size, system.left, growth=DIVERGED, watch=system.advance
    )
    reason = f"diverged with step_size={system.step_size:.3g}; lower it or raise damping, or use another method"
    return Increment(step, [reason if each else None for each in diverged.tolist()])
