r"""Convolutions as one family of three bilinear maps, closed under differentiation.

Input $x$, weight $w$ and output cotangent $g$ form a trilinear form, $\langle g,\, x * w \rangle$. Its gradients with
respect to $g$, $w$ and $x$ are the convolution, `ConvolutionWeightGradient` and `ConvolutionInputGradient`. Each is
linear in the two other tensors, so the derivative of any of the three is again one of the three. A derivative of any
order is therefore a number of ordinary convolution kernels, and only the wanted kernels run: none for constant data.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hodiff.functions.convolution.folded_batches import fold, fold_axis, unfold
from hodiff.rules.any_order import AnyOrderFunction
from hodiff.rules.nesting import nestable_jvp
from hodiff.rules.saving import SavingFunction


@dataclass(frozen=True, slots=True)
class Geometry:
    """All parameters of a convolution but its tensors; a tuple has one entry per spatial dimension.

    It is not a tuple, because `torch.func` would take a tuple apart and rebuild it at every level.

    Attributes:
        stride: Step of the kernel over the input.
        padding: Zeros on both sides of the input.
        dilation: Distance of the kernel's elements.
        groups: Number of blocks of channels.
        size: Spatial size of the input, which the output and a stride above 1 do not determine.
        kernel: Spatial size of the weight.
    """

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    size: tuple[int, ...]
    kernel: tuple[int, ...]

    @property
    def output_padding(self) -> tuple[int, ...]:
        """Zeros: `size` makes output padding unnecessary."""
        return (0,) * len(self.size)

    def folded(self, axis: str, batch: int) -> Geometry:
        """Return the geometry of the convolution with a batch folded into an axis."""
        return replace(self, groups=self.groups * batch) if axis == "group" else self


def _gradient_kernel(
    cotangent: Tensor, x: Tensor, weight: Tensor, bias_size: list[int] | None, geometry: Geometry, wanted: list[bool]
) -> Any:
    return torch.ops.aten.convolution_backward.default(
        cotangent,
        x,
        weight,
        bias_size,
        geometry.stride,
        geometry.padding,
        geometry.dilation,
        False,
        geometry.output_padding,
        geometry.groups,
        wanted,
    )


def _sum(*terms: Tensor | None) -> Tensor:
    """Add the terms that are not None: one or two."""
    first, *rest = [term for term in terms if term is not None]
    return first if not rest else first + rest[0]


class Convolution(AnyOrderFunction):
    """$y = x * w + b$. Saves the input and the weight."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
        """Convolve x (N, C, ...) with weight (O, C / groups, ...)."""
        g = geometry
        return torch.convolution(x, weight, bias, g.stride, g.padding, g.dilation, False, g.output_padding, g.groups)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save the two factors."""
        x, weight, _, ctx.geometry = inputs
        ctx.save_for_backward(x, weight)
        ctx.save_for_forward(x, weight)
        ctx.shape = output.shape
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor | None) -> Any:
        """Use one of the other two maps for each factor; the weight's kernel returns the bias gradient, too."""
        if cotangent is None:
            return None, None, None, None
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        by_x = by_weight = by_bias = None
        if needs_x:
            by_x = ConvolutionInputGradient.call(cotangent, weight, ctx.geometry)
        if needs_weight and needs_bias:
            by_weight, by_bias = ConvolutionWeightGradient.call(x, cotangent, ctx.geometry, True)
        elif needs_weight:
            by_weight = ConvolutionWeightGradient.call(x, cotangent, ctx.geometry, False)
        elif needs_bias:
            by_bias = cotangent.sum([0, *range(2, cotangent.dim())])
        return by_x, by_weight, by_bias, None

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, x_t: Tensor | None, weight_t: Tensor | None, bias_t: Tensor | None, _: None) -> Tensor:
        """Apply the product rule."""
        x, weight = ctx.saved_tensors
        by_x = by_weight = None
        if weight_t is not None:
            by_weight = Convolution.call(x, weight_t, bias_t, ctx.geometry)
            bias_t = None
        if x_t is not None:
            by_x = Convolution.call(x_t, weight, bias_t, ctx.geometry)
            bias_t = None
        if bias_t is not None:
            return _along_channels(bias_t, len(ctx.shape)).expand(ctx.shape)
        return _sum(by_x, by_weight)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry
    ) -> tuple[Tensor, int | None]:
        """Fold the batch into an axis that the batched tensors share."""
        x_dim, weight_dim, bias_dim, _ = in_dims
        fused = bias is not None and (bias_dim is None) == (weight_dim is None)
        if x_dim is None and weight_dim is None:
            y, y_dim = Convolution.call(x, weight, None, geometry), None
        else:
            axis = fold_axis(x=x_dim is not None, weight=weight_dim is not None, output=True)
            groups = geometry.groups
            y = Convolution.call(
                fold(x, "x", x_dim, axis, groups),
                fold(weight, "weight", weight_dim, axis, groups),
                fold(bias, "bias", bias_dim, axis, groups) if fused and bias is not None else None,
                geometry.folded(axis, info.batch_size),
            )
            y, y_dim = unfold(y, "output", axis, groups, info.batch_size), 0
        if bias is None or fused:
            return y, y_dim
        if bias_dim is not None:
            rows = bias.movedim(bias_dim, 0)
            return y + rows.reshape(rows.shape[0], 1, *rows.shape[1:], *[1] * len(geometry.size)), 0
        return y + _along_channels(bias, len(geometry.size) + 2), y_dim


class ConvolutionInputGradient(SavingFunction):
    r"""$\bar x$ of $\langle g,\, x * w \rangle$: the transposed convolution. Saves cotangent and weight."""

    saves = 2

    @staticmethod
    def forward(cotangent: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
        """Compute the gradient of the input, (N, C, ...)."""
        # The kernel reads only the shape of x.
        x = cotangent.new_empty((cotangent.shape[0], weight.shape[1] * geometry.groups, *geometry.size))
        return _gradient_kernel(cotangent, x, weight, None, geometry, [True, False, False])[0]

    @staticmethod
    def backward(ctx: Any, x_bar: Tensor | None) -> Any:
        """Return the convolution for the cotangent, the weight gradient for the weight."""
        if x_bar is None:
            return None, None, None
        cotangent, weight = ctx.saved_tensors
        needs_cotangent, needs_weight, _ = ctx.needs_input_grad
        return (
            Convolution.call(x_bar, weight, None, *ctx.rest) if needs_cotangent else None,
            ConvolutionWeightGradient.call(x_bar, cotangent, *ctx.rest, False) if needs_weight else None,
            None,
        )

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, cotangent_t: Tensor | None, weight_t: Tensor | None, _: None) -> Tensor:
        """Apply the product rule."""
        cotangent, weight = ctx.saved_tensors
        rule = ConvolutionInputGradient.call
        return _sum(
            None if cotangent_t is None else rule(cotangent_t, weight, *ctx.rest),
            None if weight_t is None else rule(cotangent, weight_t, *ctx.rest),
        )

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], cotangent: Tensor, weight: Tensor, geometry: Geometry
    ) -> tuple[Tensor, int]:
        """Fold the batch into an axis that the batched tensors share."""
        cotangent_dim, weight_dim, _ = in_dims
        axis = fold_axis(x=True, weight=weight_dim is not None, output=cotangent_dim is not None)
        groups = geometry.groups
        x_bar = ConvolutionInputGradient.call(
            fold(cotangent, "output", cotangent_dim, axis, groups),
            fold(weight, "weight", weight_dim, axis, groups),
            geometry.folded(axis, info.batch_size),
        )
        return unfold(x_bar, "x", axis, groups, info.batch_size), 0


class ConvolutionWeightGradient(SavingFunction):
    r"""$\bar w$ of $\langle g,\, x * w + b \rangle$, and $\bar b$ if wanted. Saves input and cotangent."""

    saves = 2

    @staticmethod
    def forward(x: Tensor, cotangent: Tensor, geometry: Geometry, with_bias: bool) -> Any:
        """Compute the gradients of the weight, (O, C / groups, ...), and of the bias, (O,)."""
        channels = cotangent.shape[1]
        # The kernel reads only the shape of the weight.
        weight = x.new_empty((channels, x.shape[1] // geometry.groups, *geometry.kernel))
        by_weight, by_bias = _gradient_kernel(
            cotangent, x, weight, [channels] if with_bias else None, geometry, [False, True, with_bias]
        )[1:]
        return (by_weight, by_bias) if with_bias else by_weight

    @staticmethod
    def backward(ctx: Any, weight_bar: Tensor | None, bias_bar: Tensor | None = None) -> Any:
        """Return the input gradient for the input, the convolution for the cotangent."""
        x, cotangent = ctx.saved_tensors
        geometry, _ = ctx.rest
        needs_x, needs_cotangent, *_ = ctx.needs_input_grad
        by_x = by_cotangent = None
        if needs_x and weight_bar is not None:
            by_x = ConvolutionInputGradient.call(cotangent, weight_bar, geometry)
        if needs_cotangent and weight_bar is not None:
            by_cotangent = Convolution.call(x, weight_bar, bias_bar, geometry)
        elif needs_cotangent and bias_bar is not None:
            by_cotangent = _along_channels(bias_bar, cotangent.dim()).expand(cotangent.shape)
        return by_x, by_cotangent, None, None

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, x_t: Tensor | None, cotangent_t: Tensor | None, *_: None) -> Any:
        """Apply the product rule; the bias gradient does not depend on the input."""
        x, cotangent = ctx.saved_tensors
        geometry, with_bias = ctx.rest
        rule = ConvolutionWeightGradient.call
        by_weight = by_bias = None
        if cotangent_t is not None:
            both = rule(x, cotangent_t, geometry, with_bias)
            by_weight, by_bias = both if with_bias else (both, None)
        if x_t is not None:
            by_weight = _sum(by_weight, rule(x_t, cotangent, geometry, False))
        if not with_bias:
            return by_weight
        return by_weight, cotangent.new_zeros(cotangent.shape[1]) if by_bias is None else by_bias

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], x: Tensor, cotangent: Tensor, geometry: Geometry, with_bias: bool
    ) -> tuple[Any, Any]:
        """Fold the batch into an axis that the batched tensors share."""
        x_dim, cotangent_dim, *_ = in_dims
        axis = fold_axis(x=x_dim is not None, weight=True, output=cotangent_dim is not None)
        groups = geometry.groups
        result = ConvolutionWeightGradient.call(
            fold(x, "x", x_dim, axis, groups),
            fold(cotangent, "output", cotangent_dim, axis, groups),
            geometry.folded(axis, info.batch_size),
            with_bias,
        )
        if not with_bias:
            return unfold(result, "weight", axis, groups, info.batch_size), 0
        by_weight = unfold(result[0], "weight", axis, groups, info.batch_size)
        if cotangent_dim is None:
            return (by_weight, result[1]), (0, None)
        return (by_weight, unfold(result[1], "bias", axis, groups, info.batch_size)), (0, 0)


def _along_channels(bias: Tensor, rank: int) -> Tensor:
    return bias.reshape(1, -1, *[1] * (rank - 2))
