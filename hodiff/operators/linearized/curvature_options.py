"""The options of all operators at a point, validated."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from hodiff.common.options import require_bools, require_choice, require_chunk_size, require_int
from hodiff.common.trees import PyTree
from hodiff.operators.data.batches import require_batch_size, require_data, require_reduction
from hodiff.operators.data.distributed import require_group


@dataclass(frozen=True)
class CurvatureOptions:
    """Options that do not depend on the kind of operator; `hodiff.HessianOperator` explains them.

    Args:
        caller: Name of the operator in messages.
    """

    caller: str
    data: Iterable[PyTree] | None
    reduction: str
    batch_size: Callable[[PyTree], int] | None
    compile: bool | str
    process_group: Any
    cache: bool | str
    memory_budget: int
    chunk_size: int | str | None
    check_deterministic: bool
    randomness: str
    progress: bool
    correct: bool

    def __post_init__(self) -> None:
        require_data(self.caller, "data", self.data)
        require_reduction(self.caller, self.reduction)
        require_batch_size(self.caller, "batch_size", self.batch_size)
        require_choice(self.caller, "compile", self.compile, (True, False, "dynamic"))
        require_group(self.caller, "process_group", self.process_group)
        require_choice(self.caller, "cache", self.cache, (True, False, "auto"))
        require_int(self.caller, "memory_budget", self.memory_budget, 0, remedy="it counts bytes")
        require_chunk_size(self.caller, "chunk_size", self.chunk_size)
        require_choice(self.caller, "randomness", self.randomness, ("error", "fixed"))
        require_bools(
            self.caller, check_deterministic=self.check_deterministic, progress=self.progress, correct=self.correct
        )
