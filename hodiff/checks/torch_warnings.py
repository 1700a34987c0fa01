"""Warnings of torch about itself, which under ``-W error`` would look like defects of the checked code."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_OF_TORCH = (
    # Operators without a batching rule fall back to a loop, which is slow but right.
    ".*performance drop",
    # The same fall back writes into an output of another shape.
    "An output with one or more elements was resized",
    # Forward-mode rules of torch are loaded by torch.jit.script on first use.
    ".*torch.jit.script",
    # torch.compile makes an instance of a custom Function while it traces.
    ".*should not be instantiated",
)


@contextmanager
def silence_torch_warnings() -> Iterator[None]:
    """Silence these warnings and no others."""
    with warnings.catch_warnings():
        for message in _OF_TORCH:
            warnings.filterwarnings("ignore", message=message)
        yield
