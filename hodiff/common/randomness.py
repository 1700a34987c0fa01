"""One draw of random numbers for a function that is evaluated several times."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class Replay:
    """The state of the random number generators, to return to before each evaluation.

    `torch.compile` cannot trace generator states; there nothing is replayed, and a random operation under a
    `torch.func.vmap` raises as usual.
    """

    def __init__(self, tensors: Iterable[Tensor]):
        self._states: list[tuple[torch.device, Tensor]] = []
        if torch.compiler.is_compiling():
            return
        devices = {tensor.device for tensor in tensors if tensor.device.type != "cpu"}
        self._states = [(device, torch.get_device_module(device).get_rng_state(device)) for device in devices]
        self._states.append((torch.device("cpu"), torch.get_rng_state()))

    def rewind(self) -> None:
        """Put every generator back to where it was."""
        for device, state in self._states:
            if device.type == "cpu":
                torch.set_rng_state(state)
            else:
                torch.get_device_module(device).set_rng_state(state, device)
