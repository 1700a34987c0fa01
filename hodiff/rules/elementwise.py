"""Base class of elementwise Functions, which derives all rules of torch from a formula and its slopes.

Clipping with the same derivative at the bounds in every version of torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hodiff.kernels import fused
from hodiff.rules.any_order import AnyOrderFunction
from hodiff.rules.nesting import nestable_jvp

# Later versions of torch treat the bounds as outside.
_TAKES_ENDS_FOR_INSIDE = torch.__version__ < "2.14"


def clip(x: Tensor, low: Any, high: Any) -> Tensor:
    """Clamp x as `torch.clamp`; the derivative is 1 between the bounds, bounds included, and 0 outside."""
    if _TAKES_ENDS_FOR_INSIDE:
        return x.clamp(low, high)
    # Pass the gradient to x where nothing is clipped; the mask takes one byte per element.
    clipped = x.detach().clamp(low, high)
    return torch.where(x.detach() == clipped.detach(), x, clipped)


class ElementwiseFunction(AnyOrderFunction):
    r"""$y = f(x_1, \dots, x_m)$ elementwise, with broadcasting, from a formula and its partial derivatives.

    A subclass defines `forward(*inputs)` and `slope(index, *residuals)`, or `scaled_slope`, the product with a tangent
    or cotangent, or `derivative`; backward, jvp and the batching rule follow. Inputs are tensors or Python constants,
    which get no gradient.

    $$ \bar x_i = \sum_{\text{broadcast}} \bar y \, \frac{\partial f}{\partial x_i}, \qquad
       \dot y = \sum_i \frac{\partial f}{\partial x_i} \, \dot x_i $$

    Attributes:
        saves_output: Whether `residuals` reads the output. Forward mode saves the inputs and computes the output
            again, as a saved output is not yet part of an outer graph.
        kernel: Name in `hodiff.kernels.fused` of a function of one tensor that has a kernel. The kernel computes
            `forward`, and `scaled` without an intermediate tensor.
        derivative: The derivative of a function of one tensor, if it is such a class.
    """

    saves_output = False
    kernel = ""
    derivative: type[ElementwiseFunction] | None = None

    @staticmethod
    def slope(index: int, *residuals: Any) -> Tensor | float:
        """Partial derivative with respect to input `index`, by differentiable operators of the residuals."""
        raise NotImplementedError

    @staticmethod
    def scaled_slope(vector: Tensor, index: int, *residuals: Any) -> Tensor:
        """Multiply a tangent or cotangent by `slope`."""
        raise NotImplementedError

    @staticmethod
    def pull(cotangent: Tensor, wanted: Sequence[bool], shapes: Sequence[Any], *residuals: Any) -> list[Tensor | None]:
        """Return cotangents of the wanted inputs, summed to their shapes; override it to share work."""
        raise NotImplementedError

    @staticmethod
    def scaled(vector: Tensor, *inputs: Any) -> Tensor:
        """Multiply a tensor by the function, in one Function if that saves passes over memory."""
        raise NotImplementedError

    @staticmethod
    def residuals(inputs: Sequence[Any], output: Any) -> Sequence[Any]:
        """Select the values that backward needs: the inputs, unless overridden. Do not compute anything here."""
        del output
        return inputs

    def __init_subclass__(cls) -> None:
        # torch.compile traces plain functions only, so make the rules for each class instead of class methods.
        if "kernel" in cls.__dict__:
            cls.forward = staticmethod(_with_kernel(cls.kernel, cls.forward))  # type: ignore[method-assign]
        super().__init_subclass__()
        if not cls._is_twin:
            if "scaled_slope" not in cls.__dict__:
                cls.scaled_slope = staticmethod(_make_scaled_slope(cls))  # type: ignore[method-assign]
            if "pull" not in cls.__dict__:
                cls.pull = staticmethod(_make_pull(cls))  # type: ignore[method-assign]
        cls.scaled = staticmethod(_make_scaled(cls))  # type: ignore[method-assign]
        cls.setup_context = staticmethod(_make_setup_context(cls))  # type: ignore[method-assign]
        cls.backward = staticmethod(_make_backward(cls))  # type: ignore[method-assign]
        cls.jvp = staticmethod(_make_jvp(cls))  # type: ignore[method-assign]
        cls.vmap = staticmethod(_make_vmap(cls))  # type: ignore[method-assign]


def _with_kernel(name: str, formula: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(formula)
    def forward(x: Tensor) -> Tensor:
        return fused.elementwise(name, x) if fused.takes(x) else formula(x)

    return forward


def _make_scaled_slope(cls: type[ElementwiseFunction]) -> Callable[..., Tensor]:
    if cls.derivative is None:
        return lambda vector, index, *residuals: _times(vector, cls.slope(index, *residuals))
    times = cls.derivative.scaled
    return lambda vector, index, x: times(vector, x)


def _make_pull(cls: type[ElementwiseFunction]) -> Callable[..., list[Tensor | None]]:
    def pull(cotangent: Tensor, wanted: Sequence[bool], shapes: Sequence[Any], *residuals: Any) -> list[Tensor | None]:
        return [
            summed_to(shape, cls.scaled_slope(cotangent, index, *residuals)) if needed else None
            for index, (shape, needed) in enumerate(zip(shapes, wanted, strict=True))
        ]

    return pull


def _make_scaled(cls: type[ElementwiseFunction]) -> Callable[..., Tensor]:
    call = cls.call
    if "kernel" not in cls.__dict__:
        return lambda vector, *inputs: vector * call(*inputs)

    times = _times_function(cls).call

    def scaled(vector: Tensor, x: Tensor) -> Tensor:
        return times(vector, x) if fused.suit(vector, x) else vector * call(x)

    return scaled


def _times_function(cls: Any) -> Any:
    """Create the Function $v f(x)$ of v and x."""

    class Times(ElementwiseFunction):
        @staticmethod
        def forward(vector: Tensor, x: Tensor) -> Tensor:
            if vector.shape == x.shape and fused.takes(vector, x):
                return fused.elementwise(cls.kernel, x, vector)
            return vector * cls.forward(x)

        @staticmethod
        def scaled_slope(cotangent: Tensor, index: int, *residuals: Any) -> Tensor:
            vector, x = residuals
            return cls.scaled(cotangent, x) if index == 0 else cls.scaled_slope(cotangent * vector, 0, x)

    one_by_one = Times.backward

    def backward(ctx: Any, cotangent: Tensor | None) -> Any:
        # If nothing records the backward pass, one pass computes both cotangents.
        if cotangent is not None and all(ctx.needs_input_grad) and cls.kernel in fused.pullbacks():
            vector, x = ctx.saved_tensors
            if vector.shape == x.shape and fused.takes(vector, x, cotangent):
                return fused.pullback(cls.kernel, x, vector, cotangent)
        return one_by_one(ctx, cotangent)

    Times.backward = staticmethod(backward)  # type: ignore[method-assign]
    Times.__name__, Times.__qualname__ = f"Times{cls.__name__}", f"Times{cls.__qualname__}"
    return Times


def _make_setup_context(cls: type[ElementwiseFunction]) -> Callable[..., None]:
    saves_inputs = cls.residuals is ElementwiseFunction.residuals

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        tensors, ctx.constant_inputs = _parted(inputs)
        ctx.save_for_forward(*tensors)
        if saves_inputs:
            ctx.constant_residuals = ctx.constant_inputs
        else:
            tensors, ctx.constant_residuals = _parted(cls.residuals(inputs, output))
        ctx.save_for_backward(*tensors)
        ctx.shapes = tuple([each.shape if isinstance(each, Tensor) else None for each in inputs])
        ctx.shape = output.shape
        ctx.set_materialize_grads(False)

    return setup_context


def _make_backward(cls: type[ElementwiseFunction]) -> Callable[..., Any]:
    def backward(ctx: Any, cotangent: Tensor | None) -> Any:
        if cotangent is None:
            return (None,) * len(ctx.shapes)
        residuals = _merged(ctx.saved_tensors, ctx.constant_residuals)
        return tuple(cls.pull(cotangent, ctx.needs_input_grad, ctx.shapes, *residuals))

    return backward


def _make_jvp(cls: type[ElementwiseFunction]) -> Callable[..., Any]:
    @nestable_jvp
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        inputs = _merged(ctx.saved_tensors, ctx.constant_inputs)
        residuals = cls.residuals(inputs, cls.apply(*inputs) if cls.saves_output else None)
        terms = [cls.scaled_slope(t, index, *residuals) for index, t in enumerate(tangents) if t is not None]
        tangent = sum(terms[1:], terms[0])
        # Two tangents must not share memory, because functions may change one of them in place.
        return (tangent.clone() if any(tangent is t for t in tangents) else tangent).expand(ctx.shape)

    return jvp


def _times(vector: Tensor, slope: Tensor | float) -> Tensor:
    # A slope of one is not worth a pass over the vector.
    return vector if isinstance(slope, float) and slope == 1.0 else vector * slope


def _make_vmap(cls: type[ElementwiseFunction]) -> Callable[..., Any]:
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Tensor, int]:
        del info
        return cls.apply(*batch_in_front(in_dims, inputs)), 0

    return vmap


def batch_in_front(in_dims: Sequence[int | None], inputs: Sequence[Any]) -> tuple[Any, ...]:
    """Move each batch dimension to the front and pad shapes after it, so that broadcasting pairs batch with batch."""
    pairs = list(zip(inputs, in_dims, strict=True))
    rank = max(each.dim() - (dim is not None) for each, dim in pairs if isinstance(each, Tensor))

    def aligned(each: Tensor, dim: int) -> Tensor:
        moved = each.movedim(dim, 0)
        return moved.reshape(moved.shape[0], *(1,) * (rank - moved.dim() + 1), *moved.shape[1:])

    return tuple(each if dim is None else aligned(each, dim) for each, dim in pairs)


def summed_to(shape: torch.Size, tensor: Tensor) -> Tensor:
    """Apply `sum_to_size`, which takes the time of an operator even if the tensor has that shape."""
    return tensor if tensor.shape == shape else tensor.sum_to_size(shape)


def _parted(values: Sequence[Any]) -> tuple[list[Tensor | None], list[Any]]:
    """Return the tensors and the constants among some values, with None in the places of the others."""
    tensors = [each if isinstance(each, Tensor) else None for each in values]
    return tensors, [None if isinstance(each, Tensor) else each for each in values]


def _merged(tensors: Sequence[Tensor | None], constants: Sequence[Any]) -> list[Any]:
    return [constant if tensor is None else tensor for tensor, constant in zip(tensors, constants, strict=True)]
