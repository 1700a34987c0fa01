"""Sums over the ranks of a process group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hodiff.errors import InputError
from hodiff.operators.data.batches import Size


def require_group(caller: str, argument: str, process_group: Any) -> None:
    """Raise if a process group is unusable, or `torch.distributed` is not available or not initialised."""
    if process_group is None:
        return
    if not dist.is_available() or not dist.is_initialized():
        raise InputError(
            f"{caller}: {argument}: expected a process group of an initialised torch.distributed, got "
            f"{process_group!r}; "
            "call torch.distributed.init_process_group first, and pass torch.distributed.group.WORLD."
        )
    if dist.get_rank(process_group) < 0:
        raise InputError(
            f"{caller}: {argument}: expected a group that this process belongs to, got {process_group!r}; "
            "create the operator only on ranks of the group."
        )


def size_of(process_group: Any) -> int:
    """Return the number of ranks of a group; 1 for None."""
    return 1 if process_group is None else dist.get_world_size(process_group)


def rank_in(process_group: Any) -> int:
    """Return this process's rank in a group; 0 for None."""
    return 0 if process_group is None else dist.get_rank(process_group)


def sum_over_ranks(total: Tensor, size: Size, process_group: Any) -> tuple[Tensor, Size]:
    """Add up products and sizes of all ranks."""
    if process_group is None:
        return total, size
    total = total.contiguous()
    sizes = torch.tensor([size.divisor, size.factors], dtype=torch.float64, device=total.device)
    dist.all_reduce(total, group=process_group)
    dist.all_reduce(sizes, group=process_group)
    return total, Size(*sizes.tolist())
