"""Options of every meta-learner, with their types, defaults, explanations and validators."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, TypedDict

import torch
from torch import Tensor

from hodiff.common.keyword_options import Default
from hodiff.common.options import require_bool, require_choice, require_generator, require_int
from hodiff.meta.adaptation import GRADIENTS
from hodiff.meta.batch_norms import POLICIES
from hodiff.meta.inner_gradients import require_norm
from hodiff.meta.optimizer import Optimizer, require_optimizer


def _require_optimizer_or_none(caller: str, argument: str, value: Any) -> None:
    if value is not None:
        require_optimizer(caller, argument, value)


class InnerOptions(TypedDict, total=False):
    """Options of every inner loop."""

    optimizer: Annotated[
        Optimizer | None,
        Default(
            None,
            "Functional optimizer for the inner steps, in place of `SGD(lr)`; `MetaSGD` has its own.",
        ),
        _require_optimizer_or_none,
    ]
    checkpoint: Annotated[
        int | None,
        Default(
            None,
            "Recompute inner steps in segments of this length, which saves memory; see `adapt`.",
        ),
        partial(require_int, least=1, optional=True),
    ]
    truncate: Annotated[
        int | None,
        Default(
            None,
            "Number of last inner steps that are differentiated; see `adapt`.",
        ),
        partial(require_int, least=0, optional=True),
    ]
    clip: Annotated[
        float | Tensor | None,
        Default(
            None,
            "Largest norm of a task's inner gradient.",
        ),
        require_norm,
    ]
    route: Annotated[
        str,
        Default(
            "auto",
            'How inner gradients are differentiated: "auto", "reverse-over-reverse" or "forward-over-reverse"; '
            "see `adapt`.",
        ),
        partial(require_choice, choices=tuple(GRADIENTS)),
    ]
    batch_norm: Annotated[
        str,
        Default(
            "per-task",
            'Running statistics of batch norm layers in training mode: "per-task", each task updates a copy, '
            'which is discarded; "shared", the module\'s statistics become the mean of these copies; "frozen", the'
            " layers normalize by their running statistics, as in evaluation mode, and do not update them.",
        ),
        partial(require_choice, choices=POLICIES),
    ]
    chunk_size: Annotated[
        int | None,
        Default(
            None,
            "Number of tasks that are evaluated together; all by default.",
        ),
        partial(require_int, least=1, optional=True),
    ]
    generator: Annotated[
        torch.Generator | None,
        Default(
            None,
            "Generator that seeds the random numbers of the inner loops, such as dropout's; torch's global state "
            "by default.",
        ),
        require_generator,
    ]
    check_finite: Annotated[
        bool,
        Default(
            True,
            "Whether to raise if numbers in an inner loop are not finite.",
        ),
        require_bool,
    ]


class LearnerOptions(InnerOptions, total=False):
    """Options of every inner loop, and `first_order`, which `hodiff.meta.FOMAML` fixes."""

    first_order: Annotated[
        bool,
        Default(
            False,
            "Whether inner gradients count as constants.",
        ),
        require_bool,
    ]
