"""One lock for state that threads share and torch does not separate."""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager, nullcontext

import torch

# Threads share torch's level of forward mode: the first thread that leaves the level closes it. Tangents of other
# threads are then lost, attached to nothing, or freed while in use. Threads also share modules and closures, whose
# tensors are replaced during calls. It is a single lock, because a checkpoint needs both, in either order.
_one_thread = threading.RLock()


def one_thread_at_a_time() -> AbstractContextManager[object]:
    """Return a context that only one thread at a time can be in; a thread may enter it repeatedly."""
    if torch.compiler.is_compiling() or _in_engine():
        return nullcontext()
    return _one_thread


def _in_engine() -> bool:
    """Whether this is one of autograd's own threads, as on a GPU: the thread that waits for it may hold the lock."""
    return torch._C._current_graph_task_id() != -1 and isinstance(threading.current_thread(), threading._DummyThread)


def _forget_other_threads() -> None:
    """Replace the lock in a forked process, where the thread that held the lock does not exist."""
    global _one_thread
    _one_thread = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_other_threads)
