"""The base of every elementwise Function: a formula and its slopes, and all rules of torch follow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from hodiff.functions.any_order import AnyOrderFunction
from hodiff.functions.nesting import nestable_jvp


class ElementwiseFunction(AnyOrderFunction):
    r"""$y = f(x_1, \dots, x_m)$ elementwise, with broadcasting, from a formula and its partial derivatives.

    A subclass gives `forward(*inputs)` and `slope(index, *residuals)`; backward, jvp and the batching rule follow.
    Inputs are tensors or Python constants, which get no gradient.

    $$ \bar x_i = \sum_{\text{broadcast}} \bar y \, \frac{\partial f}{\partial x_i}, \qquad
       \dot y = \sum_i \frac{\partial f}{\partial x_i} \, \dot x_i $$

    Attributes:
        saves_output: Whether `residuals` reads the output. Forward mode saves the inputs and computes the output
            again, as a saved output is not yet part of an outer graph.
    """

    saves_output = False

    @staticmethod
    def slope(index: int, *residuals: Any) -> Tensor | float:
        """Partial derivative by input `index`, made of differentiable operators of the residuals."""
        raise NotImplementedError

    @staticmethod
    def residuals(inputs: Sequence[Any], output: Any) -> Sequence[Any]:
        """What backward needs: the inputs, unless a subclass needs less. No computation belongs here."""
        del output
        return inputs

    def __init_subclass__(cls) -> None:
        # torch.compile traces plain functions only, so the rules are made for each class instead of class methods.
        super().__init_subclass__()
        cls.setup_context = staticmethod(_make_setup_context(cls))  # type: ignore[method-assign]
        cls.backward = staticmethod(_make_backward(cls))  # type: ignore[method-assign]
        cls.jvp = staticmethod(_make_jvp(cls))  # type: ignore[method-assign]
        cls.vmap = staticmethod(_make_vmap(cls))  # type: ignore[method-assign]


def _make_setup_context(cls: type[ElementwiseFunction]) -> Callable[..., None]:
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        residuals = cls.residuals(inputs, output)
        ctx.save_for_backward(*(each if isinstance(each, Tensor) else None for each in residuals))
        ctx.save_for_forward(*(each if isinstance(each, Tensor) else None for each in inputs))
        ctx.constant_residuals = tuple(None if isinstance(each, Tensor) else each for each in residuals)
        ctx.constant_inputs = tuple(None if isinstance(each, Tensor) else each for each in inputs)
        ctx.shapes = tuple(each.shape if isinstance(each, Tensor) else None for each in inputs)
        ctx.shape = output.shape
        ctx.set_materialize_grads(False)

    return setup_context


def _make_backward(cls: type[ElementwiseFunction]) -> Callable[..., Any]:
    def backward(ctx: Any, cotangent: Tensor | None) -> Any:
        if cotangent is None:
            return (None,) * len(ctx.shapes)
        residuals = _merged(ctx.saved_tensors, ctx.constant_residuals)
        return tuple(
            _times(cotangent, cls.slope(index, *residuals)).sum_to_size(shape) if needed else None
            for index, (shape, needed) in enumerate(zip(ctx.shapes, ctx.needs_input_grad, strict=True))
        )

    return backward


def _make_jvp(cls: type[ElementwiseFunction]) -> Callable[..., Any]:
    @nestable_jvp
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        inputs = _merged(ctx.saved_tensors, ctx.constant_inputs)
        residuals = cls.residuals(inputs, cls.apply(*inputs) if cls.saves_output else None)
        terms = [_times(t, cls.slope(index, *residuals)) for index, t in enumerate(tangents) if t is not None]
        tangent = terms[0]
        for term in terms[1:]:
            tangent = tangent + term
        return tangent.expand(ctx.shape)

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
    """Move each batch dimension to the front and pad shapes after it, so that broadcasting pairs batch with batch.

    Args:
        in_dims: The batch dimension of each input, or None.
        inputs: Tensors and constants.

    Returns:
        The inputs, to be broadcast against each other.
    """
    pairs = list(zip(inputs, in_dims, strict=True))
    rank = max(each.dim() - (dim is not None) for each, dim in pairs if isinstance(each, Tensor))

    def aligned(each: Tensor, dim: int) -> Tensor:
        moved = each.movedim(dim, 0)
        return moved.reshape(moved.shape[0], *(1,) * (rank - moved.dim() + 1), *moved.shape[1:])

    return tuple(each if dim is None else aligned(each, dim) for each, dim in pairs)


def _merged(tensors: Sequence[Tensor | None], constants: Sequence[Any]) -> list[Any]:
    return [constant if tensor is None else tensor for tensor, constant in zip(tensors, constants, strict=True)]
