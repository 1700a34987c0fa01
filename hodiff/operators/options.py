"""The options that every operator at a point takes, with their types and defaults."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, Any, TypedDict

from hodiff.common.keyword_options import Default
from hodiff.common.trees import PyTree


class CurvatureOptions(TypedDict, total=False):
    """As `hodiff.HessianOperator` explains them."""

    data: Annotated[Iterable[PyTree] | None, Default(None)]
    reduction: Annotated[str, Default("mean")]
    batch_size: Annotated[Callable[[PyTree], int] | None, Default(None)]
    compile: Annotated[bool, Default(False)]
    process_group: Annotated[Any, Default(None)]
    cache: Annotated[bool | str, Default("auto")]
    memory_budget: Annotated[int, Default(2**30)]
    chunk_size: Annotated[int | str | None, Default("auto")]
    check_deterministic: Annotated[bool, Default(True)]
    progress: Annotated[bool, Default(False)]
    correct: Annotated[bool, Default(True)]
