"""Refuse what takes the numbers of a tensor out of torch, where nothing can follow them."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from hodiff.derivatives.capture.origin import line_now
from hodiff.errors import InputError
from hodiff.sparse.detection.memory import Memory

_EXITS = {Tensor.numpy, Tensor.tolist, Tensor.__array__, Tensor.data_ptr, Tensor.__dlpack__}


class Escapes(TorchFunctionMode):
    """Refuses the exits to tensors that depend on the inputs."""

    def __init__(self, caller: str, memory: Memory) -> None:
        super().__init__()
        self._caller = caller
        self._memory = memory

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _EXITS and self._memory.depends(args[0]):
            line = line_now()
            raise InputError(
                f"{self._caller}: f: expected torch's operators on what depends on x, got Tensor.{func.__name__}"
                f"{f' ({line})' if line else ''}, after which nothing can be followed; write that part with torch, or "
                f"pass pattern= by hand."
            )
        return func(*args, **kwargs or {})
