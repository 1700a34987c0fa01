"""Ranks of a process group whose losses an optimizer averages: means of tensors, and numbers and errors of all ranks.

Marks of tensors, by which ranks recognise that their tensors differ.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from hodiff.common.complex_numbers import as_real
from hodiff.distributed.exchanges import exchanging
from hodiff.errors import InputError
from hodiff.operators.data.distributed import rank_in, require_group, size_of
from hodiff.torch_internals.process_groups import default_store, is_sharded, number_of_ranks

R = TypeVar("R")

# Value of `process_group` for a model that each rank trains on its own.
LOCAL = "local"
# Number of elements that are sent together, which bounds the temporary memory.
_BUCKET = 2**24
# Number of elements below which tensors are joined to compute their mark.
_SMALL = 2**16
# Number of random weights of a mark.
_WEIGHTS = 2**12


class Ranks:
    """The ranks of a process group; a single rank if the group is None.

    Attributes:
        size: Number of ranks.
        rank: This process's rank in the group.
        watched: Whether the user named no group, so that other ranks may train the same model without its knowledge.
    """

    def __init__(self, caller: str, process_group: Any = LOCAL):
        self.watched = process_group is None
        self.group = None if isinstance(process_group, str) and process_group == LOCAL else process_group
        if self.group is not None:
            _require_type(caller, self.group)
            require_group(caller, "process_group", self.group)
        self.size, self.rank = size_of(self.group), rank_in(self.group)

    def attempt(self, work: Callable[..., R], *args: Any) -> tuple[R | None, Exception | None]:
        """Do this rank's part; return its result, or the error that `exchange` announces to the other ranks."""
        # An error that is raised again from a variable would keep the frame, and the graph in it, alive.
        return (work(*args), None) if self.size == 1 else attempted(work, *args)

    def exchange(self, caller: str, error: Exception | None, numbers: Sequence[float], device: torch.device) -> Tensor:
        """Return the numbers of all ranks, (ranks, len(numbers)); raise if a rank has an error."""
        own = torch.tensor([float(error is not None), *numbers], dtype=torch.float64, device=device)
        rows = [torch.empty_like(own) for _ in range(self.size)]
        with exchanging("exchanging losses and errors"):
            dist.all_gather(rows, own, group=self.group)
        if error is not None:
            raise error
        found = torch.stack(rows).cpu()
        failed = found[:, 0].nonzero().flatten().tolist()
        if failed:
            raise InputError(
                f"{caller}: step: expected every rank to compute its part, got an error on rank {failed[0]}; see the "
                "error message there. Parameters have not changed."
            )
        return found[:, 1:]

    def gather(self, number: int, device: torch.device) -> list[int]:
        """Return a number of each rank."""
        if self.size == 1:
            return [number]
        return [int(each) for each in self.exchange("", None, [number], device)[:, 0].tolist()]

    def sum_(self, tensors: Iterable[Tensor]) -> None:
        """Replace tensors by their sums over the ranks."""
        if self.size == 1:
            return
        for bucket in _buckets(tensors):
            # A conjugate view would be copied, and its sum lost.
            flat = torch.cat([each.reshape(-1) for each in bucket]).resolve_conj()
            with exchanging("adding up the numbers of ranks"):
                dist.all_reduce(as_real(flat), group=self.group)
            for tensor, part in zip(bucket, flat.split([each.numel() for each in bucket]), strict=True):
                tensor.copy_(part.view(tensor.shape))

    def mean_(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by their means over the ranks."""
        if self.size == 1:
            return
        self.sum_(tensors)
        for tensor in tensors:
            tensor.div_(self.size)

    def __deepcopy__(self, memo: Any) -> Ranks:
        return self

    def __reduce__(self) -> Any:
        if self.group is not None:
            raise InputError(
                "pickle: process_group: expected an optimizer without one, got an optimizer over "
                f"{self.size} ranks; save optimizer.state_dict() instead."
            )
        return Ranks, ("", None if self.watched else LOCAL)


ALONE = Ranks("")


def attempted(work: Callable[..., R], *args: Any) -> tuple[R | None, Exception | None]:
    """Run this rank's part of a work; return its result, or its error."""
    try:
        return work(*args), None
    except Exception as error:
        return None, error


def mark_of(tensors: Sequence[Tensor]) -> float:
    """Return a sum of all elements with random weights, by which two ranks recognise equal tensors."""
    kinds: dict[Any, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        flat = as_real(tensor.detach()).reshape(-1)
        # A call costs more than the copy of a small tensor.
        kinds[(flat.dtype, flat.device) if flat.numel() < _SMALL else id(tensor)].append(flat)
    joined = [each[0] if len(each) == 1 else torch.cat(each) for each in kinds.values()]
    sums = [_weighted_sum(each).double() for each in joined if each.numel()]
    return float(_weighted_sum(torch.stack([each.to(sums[0].device) for each in sums]))) if sums else 0.0


def norm_of_all(tensors: Sequence[Tensor]) -> float:
    """Return the norm of all elements."""
    parts = [as_real(each.detach()) for each in tensors]
    norms = [torch.linalg.vector_norm(each, dtype=_wide(each)).double() for each in parts]
    return float(torch.linalg.vector_norm(torch.stack([each.to(norms[0].device) for each in norms]))) if norms else 0.0


def differ(rows: Tensor) -> bool:
    """Whether the numbers of any rank differ from those of the first; NaN differs from everything."""
    return not bool((rows == rows[0]).all())


def code_of(numbers: Iterable[int]) -> int:
    """Return a checksum of numbers, which float64 represents exactly."""
    return zlib.crc32(repr(list(numbers)).encode())


def _require_type(caller: str, process_group: Any) -> None:
    kinds: tuple[Any, ...] = (dist.ProcessGroup,) if dist.is_available() else ()
    outside = dist.is_available() and process_group is dist.GroupMember.NON_GROUP_MEMBER
    if not isinstance(process_group, kinds) and not outside:
        raise InputError(
            f"{caller}: process_group: expected a process group of torch.distributed, 'local' or None, got "
            f"{process_group!r}; pass torch.distributed.group.WORLD to train one model on all ranks."
        )


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Group tensors of one dtype and device that are sent together."""
    kinds: dict[Any, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        kinds[tensor.dtype, tensor.device].append(tensor)
    for alike in kinds.values():
        bucket: list[Tensor] = []
        for tensor in alike:
            if bucket and sum(each.numel() for each in bucket) + tensor.numel() > _BUCKET:
                yield bucket
                bucket = []
            bucket.append(tensor)
        yield bucket


def _weighted_sum(flat: Tensor) -> Tensor:
    # 16 bits would round the differences away.
    flat = flat.to(_wide(flat))
    while len(flat) > 1:
        weights = _random_weights(flat.dtype, flat.device)
        whole = len(flat) // _WEIGHTS * _WEIGHTS
        rest = flat[whole:]
        flat = torch.cat([flat[:whole].view(-1, _WEIGHTS) @ weights, (rest @ weights[: len(rest)])[None]])
        flat = flat[:-1] if whole and not len(rest) else flat
    return flat[0]


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


@functools.cache
def _random_weights(dtype: torch.dtype, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(2**31 - 1)
    return torch.randn(_WEIGHTS, generator=generator, dtype=torch.float64).to(device, dtype)


# Number of times that this process has left a note of the same model.
_notes: Counter[str] = Counter()


class Replicas:
    """Notes that one optimizer leaves for ranks that train the same model without a process group.

    Ranks with other data take other steps, so that their models drift apart. A collective operation would wait for
    ranks that take no part. Notes in the key-value store of `torch.distributed` let none wait for another.
    """

    def __init__(self) -> None:
        self._count = 0
        self._left: list[str] = []

    def watch(self, caller: str, parameters: Sequence[Tensor], found: Sequence[Tensor], loss: float = 0.0) -> None:
        """Raise if another rank found something else at the same parameters; called for each curvature or gradient.

        Args:
            caller: Name of the optimizer.
            parameters: The parameters.
            found: Tensors that determine the step.
            loss: Loss, if it determines the step, too.

        Raises:
            InputError: If this rank, or an earlier note, differs from the other rank.
        """
        if number_of_ranks() == 1 or any(map(is_sharded, parameters)):
            return
        self._count += 1
        # Powers of two: the first steps decide, and later checks cost nothing.
        if self._count & (self._count - 1):
            return
        with torch.no_grad():
            mark, norm = mark_of(parameters), norm_of_all(parameters)
            now = [loss, mark_of(found), norm_of_all(found)]
        if not all(map(math.isfinite, now)):
            # The step raises a fitting error.
            return
        shapes = code_of(size for p in parameters for size in (*p.shape, -1))
        model = f"hodiff/{caller}/{shapes}/{mark:.9e}/{norm:.9e}"
        note = f"{model}/{_notes[model]}"
        _notes[model] += 1
        coarsest = max(torch.finfo(t.dtype).eps for t in found) ** 0.5 if found else 0.0
        if not self._agrees(note, now, coarsest):
            raise InputError(
                f"{caller}: process_group: expected the process group of the ranks that train this model, got None, "
                "although another rank computes other steps from the same parameters, so that the models would drift "
                "apart. Pass process_group=torch.distributed.group.WORLD to train one model on the data of all ranks, "
                "or process_group='local' if each rank trains a model of its own."
            )

    def _agrees(self, note: str, now: Sequence[float], coarsest: float) -> bool:
        store = default_store()
        own = " ".join(map(repr, now))
        first = [float(each) for each in store.compare_set(note, "", own).decode().split()]
        self._left.append(note)
        loss, mark, norm = (abs(a - b) for a, b in zip(first, now, strict=True))
        # Rounding depends on the device.
        agrees = loss <= coarsest * abs(now[0]) and max(mark, norm) <= coarsest * now[2]
        if not agrees:
            store.set(f"{note}/differ", "1")
        return agrees and not any(store.check([f"{each}/differ"]) for each in self._left)
