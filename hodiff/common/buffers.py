"""Modules' buffers that a run may change, and that are as they were afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor, nn

from hodiff.torch_internals.modules import buffers_by_name

# The dict of a module's buffers, a name in it, and the tensor to put there.
Replacement = tuple[dict[str, Any], str, Tensor]


@contextmanager
def exchanged_buffers(replacements: Sequence[Replacement]) -> Iterator[None]:
    """Let modules have other buffers for a while; nothing is written into their own, which graphs may have saved."""
    held = [owner[name] for owner, name, _ in replacements]
    try:
        for owner, name, tensor in replacements:
            owner[name] = tensor
        yield
    finally:
        for (owner, name, _), tensor in zip(replacements, held, strict=True):
            owner[name] = tensor


def untouched_buffers(modules: Iterable[nn.Module]) -> AbstractContextManager[None]:
    """Let modules in training mode update copies of their buffers for a while."""
    return exchanged_buffers([
        (buffers_by_name(module), name, buffer.clone())
        for module in modules
        if module.training
        for name, buffer in buffers_by_name(module).items()
        if isinstance(buffer, Tensor)
    ])
