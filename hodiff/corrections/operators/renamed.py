"""Rules for operators whose arguments differ from the arguments of the function with the rule."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hodiff.corrections.declining import UNNEEDED
from hodiff.corrections.operators.operator_rules import calls, rule_of

# Names in the order of the operators' numbers.
REDUCTIONS = ("none", "mean", "sum")
_COMPUTE_MODES = (
    "use_mm_for_euclid_dist_if_necessary",
    "use_mm_for_euclid_dist",
    "donot_use_mm_for_euclid_dist",
)
_MEAN = REDUCTIONS.index("mean")

calls(F.affine_grid, "affine_grid_generator")(rule_of(F.affine_grid))
calls(F.dropout, "dropout")(rule_of(F.dropout))


@calls(F.mse_loss, "mse_loss")
def _mse_loss(input: Tensor, target: Tensor, reduction: int = _MEAN) -> Any:
    return rule_of(F.mse_loss)(input, target, reduction=REDUCTIONS[reduction])


@calls(F.binary_cross_entropy_with_logits, "binary_cross_entropy_with_logits")
def _binary_cross_entropy_with_logits(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    pos_weight: Tensor | None = None,
    reduction: int = _MEAN,
) -> Any:
    rule = rule_of(F.binary_cross_entropy_with_logits)
    return rule(input, target, weight, reduction=REDUCTIONS[reduction], pos_weight=pos_weight)


@calls(F.huber_loss, "huber_loss")
def _huber_loss(input: Tensor, target: Tensor, reduction: int = _MEAN, delta: float = 1.0) -> Any:
    return rule_of(F.huber_loss)(input, target, REDUCTIONS[reduction], delta)


@calls(F.soft_margin_loss, "soft_margin_loss")
def _soft_margin_loss(input: Tensor, target: Tensor, reduction: int = _MEAN) -> Any:
    return rule_of(F.soft_margin_loss)(input, target, reduction=REDUCTIONS[reduction])


@calls(F.multi_margin_loss, "multi_margin_loss")
def _multi_margin_loss(
    input: Tensor,
    target: Tensor,
    p: int = 1,
    margin: float = 1,
    weight: Tensor | None = None,
    reduction: int = _MEAN,
) -> Any:
    return rule_of(F.multi_margin_loss)(input, target, p, margin, weight, reduction=REDUCTIONS[reduction])


@calls(F.multilabel_margin_loss, "multilabel_margin_loss")
def _multilabel_margin_loss(input: Tensor, target: Tensor, reduction: int = _MEAN) -> Any:
    return rule_of(F.multilabel_margin_loss)(input, target, reduction=REDUCTIONS[reduction])


@calls(torch.cdist, "cdist", "_cdist_forward")
def _cdist(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: int | None = None) -> Any:
    return rule_of(torch.cdist)(x1, x2, p, _COMPUTE_MODES[compute_mode or 0])


@calls(torch.cdist, "_euclidean_dist")
def _euclidean_dist(x1: Tensor, x2: Tensor) -> Any:
    return rule_of(torch.cdist)(x1, x2, 2.0, _COMPUTE_MODES[1])


@calls(F.embedding, "embedding")
def _embedding(
    weight: Tensor, indices: Tensor, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Any:
    if padding_idx < 0:
        return UNNEEDED
    options = {"scale_grad_by_freq": scale_grad_by_freq, "sparse": sparse}
    return rule_of(F.embedding)(indices, weight, padding_idx, **options)
