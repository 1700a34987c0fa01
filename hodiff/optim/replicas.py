"""A check that ranks which train the same model without a process group have the same data.

Otherwise the ranks' steps differ, and their models drift apart. A collective operation would wait for ranks that take
no part. The ranks instead leave notes in the key-value store of `torch.distributed`, and none waits for another.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from hodiff.errors import InputError
from hodiff.optim.process_groups import code_of, mark_of, norm_of_all
from hodiff.torch_internals.process_groups import default_store, is_sharded, number_of_ranks

# Number of times that this process has left a note of the same model.
_notes: Counter[str] = Counter()


class Replicas:
    """Notes that one optimizer leaves for ranks with the same model."""

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
