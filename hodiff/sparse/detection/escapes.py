"""Refusal of functions that take the numbers of a tensor out of torch, where they cannot be followed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from hodiff.derivatives.capture.origin import line_now
from hodiff.errors import InputError
from hodiff.sparse.detection.tracking import Tracking

_EXITS = {Tensor.numpy, Tensor.tolist, Tensor.__array__, Tensor.data_ptr, Tensor.__dlpack__}
# These read the numbers of tensors in a list.
_READERS = {torch.tensor, torch.as_tensor}


class Escapes(TorchFunctionMode):
    """Mode that refuses such functions for tensors that depend on the inputs."""

    def __init__(self, mode: Tracking) -> None:
        super().__init__()
        self._mode = mode

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._mode.paused:
            return func(*args, **kwargs or {})
        if (func in _EXITS and self._mode.memory.depends(args[0])) or (func in _READERS and self._reads(args[0])):
            line = line_now()
            name = f"torch.{func.__name__} of numbers" if func in _READERS else f"Tensor.{func.__name__}"
            raise InputError(
                f"{self._mode.caller}: f: expected torch's operators on what depends on x, got {name}"
                f"{f' ({line})' if line else ''}, after which nothing can be followed; write that part with torch, or "
                f"pass pattern= by hand."
            )
        return func(*args, **kwargs or {})

    def _reads(self, data: Any) -> bool:
        if isinstance(data, Tensor):  # a tensor is copied by an operator
            return False
        return any(isinstance(x, Tensor) and self._mode.memory.depends(x) for x in tree_leaves(data))
