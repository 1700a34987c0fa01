"""Rules for operators of captured graphs, whose arguments differ from those of the function with the rule.

Among them are functions in parts, whose further results are constants to a derivative in torch, and operators that
compute gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hodiff.corrections.mechanism.declining import UNNEEDED, Declined
from hodiff.corrections.mechanism.operator_rules import calls, rule_of, with_others
from hodiff.corrections.rules.distances.cdist import COMPUTE_MODES
from hodiff.corrections.rules.indexing.embedding import require_no_rescaling
from hodiff.functions.losses.losses import REDUCTIONS
from hodiff.functions.normalization import standardization as formulas
from hodiff.functions.normalization.standardization import StatisticsLayout, wide
from hodiff.torch_internals.operators import batch_norm_with_update, operator_named

# In the order of the operators' numbers.
_MODES = tuple(COMPUTE_MODES)

calls(F.affine_grid, "affine_grid_generator")(rule_of(F.affine_grid))
calls(F.dropout, "dropout")(rule_of(F.dropout))


# Number of the leading tensors of losses, where it is not two.
_TENSORS = {F.triplet_margin_loss: 3}
# Losses, and the names of their operators' arguments after these tensors.
_LOSSES: dict[Callable[..., Any], tuple[str, ...]] = {
    F.mse_loss: ("reduction",),
    F.binary_cross_entropy_with_logits: ("weight", "pos_weight", "reduction"),
    F.huber_loss: ("reduction", "delta"),
    F.soft_margin_loss: ("reduction",),
    F.multi_margin_loss: ("p", "margin", "weight", "reduction"),
    F.multilabel_margin_loss: ("reduction",),
    F.triplet_margin_loss: ("margin", "p", "eps", "swap", "reduction"),
}


def _by_number(function: Callable[..., Any], names: Sequence[str]) -> Callable[..., Any]:
    """Return the rule of an operator that takes the reduction by its number."""
    rule, mean, count = rule_of(function), REDUCTIONS.index("mean"), _TENSORS.get(function, 2)

    def loss(*args: Any, **kwargs: Any) -> Any:
        options = {"reduction": mean, **dict(zip(names, args[count:], strict=False)), **kwargs}
        return rule(*args[:count], **options | {"reduction": REDUCTIONS[options["reduction"]]})

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
    options = {"scale_grad_by_freq": scale_grad_by_freq, "sparse": sparse}
    return rule_of(F.embedding)(indices, weight, padding_idx if padding_idx >= 0 else None, **options)


@calls(F.embedding, "embedding_renorm_")
def _embedding_renorm(weight: Tensor, indices: Tensor, max_norm: float, norm_type: float) -> Any:
    # A program captures it apart from the lookup, for a detached weight.
    require_no_rescaling(weight, indices, max_norm, norm_type)
    return UNNEEDED


def _of_normalization(
    cotangent: Tensor, x: Tensor, weight: Tensor | None, layout: StatisticsLayout, wanted: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Return gradients with respect to input, weight and bias; None if not wanted."""
    found = iter(formulas.gradient(cotangent, x, weight, layout, tuple(wanted)))
    return tuple(next(found) if want else None for want in wanted)


@calls(torch.native_layer_norm, "native_layer_norm_backward")
def _native_layer_norm_backward(
    cotangent: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    wanted: Sequence[bool],
) -> Any:
    del mean, bias
    if not input.is_floating_point() or not input.numel():
        return UNNEEDED
    dims = tuple(range(-len(normalized_shape), 0))
    # The operator does not receive epsilon, but the statistics contain it.
    eps: Any = (rstd.pow(-2) - wide(input).var(dims, correction=0, keepdim=True)).detach()
    dtype = input.dtype if weight is None else weight.dtype
    return _of_normalization(
        cotangent, input, weight, StatisticsLayout("trailing", len(dims), input.dim(), eps, True, dtype), wanted
    )


@calls(torch.native_batch_norm, "native_batch_norm_backward", "batch_norm_backward")
def _native_batch_norm_backward(
    cotangent: Tensor,
    input: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    save_mean: Tensor | None,
    save_invstd: Tensor | None,
    training: bool,
    eps: float,
    wanted: Sequence[bool],
    *_: Tensor,
) -> Any:
    del running_mean, running_var, save_mean, save_invstd
    if not training or not input.is_floating_point() or not input.numel():
        return UNNEEDED
    dtype = input.dtype if weight is None else weight.dtype
    layout = StatisticsLayout("channels", input.shape[1], input.dim(), eps, True, dtype)
    return _of_normalization(cotangent, input, weight, layout, wanted)


@calls(F.mse_loss, "mse_loss_backward")
def _mse_loss_backward(cotangent: Tensor, input: Tensor, target: Tensor, reduction: int) -> Any:
    if not input.is_floating_point() or input.shape != target.shape:
        return UNNEEDED
    difference = input - target
    share = 2 / difference.numel() if REDUCTIONS[reduction] == "mean" and difference.numel() else 2
    return cotangent * difference * share


calls(F.pdist, "_pdist_forward")(rule_of(F.pdist))


@calls(torch.embedding_bag, "_embedding_bag", "_embedding_bag_forward_only")
def _embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> Any:
    rule, padding = rule_of(torch.embedding_bag), padding_idx if padding_idx >= 0 else None
    options = (scale_grad_by_freq, mode, sparse, per_sample_weights, include_last_offset)
    return rule(weight, indices, offsets, *options, padding)


@calls(F.ctc_loss, "_ctc_loss")
def _ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    zero_infinity: bool = False,
) -> Any:
    arguments = (targets, input_lengths, target_lengths, blank)
    losses = rule_of(F.ctc_loss)(log_probs, *arguments, "none", zero_infinity)
    found = with_others(losses, "_ctc_loss", log_probs, *arguments, zero_infinity)
    if isinstance(found, Declined) or not zero_infinity:
        return found
    # The operator returns infinite losses; its caller replaces them by zero.
    value = operator_named("_ctc_loss")(log_probs.detach(), *arguments, zero_infinity)[0]
    return torch.where(value.isinf(), value, found[0]), *found[1:]


@calls(F.multilabel_margin_loss, "multilabel_margin_loss_forward")
def _multilabel_margin_loss_forward(input: Tensor, target: Tensor, reduction: int) -> Any:
    value = rule_of(F.multilabel_margin_loss)(input, target, reduction=REDUCTIONS[reduction])
    return with_others(value, "multilabel_margin_loss_forward", input, target, reduction)


@calls(torch.linalg.det, "_linalg_det")
def _linalg_det(A: Tensor) -> Any:
    return with_others(rule_of(torch.linalg.det)(A), "_linalg_det", A)


@calls(torch.linalg.slogdet, "_linalg_slogdet")
def _linalg_slogdet(A: Tensor) -> Any:
    pair = rule_of(torch.linalg.slogdet)(A)
    return pair if isinstance(pair, Declined) else (*pair, *operator_named("_linalg_slogdet")(A.detach())[2:])


@calls(torch.linalg.solve_ex, "_linalg_solve_ex")
def _linalg_solve_ex(A: Tensor, B: Tensor, *, left: bool = True, check_errors: bool = False) -> Any:
    options = {"left": left, "check_errors": check_errors}
    pair = rule_of(torch.linalg.solve_ex)(A, B, **options)
    return with_others(pair if isinstance(pair, Declined) else pair[0], "_linalg_solve_ex", A, B, **options)


@calls(torch.linalg.eigh, "_linalg_eigh")
def _linalg_eigh(A: Tensor, UPLO: str = "L", compute_v: bool = True) -> Any:
    if not compute_v:
        return UNNEEDED
    pair = rule_of(torch.linalg.eigh)(A, UPLO)
    return pair if isinstance(pair, Declined) else tuple(pair)


def _functional(function: Any) -> Callable[..., Any]:
    """Return the rule of an operator that returns the running statistics which the function's rule changes."""
    rule = rule_of(function)

    def functional(
        input: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor, running_var: Tensor, *rest: Any
    ) -> Any:
        running = running_mean.clone(), running_var.clone()
        found = rule(input, weight, bias, *running, *rest)
        return found if isinstance(found, Declined) else (*found, *running)

    return functional


calls(torch.native_batch_norm, "_native_batch_norm_legit_functional")(_functional(torch.native_batch_norm))
calls(batch_norm_with_update, "_batch_norm_with_update_functional")(_functional(batch_norm_with_update))


@calls(torch.batch_norm, "_batch_norm_impl_index")
def _batch_norm_impl_index(input: Tensor, *args: Any) -> Any:
    value = rule_of(torch.batch_norm)(input, *args)
    running = slice(2, 4)  # which the rule has updated
    statistics = [None if each is None else each.clone() for each in args[running]]
    return with_others(value, "_batch_norm_impl_index", input, *args[:2], *statistics, *args[4:])


@calls(
    F.scaled_dot_product_attention,
    "_scaled_dot_product_flash_attention_for_cpu",
)
def _attention_for_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> Any:
    found = rule_of(F.scaled_dot_product_attention)(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)
    operator = "_scaled_dot_product_flash_attention_for_cpu"
    return with_others(found, operator, query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)
