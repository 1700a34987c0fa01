"""Grouping of parameters for multi-tensor operators, because calls cost more than small tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

# For a tensor of this size the call takes little of the time, and joint temporaries need much memory.
_LARGE = 2**16

Pair = tuple[Tensor, Tensor]


def together(group: dict[str, Any], pairs: Sequence[Pair]) -> list[list[Pair]]:
    """Group parameters and gradients by dtype and device; parameters that step alone have lists of their own."""
    wanted = group.get("foreach")
    lists: dict[Any, list[Pair]] = {}
    for pair in pairs:
        parameter = pair[0]
        plain = type(parameter) in {Tensor, nn.Parameter} and not isinstance(group["lr"], Tensor)
        joins = plain and wanted is not False and (wanted or parameter.numel() < _LARGE)
        lists.setdefault((parameter.dtype, parameter.device) if joins else id(parameter), []).append(pair)
    return list(lists.values())


def zeros_of_each(states: Sequence[dict[str, Any]], name: str, like: Sequence[Tensor]) -> list[Tensor]:
    """Return an entry of each state, initialized by zeros like the tensor."""
    for state, tensor in zip(states, like, strict=True):
        if name not in state:
            state[name] = torch.zeros_like(tensor)
    return [state[name] for state in states]
