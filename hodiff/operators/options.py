"""The options that every operator at a point takes, with their types, defaults and validators."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Annotated, Any, TypedDict

from hodiff.common.chunks import require_chunk_size
from hodiff.common.keyword_options import Default
from hodiff.common.options import require_bool, require_choice, require_int
from hodiff.common.trees import PyTree
from hodiff.operators.batches import require_batch_size, require_data, require_reduction
from hodiff.operators.distributed import require_group


class CurvatureOptions(TypedDict, total=False):
    """As `hodiff.HessianOperator` explains them."""

    data: Annotated[Iterable[PyTree] | None, Default(None), require_data]
    reduction: Annotated[str, Default("mean"), require_reduction]
    batch_size: Annotated[Callable[[PyTree], int] | None, Default(None), require_batch_size]
    compile: Annotated[bool, Default(False), require_bool]
    process_group: Annotated[Any, Default(None), require_group]
    cache: Annotated[bool | str, Default("auto"), partial(require_choice, choices=(True, False, "auto"))]
    memory_budget: Annotated[int, Default(2**30), partial(require_int, least=0, remedy="it counts bytes")]
    chunk_size: Annotated[int | str | None, Default("auto"), require_chunk_size]
    check_deterministic: Annotated[bool, Default(True), require_bool]
    progress: Annotated[bool, Default(False), require_bool]
    correct: Annotated[bool, Default(True), require_bool]
