"""Casts of `torch.autocast`, for Functions and rules that replace an operator of torch."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hodiff.torch_internals.interception import autocasts

# Under autocast, torch casts 16-bit arguments of functions in IN_FLOAT32 to float32, and float32 arguments of functions
# in LOWERED to 16 bits (ATen/autocast_mode.h and .cpp). Composites of such functions are listed, too.
_LOSSES = (
    "binary_cross_entropy_with_logits cosine_embedding_loss cross_entropy hinge_embedding_loss huber_loss kl_div "
    "l1_loss margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss nll_loss poisson_nll_loss "
    "smooth_l1_loss soft_margin_loss triplet_margin_loss "
)
IN_FLOAT32 = {
    "cpu": frozenset(
        f"{_LOSSES} binary_cross_entropy cdist ctc_loss grid_sample grid_sampler grid_sampler_2d grid_sampler_3d "
        "max_unpool1d max_unpool2d max_unpool3d polar prod".split()
    ),
    "cuda": frozenset(
        f"{_LOSSES} acos asin cdist cosh cosine_similarity cumprod cumsum dist erfinv exp expm1 group_norm interpolate "
        "layer_norm log log10 log1p log2 log_softmax logsumexp matrix_norm norm normalize pairwise_distance pdist pow "
        "prod reciprocal renorm rms_norm rsqrt sinh softmax softmin softplus tan vector_norm".split()
    ),
}
LOWERED = frozenset(["conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "prelu"])


def cast_by_autocast(name: str, arguments: Any) -> tuple[Any, str] | None:
    """Cast the arguments of a torch function as autocast would, and return the device type; None if nothing is cast."""
    # Compute with the arguments under `without_autocast`.
    function = name.rpartition(".")[2]
    for device, in_float32 in IN_FLOAT32.items():
        if torch.is_autocast_enabled(device) and (function in in_float32 or function in LOWERED):
            dtype = torch.float32 if function in in_float32 else torch.get_autocast_dtype(device)
            leaves, tree = pytree.tree_flatten(arguments)
            if any(_is_cast(each, device, dtype) for each in leaves):
                cast = [each.to(dtype) if _is_cast(each, device, dtype) else each for each in leaves]
                return pytree.tree_unflatten(cast, tree), device
    return None


def _is_cast(argument: Any, device: str, dtype: torch.dtype) -> bool:
    return (
        isinstance(argument, Tensor)
        and argument.device.type == device
        and argument.is_floating_point()
        and argument.dtype not in (torch.float64, dtype)
    )


def autocast_like_torch(*arguments: Any) -> tuple[Any, ...]:
    """Cast tensors as `torch.autocast` casts arguments of a matrix product; float64 is kept."""
    # A Function calls operators below autocast in forward and again in backward, where autocast is off. To give both
    # the same dtype, cast before the Function, and differentiate the cast with it.
    if not torch.compiler.is_compiling() and not autocasts():
        return arguments
    return tuple(_lowered(each) if isinstance(each, Tensor) else each for each in arguments)


def autocast_dtype(device: str) -> torch.dtype | None:
    """Return the dtype that `torch.autocast` casts to on a type of device, or None if it is off."""
    # Dynamo of torch 2.11 does not trace `is_autocast_available`; among devices with tensors, only meta has no
    # autocast.
    compiling = torch.compiler.is_compiling()
    available = device != "meta" if compiling else torch.amp.is_autocast_available(device)
    return torch.get_autocast_dtype(device) if available and torch.is_autocast_enabled(device) else None


def without_autocast(device: str) -> AbstractContextManager[Any]:
    """Context manager that turns autocast off, so that formulas keep the precision of their tensors."""
    return nullcontext() if autocast_dtype(device) is None else torch.autocast(device, enabled=False)


def _lowered(tensor: Tensor) -> Tensor:
    dtype = autocast_dtype(tensor.device.type)
    if dtype is None or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(dtype)
