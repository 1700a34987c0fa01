"""States of random number generators: saved, replayed, and seeded within a context."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hodiff.torch_internals.autograd.transforms import in_transform, outside_transforms

# Functions that read and set a generator's state, and the saved state.
_Kept = tuple[Callable[[], Any], Callable[[Any], object], Any]


class RandomState:
    """Saved states of torch's generators, on the CPU and on the tensors' devices, and of other generators.

    `torch.compile` cannot trace generator states: compiled code saves none, and a random operation under
    `torch.func.vmap` raises as usual.

    Args:
        tensors: Tensors that determine the devices.
        generators: Generators of torch, NumPy and Python.
        foreign: Whether the default generators of NumPy and Python are saved, too, which takes longer.
    """

    def __init__(self, tensors: Iterable[Tensor], generators: Iterable[Any] = (), *, foreign: bool = False):
        self._kept: list[_Kept] = []
        if torch.compiler.is_compiling():
            return
        self._keep(torch.get_rng_state, torch.set_rng_state)
        for device in accelerators(tensors):
            module = torch.get_device_module(device)
            self._keep(partial(module.get_rng_state, device), partial(module.set_rng_state, device=device))
        for generator in generators:
            self._keep(*_access(generator))
        if foreign:
            self._keep(random.getstate, random.setstate)
            # NumPy's default generator is unused if its module is not loaded.
            if "numpy.random" in sys.modules:
                self._keep(np.random.get_state, np.random.set_state)

    def _keep(self, get: Callable[[], Any], put: Callable[[Any], object]) -> None:
        self._kept.append((get, put, get()))

    @property
    def advanced(self) -> bool:
        """Whether torch's generators have advanced since."""
        return any(not torch.equal(get(), state) for get, _, state in self._kept if isinstance(state, Tensor))

    def rewind(self) -> None:
        """Reset every generator to its saved state."""
        for _, put, state in self._kept:
            put(state)

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Reset every generator within the context; afterwards restore the present states."""
        now = [(put, get()) for get, put, _ in self._kept]
        self.rewind()
        try:
            yield
        finally:
            for put, state in now:
                put(state)


def is_generator(value: Any) -> bool:
    """Whether an object draws random numbers: a generator of torch, NumPy or Python."""
    return isinstance(value, (torch.Generator, random.Random)) or type(value).__module__ in {
        "numpy.random._generator",
        "numpy.random.mtrand",
    }


def _access(generator: Any) -> tuple[Callable[[], Any], Callable[[Any], object]]:
    """Return functions that read and set a generator's state."""
    if isinstance(generator, random.Random):
        return generator.getstate, generator.setstate
    if hasattr(generator, "bit_generator"):
        return lambda: generator.bit_generator.state, lambda state: setattr(generator.bit_generator, "state", state)
    return generator.get_state, generator.set_state


@contextmanager
def seeded(seed: int, tensors: Iterable[Tensor] = ()) -> Iterator[None]:
    """Seed torch's generators within the context; afterwards restore the states on the CPU and the tensors' devices."""
    devices = accelerators(tensors)
    kind = devices[0].type if devices else "cuda"
    with torch.random.fork_rng([device.index or 0 for device in devices], device_type=kind):
        seed_everywhere(seed)
        yield


def seed_everywhere(seed: int) -> None:
    """Seed all generators; without accelerators, faster than `torch.manual_seed`, which records its caller."""
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def drawn_seed(generator: torch.Generator, limit: int = 2**62) -> int:
    """Draw a seed below a limit from a generator, also inside `torch.func.vmap`, which would refuse or batch it."""
    with outside_transforms() if in_transform() else nullcontext():
        return int(torch.randint(limit, (), generator=generator, device=generator.device))


def accelerators(tensors: Iterable[Tensor]) -> list[torch.device]:
    """Return the tensors' devices that have generators of their own."""
    return list({tensor.device for tensor in tensors if tensor.device.type not in {"cpu", "meta"}})
