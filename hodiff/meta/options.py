"""The options that every meta-learner takes, with their types, defaults and validators."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, TypedDict

import torch
from torch import Tensor

from hodiff.common.keyword_options import Default
from hodiff.common.options import require_bool, require_choice, require_generator, require_int
from hodiff.meta.adaptation import GRADIENTS
from hodiff.meta.batch_norms import POLICIES
from hodiff.meta.gradients import require_norm
from hodiff.meta.optimizer import Optimizer, require_optimizer


def _require_optimizer_or_none(caller: str, argument: str, value: Any) -> None:
    """Refuse what is neither a functional optimizer nor None, for descent by `lr`."""
    if value is not None:
        require_optimizer(caller, argument, value)


class InnerOptions(TypedDict, total=False):
    """As `hodiff.meta.MAML` explains them."""

    optimizer: Annotated[Optimizer | None, Default(None), _require_optimizer_or_none]
    checkpoint: Annotated[int | None, Default(None), partial(require_int, least=1, optional=True)]
    truncate: Annotated[int | None, Default(None), partial(require_int, least=0, optional=True)]
    clip: Annotated[float | Tensor | None, Default(None), require_norm]
    route: Annotated[str, Default("auto"), partial(require_choice, choices=tuple(GRADIENTS))]
    batch_norm: Annotated[str, Default("per-task"), partial(require_choice, choices=POLICIES)]
    chunk_size: Annotated[int | None, Default(None), partial(require_int, least=1, optional=True)]
    generator: Annotated[torch.Generator | None, Default(None), require_generator]
    check_finite: Annotated[bool, Default(True), require_bool]


class LearnerOptions(InnerOptions, total=False):
    """Those, and the one that `hodiff.meta.FOMAML` settles."""

    first_order: Annotated[bool, Default(False), require_bool]
