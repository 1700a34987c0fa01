"""Tensors with a row for each problem that still runs, and the results of problems that ended."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

# Status of a problem that still runs; other numbers index a table of ends.
RUNNING = -100

Written = dict[str, Tensor]


@dataclass
class Rows:
    """Tensors whose first dimension is that of the problems."""

    def retain(self, keep: Tensor) -> None:
        """Drop the rows of problems that are not in the mask `keep`."""
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, Tensor):
                setattr(self, each.name, value[keep])
            elif hasattr(value, "retain"):
                value.retain(keep)


def chosen(mask: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """Select the rows of `one` where the mask is true, and of `other` elsewhere."""
    return torch.where(mask.reshape(-1, *(1,) * (one.dim() - 1)), one, other)


def inner(one: Tensor, other: Tensor) -> Tensor:
    """Compute the inner products of the rows of (b, n) and (b, n)."""
    return (one * other).sum(-1)


def length(rows: Tensor) -> Tensor:
    """Compute the norms of rows."""
    return torch.linalg.vector_norm(rows, dim=-1)


def times(matrices: Tensor, rows: Tensor) -> Tensor:
    """Multiply matrices (b, m, n) with the rows of (b, n)."""
    return (matrices @ rows[..., None])[..., 0]


class Ledger:
    """Results of problems that ended: for each name a tensor with a row for every problem."""

    def __init__(self, count: int):
        self._count = count
        self.columns: dict[str, Tensor] = {}

    def write(self, problems: Tensor, **rows: Tensor) -> None:
        """Record the rows of some problems."""
        for name, each in rows.items():
            if name not in self.columns:
                self.columns[name] = each.new_zeros(self._count, *each.shape[1:])
            self.columns[name][problems] = each
