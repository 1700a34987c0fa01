"""Execution of plans for mixed derivatives: directions of the lines, and sums of coefficients along the lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hodiff.taylor.differential.operand import Operand, groups
from hodiff.taylor.differential.polarization import Plan
from hodiff.taylor.jets import tensor_of


def directions(operand: Operand, plan: Plan, numbers: Sequence[int], chunk_size: int | None) -> Iterator[list[Tensor]]:
    """Yield the lines of a plan as groups of directions; `numbers` maps the plan's names to coordinates."""
    for start, stop in groups(len(plan.lines), chunk_size):
        lines = plan.lines[start:stop]
        at = torch.tensor([i for i, line in enumerate(lines) for _ in line], dtype=torch.long, device="cpu")
        to = torch.tensor([numbers[name] for line in lines for name, _ in line], dtype=torch.long, device="cpu")
        parts = torch.tensor([part for line in lines for _, part in line], dtype=torch.float64, device="cpu")
        # Two names may refer to the same coordinate.
        rows = torch.zeros(stop - start, operand.size, dtype=torch.float64, device="cpu").index_put(
            (at, to), parts, accumulate=True
        )
        yield operand.spread(rows)


def combined(terms: Sequence[Sequence[tuple[int, float]]], coefficients: Any) -> Any:
    """Sum coefficients along lines (R, ...) with the factors of the terms: a product with a sparse matrix."""
    like = tensor_of(coefficients)
    flat = [(i, number, factor) for i, own in enumerate(terms) for number, factor in own]
    rows, lines, factors = zip(*flat, strict=True) if flat else ((), (), ())
    at = torch.tensor(lines, dtype=torch.long, device=like.device)
    to = torch.tensor(rows, dtype=torch.long, device=like.device)
    weights = torch.tensor(factors, dtype=torch.float64, device="cpu").to(like.device, like.dtype)
    picked = torch.index_select(coefficients, 0, at) * weights.reshape(-1, *[1] * (like.ndim - 1))
    zero = torch.zeros(len(terms), *like.shape[1:], dtype=like.dtype, device=like.device)
    return torch.index_add(zero, 0, to, picked)
