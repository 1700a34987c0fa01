"""Rules for torch's `flex_attention`, which has no second derivative, and on a CPU no gradient."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_room

from hodiff.corrections.mechanism.declining import INVALID, UNNEEDED, unable
from hodiff.corrections.mechanism.mode import Corrections
from hodiff.corrections.mechanism.registry import register
from hodiff.errors import InputError, RouteError
from hodiff.functions.attention.flex.block_masks import blocks_of
from hodiff.functions.attention.flex.flex_attention import attend_flexibly, attend_in_blocks
from hodiff.routes import ROUTES
from hodiff.rules.any_order import outside_graphs
from hodiff.torch_internals.autograd.differentiation import may_be_differentiated
from hodiff.torch_internals.interception import flex_operator, offer_flex_attention_to, torch_flex_attention

_missing = partial(
    register,
    kind="missing",
    routes=ROUTES,
    reason="its gradient has no derivative, no transform supports it, and on a CPU it has no gradient",
    reference="Dong et al. (2024), section 3",
)


@_missing(torch_flex_attention, name="torch.nn.attention.flex_attention.flex_attention")
@outside_graphs  # dynamo compiles the callees of a compiled function that a transform runs in Python
def _flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Any = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
) -> Any:
    del kernel_options  # options of torch's kernels
    if not may_be_differentiated():
        return UNNEEDED
    if query.is_nested or key.is_nested or value.is_nested:
        return unable("tensors are nested")
    if return_lse and return_aux is not None:
        return INVALID
    # Torch accepts keys and values of lower precision.
    key, value = (each.to(query.dtype) for each in (key, value))
    statistics = return_lse or return_aux is not None
    try:
        output, lse, greatest = attend_flexibly(
            query, key, value, score_mod, None, block_mask, scale, enable_gqa, statistics=statistics
        )
    except InputError as error:
        # Torch itself would first report that it has no gradient on a CPU.
        raise RouteError(
            f"torch.nn.attention.flex_attention: hodiff's rule does not support the call: {error}"
        ) from error
    if return_aux is not None:
        chosen = {"lse": lse if return_aux.lse else None, "max_scores": greatest if return_aux.max_scores else None}
        return output, torch_room.AuxOutput(**chosen)
    return (output, lse) if return_lse else output


@_missing(flex_operator, name="torch.ops.higher_order.flex_attention")
def _operator(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Any,
    block_mask: tuple[Any, ...],
    scale: float,
    kernel_options: Any,
    score_mod_other_buffers: tuple[Any, ...] = (),
    mask_mod_other_buffers: tuple[Any, ...] = (),
) -> Any:
    """Rule for the operator in graphs of dynamo and exported programs, whose functions take captured tensors."""
    del kernel_options
    *tables, rows, columns, mask_mod = block_mask
    lists = [each for each in tables[:6] if not isinstance(each, (int, torch.SymInt))]
    length, keys = query.shape[-2], key.shape[-2]
    blocks = blocks_of((lists[0], lists[1]), (lists[2], lists[3]), (rows, columns), length, keys)

    def scores(*arguments: Tensor) -> Any:
        return score_mod(*arguments, *score_mod_other_buffers)

    def seen(*arguments: Tensor) -> Any:
        return mask_mod(*arguments, *mask_mod_other_buffers)

    key, value = (each.to(query.dtype) for each in (key, value))
    output, lse, greatest = attend_in_blocks(query, key, value, scores, (seen, None), blocks, scale, statistics=True)
    assert lse is not None
    assert greatest is not None
    return output, lse / math.log(2), greatest / math.log(2)  # torch's kernels compute in powers of 2


offer_flex_attention_to(Corrections)
