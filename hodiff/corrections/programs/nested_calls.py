"""Rules for torch's own Python functions, so that corrections apply to the calls inside them.

A torch function written in Python first calls the mode, and then runs with the mode off. Its twin, the same code
without that call, runs inside the mode.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from hodiff.corrections.mode import run_in_the_mode
from hodiff.corrections.registry import register
from hodiff.corrections.twins import twin
from hodiff.routes import ROUTES

# Functions whose only faults are those of the functions that they call, which have rules.
COMPOSITES: dict[Callable[..., Any], str] = {
    F.multi_head_attention_forward: "it calls scaled_dot_product_attention, whose fused kernels have no second one",
    torch.pca_lowrank: "of a sparse matrix, it makes another of means, whose gradient is a constant",
    F.triplet_margin_with_distance_loss: "it calls a distance, as a default torch's own",
    F.multilabel_soft_margin_loss: "it calls logsigmoid, which loses its digits in the tails",
    **dict.fromkeys((F.softmin, F.gumbel_softmax), "it calls softmax, which loses its digits in the tails"),
    **dict.fromkeys((F.lp_pool1d, F.lp_pool2d, F.lp_pool3d), "it calls abs, whose even powers are smooth at 0"),
}

for _function, _reason in COMPOSITES.items():
    register(
        _function,
        kind="missing",
        routes=ROUTES,
        reason=_reason,
        reference="the same code, with the rules of what it calls",
    )(partial(run_in_the_mode, twin(_function)))
