"""What calls at infinite and empty arguments must not leave behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook


@contextmanager
def buffers_put_back() -> Iterator[None]:
    """Put back the buffers of every module that is called, however it is reached: running statistics become NaN.

    The first call of each module within has to be outside of transforms.
    """
    before: dict[nn.Module, list[tuple[Tensor, Tensor]]] = {}

    def note(module: nn.Module, args: Any) -> None:
        del args
        if module not in before:
            buffers = list(module.buffers(recurse=False))
            before[module] = [(buffer, buffer.detach().clone()) for buffer in buffers]

    handle = register_module_forward_pre_hook(note)
    try:
        yield
    finally:
        handle.remove()
        with torch.no_grad():
            for pairs in before.values():
                for buffer, value in pairs:
                    buffer.copy_(value)
