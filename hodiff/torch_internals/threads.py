"""One lock for what threads share and torch does not keep apart."""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager, nullcontext

import torch

# Threads share torch's level of forward mode: the first that leaves it closes it, so that the tangents of the others
# are lost, attached to nothing, or freed while in use. They share modules and closures, too, in which tensors are
# exchanged for the time of a call. It is one lock, as a pass through a checkpoint needs both, in either order.
_one_thread = threading.RLock()


def one_thread_at_a_time() -> AbstractContextManager[object]:
    """A context that other threads wait for, wherever they enter one; a thread may enter many."""
    if torch.compiler.is_compiling() or _in_engine():
        return nullcontext()
    return _one_thread


def _in_engine() -> bool:
    """Whether this thread is one of autograd's own, as on a GPU: the thread that waits for it may hold the lock."""
    return torch._C._current_graph_task_id() != -1 and isinstance(threading.current_thread(), threading._DummyThread)


def _forget_other_threads() -> None:
    """In a forked process, where the thread that held the lock does not exist."""
    global _one_thread
    _one_thread = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_other_threads)
