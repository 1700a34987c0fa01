"""Solution of exercise 30: the parameters are arguments, in the order of their names."""

from __future__ import annotations

from typing import Any

import torch
from lesson_tools import lesson
from torch import Tensor, nn


def checkpoint_module(module: nn.Module, x: Tensor) -> Tensor:
    """Apply the module to x, keeping only x and the parameters."""
    names, parameters = zip(*module.named_parameters(), strict=True)

    def run(x: Tensor, *parameters: Tensor) -> Tensor:
        return torch.func.functional_call(module, dict(zip(names, parameters, strict=True)), (x,))

    Checkpoint: Any = lesson(30).Checkpoint
    return Checkpoint.apply(run, x, *parameters)
