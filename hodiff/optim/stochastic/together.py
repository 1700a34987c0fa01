"""Which parameters take a step together, by operators on many tensors, as calls cost more than small tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

# Of so many numbers a call is little of the time, and what is computed for all at once much of the memory.
_LARGE = 2**16

Pair = tuple[Tensor, Tensor]


def together(group: dict[str, Any], pairs: Sequence[Pair]) -> list[list[Pair]]:
    """Parameters of a group with their gradients, in lists of one dtype and device, or alone."""
    wanted = group.get("foreach")
    lists: dict[Any, list[Pair]] = {}
    for pair in pairs:
        parameter = pair[0]
        plain = type(parameter) in {Tensor, nn.Parameter} and not isinstance(group["lr"], Tensor)
        joins = plain and wanted is not False and (wanted or parameter.numel() < _LARGE)
        lists.setdefault((parameter.dtype, parameter.device) if joins else id(parameter), []).append(pair)
    return list(lists.values())


def zeros_of_each(states: Sequence[dict[str, Any]], name: str, parameters: Sequence[Tensor]) -> list[Tensor]:
    """An entry of each state, zeros like its parameter where there is none yet."""
    for state, parameter in zip(states, parameters, strict=True):
        if name not in state:
            state[name] = torch.zeros_like(parameter)
    return [state[name] for state in states]
