"""What a computation sees of torch's global state, to compute the same again later."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hodiff.torch_internals.interception import active_function_modes


class Surroundings:
    """Random number generators, autocast and `TorchFunctionMode`s, as they are when this is made."""

    def __init__(self, tensors: Iterable[Tensor], generators: Iterable[torch.Generator]):
        devices = {tensor.device for tensor in tensors if tensor.device.type not in {"cpu", "meta"}}
        self._random = [(device, torch.get_device_module(device).get_rng_state(device)) for device in devices]
        self._random_cpu = torch.get_rng_state()
        self._generators = [(generator, generator.get_state()) for generator in generators]
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in sorted({"cpu", *(device.type for device in devices)})
        ]
        self._modes: list[TorchFunctionMode] = list(active_function_modes())

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Return to them for a while; afterwards everything is as it was.

        Yields:
            Nothing.
        """
        active = {id(mode) for mode in active_function_modes()}
        with ExitStack() as stack:
            for mode in self._modes:
                if id(mode) not in active:
                    stack.enter_context(mode)
            for kind, enabled, dtype in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype, enabled=enabled))
            stack.callback(self._set_random, *self._set_random(self._random, self._random_cpu, self._generators))
            yield

    @staticmethod
    def _set_random(
        devices: list[tuple[torch.device, Tensor]], cpu: Tensor, generators: list[tuple[torch.Generator, Tensor]]
    ) -> tuple[list[tuple[torch.device, Tensor]], Tensor, list[tuple[torch.Generator, Tensor]]]:
        """Set the states and return those from before."""
        before = (
            [(device, torch.get_device_module(device).get_rng_state(device)) for device, _ in devices],
            torch.get_rng_state(),
            [(generator, generator.get_state()) for generator, _ in generators],
        )
        for device, state in devices:
            torch.get_device_module(device).set_rng_state(state, device)
        torch.set_rng_state(cpu)
        for generator, state in generators:
            generator.set_state(state)
        return before
