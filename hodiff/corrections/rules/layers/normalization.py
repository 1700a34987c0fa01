"""Rules for normalizations, whose forward rules in torch are constants to a second derivative."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hodiff import functions
from hodiff.corrections.mechanism.declining import INVALID, UNNEEDED, Declined, unable
from hodiff.corrections.mechanism.registry import register
from hodiff.functions.normalization.standardization import wide
from hodiff.routes import FORWARD_INSIDE, ROUTES
from hodiff.torch_internals.autograd.differentiation import carry_derivatives
from hodiff.torch_internals.autograd.grad_mode import in_forward_mode
from hodiff.torch_internals.autograd.transforms import in_transform, outside_transforms
from hodiff.torch_internals.autograd.wrapped_tensors import is_wrapped
from hodiff.torch_internals.operators import batch_norm_with_update, native_batch_norm

_constant = partial(
    register,
    kind="wrong",
    routes=FORWARD_INSIDE,
    reason="mean and deviation are constants in the second derivatives of the forward rule, and in the third of the "
    "reverse rule",
)


def _is_real(input: Any, *_: Any, **__: Any) -> bool:
    return isinstance(input, Tensor) and input.is_floating_point()


_of_layers = partial(_constant, covers=_is_real, reference="Ba, Kiros & Hinton (2016), eq. 4")
_of_batches = partial(
    _constant,
    covers=_is_real,
    reason="mean and deviation are constants in the second derivatives of the forward rule, and in the third of the "
    "reverse rule; the gradient reads wrong elements of a weight or running statistic that is not contiguous",
    reference="Ioffe & Szegedy (2015), alg. 1",
)
_of_instances = partial(_constant, covers=_is_real, reference="Ulyanov, Vedaldi & Lempitsky (2016), eq. 3")


@_of_layers(torch.layer_norm, F.layer_norm)
def _layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Any:
    del cudnn_enable
    if isinstance(normalized_shape, int):
        return INVALID  # torch accepts no integer
    return functions.layer_norm(input, normalized_shape, weight, bias, eps)


@_of_layers(torch.native_layer_norm)
def _native_layer_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> Any:
    y = _layer_norm(input, normalized_shape, weight, bias, eps)
    if isinstance(y, Declined):
        return y
    dims = tuple(range(-len(normalized_shape), 0))
    return y, *_statistics(input, dims, eps, weight if input.is_cpu else None, keepdim=True)


def _statistics(
    input: Tensor, dims: Sequence[int], eps: float, parameter: Tensor | None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    """Return mean and reciprocal standard deviation, which are constants in torch, in the dtype of a parameter."""
    variance, mean = torch.var_mean(wide(input), list(dims), correction=0, keepdim=keepdim)
    dtype = parameter.dtype if parameter is not None else input.dtype if input.is_cpu else mean.dtype
    return mean.to(dtype), torch.rsqrt(variance + eps).to(dtype)


def _loses_digits(input: Any, *_: Any, **__: Any) -> bool:
    return _is_real(input) and (input.dtype == torch.float16 or torch.compiler.is_compiling() or in_forward_mode())


_of_groups = partial(
    register,
    kind="wrong",
    routes=ROUTES[:2],
    reason="Hessian-vector products with small vectors lose digits: in float32, 5 % are lost at 1e-6; in float16, "
    "reverse-over-reverse is NaN for inputs of size 0.02 and infinite for 100",
    reference="Wu & He (2018), eq. 1",
    covers=_loses_digits,
)


@_of_groups(torch.group_norm, F.group_norm)
def _group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Any:
    del cudnn_enabled
    return functions.group_norm(input, num_groups, weight, bias, eps) if input.numel() else UNNEEDED


@register(
    torch.native_group_norm,
    routes=ROUTES[:2],
    reason="the gradients of mean and standard deviation are zero if the normalized input is not used",
    reference="Wu & He (2018), eq. 1",
    covers=_is_real,
)
def _native_group_norm(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, N: int, C: int, HxW: int, group: int, eps: float
) -> Any:
    # Torch's kernel assumes that weight and bias are contiguous.
    strided = any(each is not None and not each.is_contiguous() for each in (weight, bias))
    if not input.numel() or not (strided or carry_derivatives((input,))):
        return UNNEEDED
    y = functions.group_norm(input, group, weight, bias, eps)
    return y, *_statistics(input.reshape(N, group, -1), [-1], eps, weight if input.is_cpu else None)


def _has_lean_rule(input: Any, normalized_shape: Any, weight: Any = None, eps: Any = None) -> bool:
    # Torch promotes other dtypes of the weight, and casts under autocast.
    del normalized_shape, eps
    return (
        isinstance(input, Tensor)
        and input.dtype in (torch.float32, torch.float64)
        and (weight is None or (isinstance(weight, Tensor) and weight.dtype == input.dtype))
        and not torch.is_autocast_enabled(input.device.type)
    )


@register(
    torch.rms_norm,
    F.rms_norm,
    kind="slow",
    reason="the double backward composes those of its parts: about thirty passes instead of one",
    covers=_has_lean_rule,
    least_elements=2**14,
    devices=("cpu",),
)
def _rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Any:
    if isinstance(normalized_shape, int) or not input.numel():
        return UNNEEDED
    return functions.rms_norm(input, normalized_shape, weight, eps)


def _by_channels(
    function: Callable[..., Tensor],
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """Call hodiff's function with arguments that torch accepts as well, and decline other arguments."""
    running = [each for each in (running_mean, running_var) if each is not None]
    dtypes = {input.dtype} if wide(input) is input else {input.dtype, torch.float32}
    if len(running) == 1 or not isinstance(momentum, (int, float)):
        return INVALID
    if not dtypes.issuperset(each.dtype for each in running):
        return unable("the running statistics have another dtype than the input")
    if not input.numel():
        return UNNEEDED
    if running and training and weight is None and bias is None and running[0].dtype != input.dtype:
        # The kernel computes statistics in the dtype of the parameters.
        weight = running[0].new_ones(input.shape[1])
    return function(input, running_mean, running_var, weight, bias, training, momentum, eps)


@_of_batches(F.batch_norm)
def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    return _by_channels(functions.batch_norm, input, running_mean, running_var, weight, bias, training, momentum, eps)


@_of_instances(F.instance_norm)
def _instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    return _by_channels(
        functions.instance_norm, input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps
    )


def _counts(self: Any, other: Any, *_: Any, **__: Any) -> bool:
    """Whether a captured integer tensor is increased inside a transform, as BatchNorm's count of batches is."""
    return (
        isinstance(self, Tensor)
        and isinstance(other, int)
        and not self.dtype.is_floating_point
        and not self.dtype.is_complex
        and not torch.compiler.is_compiling()
        and in_transform()
        and not is_wrapped(self)
    )


@register(
    Tensor.add_,
    kind="missing",
    routes=ROUTES,
    reason="torch.func does not allow in-place changes of a captured tensor, even of a batch counter without "
    "derivative",
    reference="the same operator, outside of the transform",
    covers=_counts,
)
def _count(self: Tensor, other: int, *, alpha: int = 1) -> Tensor:
    with outside_transforms():
        return self.add_(other, alpha=alpha)


# The builtins have the parameters before the statistics.


@_of_batches(torch.batch_norm)
def _builtin_batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Any:
    del cudnn_enabled
    return _batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)


@_of_instances(torch.instance_norm)
def _builtin_instance_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Any:
    del cudnn_enabled
    return _instance_norm(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)


@_of_batches(torch.native_batch_norm)
def _native_batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    if not training:
        return UNNEEDED  # torch is right, and only its kernel knows which statistics it returns
    y = _batch_norm(input, running_mean, running_var, weight, bias, True, momentum, eps)
    if isinstance(y, Declined):
        return y
    parameter = running_mean if weight is None else weight
    return y, *_statistics(input, [0, *range(2, input.dim())], eps, parameter)


@_of_batches(native_batch_norm)
def _native_batch_norm_legit(input: Tensor, weight: Any, bias: Any, *rest: Any, **options: Any) -> Any:
    # Three arguments after the bias: the overload without running statistics.
    statistics = ("running_mean", "running_var") if len(rest) + len(options) > 3 else ()
    given = dict(zip((*statistics, "training", "momentum", "eps"), rest, strict=False)) | options
    running = (given.get("running_mean"), given.get("running_var"))
    numbers = (float(given["momentum"]), float(given["eps"]))  # which may be tensors
    return _native_batch_norm(input, weight, bias, *running, given["training"], *numbers)


@_of_batches(batch_norm_with_update)
def _batch_norm_with_update(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
) -> Any:
    y = _batch_norm(input, None, None, weight, bias, True, momentum, eps)
    if isinstance(y, Declined):
        return y
    weight, bias = (None if each is None else each.detach() for each in (weight, bias))
    others = batch_norm_with_update(input.detach(), weight, bias, running_mean, running_var, momentum, eps)
    return y, *_statistics(input, [0, *range(2, input.dim())], eps, others[1]), *others[3:]
