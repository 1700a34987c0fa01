"""Groups of directions that go through a derivative at once: their size, and the loop over them."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from hodiff.common.options import is_int
from hodiff.common.trees import has_strides
from hodiff.torch_internals.interception import EagerDispatchMode, run_operator

# Bytes that the intermediate results of one group of directions may take under chunk_size="auto". On a CPU a group
# that stays near the last-level cache is faster than a larger one (about two times at 256 MiB on a 32 MiB cache); a
# GPU wants enough work to fill it.
MEMORY_BUDGET = {"cpu": 64 * 2**20, "accelerator": 2**30}


class ByteCount(EagerDispatchMode):
    """Mode that counts the bytes of every computed tensor, each of which would have one tangent per direction.

    Attributes:
        bytes: Bytes of results.
        read: Bytes of arguments.
        operations: Number of operator calls.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.read = self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = run_operator(func, args, kwargs)
        self.operations += 1
        if not func.is_view:
            self.read += sum(_bytes(each) for each in args if isinstance(each, Tensor) and has_strides(each))
            for output in result if isinstance(result, (tuple, list)) else (result,):
                # Sparse tensors have no bytes of their own; their parts have been counted.
                if isinstance(output, Tensor) and has_strides(output):
                    self.bytes += _bytes(output)
        return result


class LivePeak(EagerDispatchMode):
    """Mode that measures the memory of the tensors that live at once, of those created inside.

    Attributes:
        bytes: Bytes of storages that live now.
        peak: Most bytes that lived at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = run_operator(func, args, kwargs)
        if not func.is_view:
            for output in result if isinstance(result, (tuple, list)) else (result,):
                if isinstance(output, Tensor) and has_strides(output):
                    self._count(output.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        # A storage has one Python object for its life.
        key, size = id(storage), storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.bytes += size
        self.peak = max(self.peak, self.bytes)

        def free() -> None:
            self.bytes -= size
            self._known.discard(key)

        weakref.finalize(storage, free)


def _bytes(x: Tensor) -> int:
    # Dynamo, which traces with tensors of its own under this mode, has no `nbytes` for them.
    return x.numel() * x.element_size()


def resolve_chunk_size(chunk_size: int | str | None, directions: int, bytes_each: int, device: torch.device) -> int:
    """Return the number of directions in a group, where each takes `bytes_each` of intermediate results."""
    if chunk_size == "auto":
        budget = MEMORY_BUDGET["cpu" if device.type == "cpu" else "accelerator"]
        chunk_size = budget // max(bytes_each, 1)
    elif chunk_size is None:
        chunk_size = directions
    assert is_int(chunk_size)
    return max(1, min(chunk_size, directions))


def spans(size: int, chunk_size: int) -> Iterator[tuple[int, int]]:
    """Yield the groups `(start, stop)` that cover `range(size)`, of nearly equal length."""
    groups = -(-size // chunk_size)
    for group in range(groups):
        yield group * size // groups, (group + 1) * size // groups


T = TypeVar("T")
R = TypeVar("R")


def in_threads(run: Callable[[T], R], groups: Sequence[T], threads: int) -> Iterator[R]:
    """Yield `run(group)` in order, with several groups at once, each in a thread that torch uses alone.

    Args:
        run: Computes one group; gradients are not recorded.
        groups: The groups.
        threads: Number of groups at once; with 1, the calling thread runs them.

    Yields:
        The results.
    """
    threads = min(threads, len(groups))
    if threads < 2:
        yield from map(run, groups)
        return
    # The number for the calling thread is also the number for threads that do not exist yet.
    before = torch.get_num_threads()
    pool = ThreadPoolExecutor(threads, "hodiff", _alone_without_gradients)
    waiting: deque[Future[R]] = deque()
    try:
        for group in groups:
            if len(waiting) > threads:  # one more than runs, so that no thread waits for the caller
                yield waiting.popleft().result()
            waiting.append(pool.submit(run, group))
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(before)


def _alone_without_gradients() -> None:
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
