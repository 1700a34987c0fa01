"""Division of a work among ranks."""

from __future__ import annotations

from collections.abc import Sequence


def least_loaded(costs: Sequence[float], ranks: int, fixed: Sequence[int | None] = ()) -> list[int]:
    """Assign parts of a work to ranks, the largest first, to the rank with the least work.

    Args:
        costs: Cost of each part.
        ranks: Number of ranks.
        fixed: Ranks that parts already have; None for others.

    Returns:
        The rank of each part.
    """
    owners: list[int | None] = list(fixed) or [None] * len(costs)
    work = [sum(cost for cost, owner in zip(costs, owners, strict=True) if owner == rank) for rank in range(ranks)]
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        if owners[i] is None:
            owners[i] = least = work.index(min(work))
            work[least] += costs[i]
    return [0 if each is None else each for each in owners]
