"""Tensors with a row for each problem that still runs, and what is written down of those that ended."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

# The end of a problem that still runs; those of others are numbers of tables of ends.
RUNNING = -100

Written = dict[str, Tensor]


@dataclass
class Rows:
    """Tensors whose first dimension is that of the problems."""

    def retain(self, keep: Tensor) -> None:
        """Forget the rows of the other problems."""
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, Tensor):
                setattr(self, each.name, value[keep])
            elif hasattr(value, "retain"):
                value.retain(keep)


def chosen(mask: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """One's rows where the mask says so, else the other's."""
    return torch.where(mask.reshape(-1, *(1,) * (one.dim() - 1)), one, other)


def inner(one: Tensor, other: Tensor) -> Tensor:
    """Row by row, the inner product of (b, n) and (b, n)."""
    return (one * other).sum(-1)


def length(rows: Tensor) -> Tensor:
    """Row by row, the norm."""
    return torch.linalg.vector_norm(rows, dim=-1)


def times(matrices: Tensor, rows: Tensor) -> Tensor:
    """Row by row, the product of (b, m, n) and (b, n)."""
    return (matrices @ rows[..., None])[..., 0]


class Ledger:
    """What is known of problems that ended: for each name a tensor with a row for every problem."""

    def __init__(self, count: int):
        self._count = count
        self.columns: dict[str, Tensor] = {}

    def write(self, problems: Tensor, **rows: Tensor) -> None:
        """Enter the rows of these problems."""
        for name, each in rows.items():
            if name not in self.columns:
                self.columns[name] = each.new_zeros(self._count, *each.shape[1:])
            self.columns[name][problems] = each
