"""Buffers of modules, such as running statistics, that a check must leave as they were."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook


@contextmanager
def buffers_put_back(*known: nn.Module) -> Iterator[None]:
    """Put back the buffers of some modules, and of every other one that is called, however it is reached.

    The first call of each module that is not known has to be outside of transforms.
    """
    before: dict[nn.Module, list[tuple[Tensor, Tensor]]] = {}

    def note(module: nn.Module, args: Any = ()) -> None:
        del args
        if module not in before:
            buffers = list(module.buffers(recurse=False))
            before[module] = [(buffer, buffer.detach().clone()) for buffer in buffers]

    for module in known:
        module.apply(note)
    handle = register_module_forward_pre_hook(note)
    try:
        yield
    finally:
        handle.remove()
        with torch.no_grad():
            for pairs in before.values():
                for buffer, value in pairs:
                    buffer.copy_(value)
