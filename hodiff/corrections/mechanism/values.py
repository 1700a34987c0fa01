"""Helpers of rules: tensors with torch's value and the derivatives of a formula, numbers of tensors, result dtypes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from hodiff.rules.elementwise import ElementwiseFunction
from hodiff.torch_internals.autograd.grad_mode import in_fx_trace, in_jit_trace
from hodiff.torch_internals.autograd.transforms import in_func_vmap
from hodiff.torch_internals.autograd.wrapped_tensors import below_transforms

# Tensors of other types, such as a compiler's, may hold no numbers.
_PLAIN = {Tensor, Parameter}


class WithValue(ElementwiseFunction):
    """The derivatives of the first tensor with the value of the second, which is a constant. Saves nothing."""

    @staticmethod
    def forward(y: Tensor, value: Tensor) -> Tensor:
        """Copy the value."""
        del y
        return value.clone()

    @staticmethod
    def residuals(inputs: Sequence[Any], output: Any) -> Sequence[Any]:
        """Return no residuals."""
        del inputs, output
        return ()

    @staticmethod
    def slope(index: int) -> float:
        """1 for the first tensor, 0 for the second."""
        return 1.0 - index


def with_value_of(y: Tensor, function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Return a tensor with the derivatives of y and the value of a torch function at constants."""
    # Under `vmap`, for which the function may have no rule, the value stays that of y.
    if torch.compiler.is_compiling() or in_func_vmap():
        return y
    return with_value(y, function(*(each.detach() if isinstance(each, Tensor) else each for each in args), **kwargs))


def with_value(y: Tensor, value: Tensor) -> Tensor:
    """Return a tensor with the derivatives of one tensor and the value of another, of the same shape and dtype."""
    # A compiler differentiates the operators in a Function's forward, so the value is the formula's there.
    return y if torch.compiler.is_compiling() else WithValue.call(y, value.detach())


def numbers_of(x: Tensor) -> Tensor | None:
    """Return a tensor's numbers below all transforms, detached; None while a graph is traced, or if it holds none."""
    if torch.compiler.is_compiling() or in_fx_trace() or in_jit_trace():
        return None
    plain = below_transforms(x)
    return plain.detach() if type(plain) in _PLAIN and not plain.is_meta and plain.numel() else None


def save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Save the inputs, all of them tensors: `setup_context` of a Function."""
    del output
    ctx.save_for_backward(*inputs)
    ctx.save_for_forward(*inputs)
    ctx.set_materialize_grads(False)


def result_dtype(a: Any, b: Any) -> torch.dtype:
    """Return `torch.result_type`, also while dynamo traces, which does not support it."""
    if not torch.compiler.is_compiling():
        return torch.result_type(a, b)
    # Nothing uses these tensors, so a compiler removes them.
    one, other = (torch.zeros_like(each) if isinstance(each, Tensor) else each for each in (a, b))
    dtype: torch.dtype = (one + other).dtype
    return dtype


def mixes_complex_number(a: Any, b: Any) -> bool:
    """Whether a real tensor meets a complex number, where forward mode drops the imaginary part of the tangent."""
    tensor, number = (a, b) if isinstance(a, Tensor) else (b, a)
    return isinstance(number, complex) and isinstance(tensor, Tensor) and not tensor.is_complex()


def in_complex_dtype(a: Any, b: Any) -> tuple[Any, Any]:
    """Return a tensor and a number, with the tensor in the dtype of their result."""
    dtype = result_dtype(a, b)
    one, other = (each.to(dtype) if isinstance(each, Tensor) else each for each in (a, b))
    return one, other
