"""Warnings of torch about itself, which under ``-W error`` would look like defects of the checked code."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from hodiff.torch_internals.wording import OF_TORCH_ITSELF


@contextmanager
def silence_torch_warnings() -> Iterator[None]:
    """Silence these warnings and no others."""
    with warnings.catch_warnings():
        for each in OF_TORCH_ITSELF:
            warnings.filterwarnings("ignore", message=f".*{each.pattern}")
        yield
