"""The key-value store of `torch.distributed`, and tensors that are shards of others."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor


def default_store() -> Any:
    """Return the store by which the ranks of the default process group found each other."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def number_of_ranks() -> int:
    """Return the number of ranks of the default process group; 1 without one."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return 1
    return torch.distributed.get_world_size()


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor over more than one rank; the module of DTensors need not be loaded."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor) and tensor.device_mesh.size() > 1
