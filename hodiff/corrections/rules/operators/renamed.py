"""Rules for operators whose arguments differ from the arguments of the function with the rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hodiff.corrections.mechanism.declining import UNNEEDED
from hodiff.corrections.mechanism.operator_rules import calls, rule_of
from hodiff.corrections.rules.distances.cdist import COMPUTE_MODES
from hodiff.functions.losses.losses import REDUCTIONS

# In the order of the operators' numbers.
_MODES = tuple(COMPUTE_MODES)

calls(F.affine_grid, "affine_grid_generator")(rule_of(F.affine_grid))
calls(F.dropout, "dropout")(rule_of(F.dropout))


# Losses, and the names of their operators' arguments after input and target.
_LOSSES: dict[Callable[..., Any], tuple[str, ...]] = {
    F.mse_loss: ("reduction",),
    F.binary_cross_entropy_with_logits: ("weight", "pos_weight", "reduction"),
    F.huber_loss: ("reduction", "delta"),
    F.soft_margin_loss: ("reduction",),
    F.multi_margin_loss: ("p", "margin", "weight", "reduction"),
    F.multilabel_margin_loss: ("reduction",),
}


def _by_number(function: Callable[..., Any], names: Sequence[str]) -> Callable[..., Any]:
    """Return the rule of an operator that takes the reduction by its number."""
    rule, mean = rule_of(function), REDUCTIONS.index("mean")

    def loss(input: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Any:
        options = {"reduction": mean, **dict(zip(names, args, strict=False)), **kwargs}
        return rule(input, target, **options | {"reduction": REDUCTIONS[options["reduction"]]})

    return loss


for _function, _names in _LOSSES.items():
    calls(_function, _function.__name__)(_by_number(_function, _names))


@calls(torch.cdist, "cdist", "_cdist_forward")
def _cdist(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: int | None = None) -> Any:
    return rule_of(torch.cdist)(x1, x2, p, _MODES[compute_mode or 0])


@calls(torch.cdist, "_euclidean_dist")
def _euclidean_dist(x1: Tensor, x2: Tensor) -> Any:
    return rule_of(torch.cdist)(x1, x2, 2.0, _MODES[1])


@calls(F.embedding, "embedding")
def _embedding(
    weight: Tensor, indices: Tensor, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Any:
    if padding_idx < 0:
        return UNNEEDED
    options = {"scale_grad_by_freq": scale_grad_by_freq, "sparse": sparse}
    return rule_of(F.embedding)(indices, weight, padding_idx, **options)
