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
from hodiff.meta.gradients import require_norm
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
            "Differentiate the last steps only, as many as this; see `adapt`.",
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
            'What batch norms in training mode do with their running statistics: "per-task", each task moves a '
            'copy that is dropped afterwards; "shared", the module\'s move to the mean of those copies; "frozen", '
            "they normalise, as in evaluation, and do not move.",
        ),
        partial(require_choice, choices=POLICIES),
    ]
    chunk_size: Annotated[
        int | None,
        Default(
            None,
            "How many tasks go through the module at once; by default all.",
        ),
        partial(require_int, least=1, optional=True),
    ]
    generator: Annotated[
        torch.Generator | None,
        Default(
            None,
            "Seeds the random numbers of the inner loops, such as dropout's; by default torch's global state.",
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
