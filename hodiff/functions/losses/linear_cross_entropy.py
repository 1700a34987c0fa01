"""Cross-entropy of linear logits that are never in memory all at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hodiff.common.options import require_choice, require_int, require_number
from hodiff.common.overriding import overridable
from hodiff.errors import InputError
from hodiff.functions.losses.cross_entropy import class_of
from hodiff.functions.losses.linear_terms.term_formulas import Options
from hodiff.functions.losses.linear_terms.terms import LinearCrossEntropy
from hodiff.functions.losses.losses import REDUCTIONS
from hodiff.rules.arguments import dtype_name, require_dense_floating, require_one_device
from hodiff.rules.autocast import autocast_dtype, autocast_like_torch
from hodiff.torch_internals.autograd.differentiation import carry_derivatives

_NAME = "linear_cross_entropy"


@overridable
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> Tensor:
    r"""Cross-entropy of logits $Z = \varphi(X W^\top + b)$ and class indices, with no tensor of the size of $Z$.

    $$ \ell_n = \sum_c w_c\,q_{nc}\,(L_n - Z_{nc}) + \zeta\,w_{t_n} L_n^2, \qquad
       L_n = \log \sum_k e^{Z_{nk}}, \qquad q_{nc} = (1 - \varepsilon)\,[c = t_n] + \varepsilon / V $$

    $\varphi(s) = c \tanh(s / c)$ caps logits softly. The mean is over $\sum_n w_{t_n}$; ignored samples have zero loss
    and derivatives, whatever their values.

    At every order, the arguments and their derivatives dominate memory: logits exist for tiles of at most 2²¹ numbers
    (2²³ on a GPU), and at the third order for blocks of samples of about 2²¹. Backward saves the arguments and two
    numbers per sample (three with smoothing). `torch.compile` plans its own memory instead.

    16-bit inputs are computed in float32. On CUDA, tiles multiply two 16-bit inputs in their own dtype, with sums and
    results in float32; bfloat16 also rounds computed factors to it. Errors stay those of rounding the results.

    If input and weight are differentiated, the number of matrix products of the size of all logits is 1 for the value,
    3 for the gradient, which recomputes logits, 3 for the tangent of the value, and 8 for the tangent of the gradient
    (10 with a soft-cap, for 16-bit inputs, or if cotangents are differentiated as well, 7 if all logits fit into one
    tile). So a Hessian
    product by double backward takes 12 matrix products, instead of 9 with all logits in memory.

    Args:
        input: Floating-point tensor (..., E).
        linear_weight: Tensor (V, E) of the same dtype.
        target: int64 class indices of shape (...).
        linear_bias: Tensor (V,) of the same dtype.
        weight: Weight of each class (V,), a constant.
        reduction: "mean", "sum" or "none".
        ignore_index: Samples of this class do not count.
        label_smoothing: Share ε of the uniform distribution in the target, from 0 to 1.
        z_loss: Factor ζ of the squared log-sum-exp.
        softcap: Bound c of the logits; None is no bound.

    Returns:
        Tensor of shape (), or with "none" of the shape of `target`, in the dtype of `input` (in float32 under
        autocast). The mean over no sample is NaN.

    Raises:
        InputError: If an argument is invalid. A class that does not exist raises torch's own error.

    Example:
        >>> import torch
        >>> x, weight = torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.eye(3, 2)
        >>> linear_cross_entropy(x, weight, torch.tensor([0, 2]))
        tensor(0.8955)

    Source: E. Wijmans et al., "Cut your losses in large-vocabulary language models", 2025, section 4, for the tiles; A.
    Chowdhery et al., "PaLM", 2022, section 5, for the square.
    """
    _require(input, linear_weight, target, linear_bias, weight, reduction, ignore_index)
    require_number(_NAME, "label_smoothing", label_smoothing, within=(0, 1))
    require_number(_NAME, "z_loss", z_loss, nonnegative=True, finite=True)
    require_number(_NAME, "softcap", softcap, positive=True, finite=True, optional=True)
    by_autocast = autocast_dtype(input.device.type) is not None
    x, w, bias = autocast_like_torch(input, linear_weight, linear_bias)
    _require_one_dtype(x, w, bias)
    dtype = torch.float32 if by_autocast and x.dtype in (torch.float16, torch.bfloat16) else x.dtype
    samples = target.numel()
    index = target.reshape(samples, 1)
    options = Options(int(ignore_index), None if softcap is None else float(softcap), label_smoothing > 0)
    # Classes are dimension -2 of every tensor that has classes.
    columns = [None if each is None else each.unsqueeze(-1) for each in (bias, weight)]
    terms = LinearCrossEntropy.call(x.reshape(samples, x.shape[-1]), w, *columns, index, options)
    lse, hit, *mean = terms.unbind(-1)
    index = index.squeeze(-1)
    counted = index != ignore_index
    each: Any = 1.0
    total: Any = counted.sum()
    mass: Any = 1.0
    if weight is not None:
        each = torch.where(counted, weight.to(terms.dtype)[class_of(index, ignore_index)], 0)
        total, mass = each.sum(), weight.to(terms.dtype).mean()
    losses = (1 - label_smoothing) * each * (lse - hit)
    if label_smoothing:
        losses = losses + label_smoothing * (mass * lse - mean[0] / w.shape[0])
    if z_loss:
        losses = losses + z_loss * each * lse * lse
    losses = torch.where(counted, losses, 0)
    if reduction == "none":
        return losses.reshape(target.shape).to(dtype)
    return (losses.sum() / total if reduction == "mean" else losses.sum()).to(dtype)


def _require(
    input: Any, linear_weight: Any, target: Any, linear_bias: Any, weight: Any, reduction: Any, ignore_index: Any
) -> None:
    require_dense_floating(_NAME, input=input, linear_weight=linear_weight)
    if input.dim() < 1 or linear_weight.dim() != 2 or input.shape[-1] != linear_weight.shape[-1]:
        raise InputError(
            f"{_NAME}: expected input (..., E) and linear_weight (V, E), got input {tuple(input.shape)}, linear_weight "
            f"{tuple(linear_weight.shape)}."
        )
    if linear_weight.shape[0] == 0:
        raise InputError(f"{_NAME}: linear_weight: expected at least one class, got {tuple(linear_weight.shape)}.")
    if not isinstance(target, Tensor):
        raise InputError(f"{_NAME}: target: expected a tensor, got {type(target).__name__}.")
    if target.dtype != torch.int64:
        remedy = "cross_entropy takes probabilities" if target.is_floating_point() else "target.long() converts them"
        raise InputError(f"{_NAME}: target: expected int64 class indices, got {dtype_name(target)}; {remedy}.")
    if tuple(target.shape) != tuple(input.shape[:-1]):
        raise InputError(
            f"{_NAME}: target: expected the shape {tuple(input.shape[:-1])} of input without its last dimension, got "
            f"{tuple(target.shape)}."
        )
    for name, value in (("linear_bias", linear_bias), ("weight", weight)):
        if value is None:
            continue
        require_dense_floating(_NAME, **{name: value})
        if tuple(value.shape) != (linear_weight.shape[0],):
            raise InputError(
                f"{_NAME}: {name}: expected one number for each class, shape ({linear_weight.shape[0]},), got "
                f"{tuple(value.shape)}."
            )
    tensors = {"input": input, "linear_weight": linear_weight, "target": target}
    require_one_device(_NAME, **tensors, linear_bias=linear_bias, weight=weight)
    if weight is not None and not torch.compiler.is_compiling() and carry_derivatives([weight]):
        raise InputError(
            f"{_NAME}: weight: expected a constant, got a tensor that requires derivatives; pass weight.detach(), or "
            "use cross_entropy, which differentiates weights."
        )
    require_choice(_NAME, "reduction", reduction, REDUCTIONS)
    require_int(_NAME, "ignore_index", ignore_index)


def _require_one_dtype(*tensors: Tensor | None) -> None:
    dtypes = [dtype_name(each) for each in tensors if each is not None]
    if len(set(dtypes)) > 1:
        raise InputError(
            f"{_NAME}: expected input, linear_weight and linear_bias of one dtype, got {', '.join(dtypes)}; Tensor.to "
            "converts."
        )
