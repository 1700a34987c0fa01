"""The options that every meta-learner takes, with their types and defaults."""

from __future__ import annotations

from typing import Annotated, TypedDict

import torch
from torch import Tensor

from hodiff.common.keyword_options import Default
from hodiff.meta.optimizer import Optimizer


class InnerOptions(TypedDict, total=False):
    """As `hodiff.meta.MAML` explains them."""

    optimizer: Annotated[Optimizer | None, Default(None)]
    checkpoint: Annotated[int | None, Default(None)]
    truncate: Annotated[int | None, Default(None)]
    clip: Annotated[float | Tensor | None, Default(None)]
    route: Annotated[str, Default("auto")]
    batch_norm: Annotated[str, Default("per-task")]
    chunk_size: Annotated[int | None, Default(None)]
    generator: Annotated[torch.Generator | None, Default(None)]
    check_finite: Annotated[bool, Default(True)]


class LearnerOptions(InnerOptions, total=False):
    """Those, and the one that `hodiff.meta.FOMAML` settles."""

    first_order: Annotated[bool, Default(False)]
