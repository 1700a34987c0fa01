"""The parts of torch's global state that a computation reads, saved to repeat the computation."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hodiff.common.randomness import RandomState, accelerators
from hodiff.torch_internals.interception import active_function_modes, in_function_modes


class Surroundings:
    """Random number generators, autocast and `TorchFunctionMode`s at the time of construction."""

    def __init__(self, tensors: Collection[Tensor], generators: Iterable[Any] = ()):
        self._random = RandomState(tensors, generators)
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in sorted({"cpu", *(device.type for device in accelerators(tensors))})
        ]
        self._modes: list[TorchFunctionMode] = list(active_function_modes())

    def modes_restored(self) -> AbstractContextManager[None]:
        """Restore only the modes, because torch leaves them when it calls a Function inside of a transform."""
        return in_function_modes(self._modes)

    def rewind(self) -> None:
        """Restore the random number generators."""
        self._random.rewind()

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the state within the context."""
        with ExitStack() as stack:
            stack.enter_context(self.modes_restored())
            for kind, enabled, dtype in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype, enabled=enabled))
            stack.enter_context(self._random.replayed())
            yield


def settings(tensors: Collection[Tensor]) -> tuple[Any, ...]:
    """Return the global settings that affect a computation: default dtype, autocast, modes."""
    kinds = sorted({"cpu", *(device.type for device in accelerators(tensors))})
    return (
        torch.get_default_dtype(),
        *((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds),
        *map(type, active_function_modes()),
    )
