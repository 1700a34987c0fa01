"""Random numbers of an inner loop that come from a generator instead of torch's global state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def seeded(generator: torch.Generator, tensors: Iterable[Tensor]) -> Iterator[None]:
    """Seed torch's global state from the generator for a while; afterwards it is as it was.

    Args:
        generator: The generator.
        tensors: Tensors on the devices that random numbers are drawn on.

    Yields:
        Nothing.
    """
    seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
    devices = {tensor.device for tensor in tensors if tensor.device.type != "cpu"}
    kind = next(iter(devices)).type if devices else "cuda"
    indices = [device.index or 0 for device in devices]
    with torch.random.fork_rng(indices, device_type=kind):
        torch.manual_seed(seed)
        yield
