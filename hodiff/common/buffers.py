"""Modules' buffers that a run may change, and that are as they were afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from hodiff.torch_internals.modules import buffers_by_name
from hodiff.torch_internals.threads import one_thread_at_a_time

# The dict of a module's buffers, a name in it, and the tensor to put there.
Replacement = tuple[dict[str, Any], str, Tensor]


@contextmanager
def exchanged_buffers(replacements: Sequence[Replacement]) -> Iterator[None]:
    """Let modules have other buffers for a while; nothing is written into their own, which graphs may have saved."""
    if not replacements:
        yield
        return
    with one_thread_at_a_time():
        held = [owner[name] for owner, name, _ in replacements]
        try:
            for owner, name, tensor in replacements:
                owner[name] = tensor
            yield
        finally:
            for (owner, name, _), tensor in zip(replacements, held, strict=True):
                owner[name] = tensor


@contextmanager
def untouched_buffers(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Let modules in training mode update copies of their buffers for a while."""
    # A frozen script has no modes any more.
    owners = [buffers_by_name(module) for module in modules if getattr(module, "training", False)]
    if not any(owners):
        yield
        return
    with one_thread_at_a_time():  # else the copies may be those of another thread
        copies = [
            (owner, name, buffer.clone())
            for owner in owners
            for name, buffer in owner.items()
            if isinstance(buffer, Tensor)
        ]
        with exchanged_buffers(copies):
            yield
