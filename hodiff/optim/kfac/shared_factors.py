"""Factors of the mean loss of several ranks, and the ranks that decompose them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from hodiff.distributed.owners import least_loaded
from hodiff.optim.kfac.seen_layers import Sums
from hodiff.optim.ranks import Ranks


def sums_of_ranks(blocks: Sequence[Sums], ranks: Ranks, *, joint: bool = False) -> list[Sums]:
    """Return the sums over the examples of all ranks; vectors remain those of this rank.

    Args:
        blocks: Sums over this rank's examples.
        ranks: The ranks.
        joint: Whether gradients are those of the mean loss of all ranks already.

    Returns:
        The sums, for the mean loss.
    """
    rows = torch.contiguous_format  # equal strides on all ranks, with which later products round equally
    inputs = [None if each.inputs is None else each.inputs.clone(memory_format=rows) for each in blocks]
    gradients = [each.gradients.clone(memory_format=rows) for each in blocks]
    counts = torch.tensor([each.count for each in blocks], device=gradients[0].device)
    ranks.sum_([counts, *gradients, *(each for each in inputs if each is not None)])
    # The mean loss divides the gradients of each rank's examples by the number of ranks.
    losses = 1 if joint else ranks.size
    return [
        replace(
            own,
            inputs=a,
            count=1 if a is None else count,
            gradients=g / losses,
            vectors=tuple((x, y * losses**-0.5) for x, y in own.vectors),
        )
        for own, a, count, g in zip(blocks, inputs, counts.tolist(), gradients, strict=True)
    ]


def owners_of(states: Sequence[Mapping[str, Any]], ranks: int) -> list[int]:
    """Assign each block to a rank, by the work of its inverses."""
    costs = [sum(float(each.shape[-1]) ** 3 for each in (state["A"], state["B"])) for state in states]
    return least_loaded(costs, ranks)
