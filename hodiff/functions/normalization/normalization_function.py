r"""The Function behind every normalization, $y = \hat x w + b$, and its gradient as a second Function.

Torch's fused kernels compute values and first gradients. The backward kernel needs the mean and
$1 / \sqrt{\operatorname{var} + \varepsilon}$, which the forward kernel returns as non-differentiable outputs. They are
a cache: each rule below is a formula of input, weight and cotangent alone, and derivatives never go through the
statistics.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hodiff.functions.normalization import standardization as formulas
from hodiff.functions.normalization.kernels import curvature_kernel, gradient_kernel, value_kernel
from hodiff.functions.normalization.standardization import (
    StatisticsLayout,
    aligned,
    curvature,
    merge,
    plus,
    project,
    reduced,
    split,
    weighted,
    wide,
)
from hodiff.rules.any_order import AnyOrderFunction
from hodiff.rules.nesting import nestable_jvp
from hodiff.rules.saving import placed


class Normalization(AnyOrderFunction):
    """Standardizes, scales and shifts. Saves the input, the weight and the statistics (2 or 3 numbers per group)."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor | None, bias: Tensor | None, layout: StatisticsLayout) -> tuple[Tensor, ...]:
        """Compute the value and, if by a kernel, the statistics."""
        # Compiled forward mode ignores `jvp` and differentiates the formula; the compiler fuses it anyway.
        if torch.compiler.is_compiling() or not layout.centered:
            return (formulas.normalized(x, weight, bias, layout),)
        return value_kernel(x, weight, bias, layout)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Save the inputs, and the statistics as a cache."""
        x, weight, _, ctx.layout = inputs
        statistics = output[1:]
        if statistics:
            ctx.mark_non_differentiable(*statistics)
        ctx.statistics = len(statistics)
        ctx.save_for_backward(x, weight, *statistics)
        ctx.save_for_forward(x, weight)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor | None, *_: None) -> Any:
        """Compute the wanted gradients."""
        wanted = tuple(ctx.needs_input_grad[:3])
        if cotangent is None or not any(wanted):
            return None, None, None, None
        x, weight, *statistics = ctx.saved_tensors
        if torch.compiler.is_compiling():
            found = formulas.gradient(cotangent, x, weight, ctx.layout, wanted)
        else:
            found = NormalizationGradient.call(cotangent, x, weight, ctx.layout, wanted, *statistics)
        return (*placed(found, wanted), None)

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, x_t: Tensor | None, weight_t: Tensor | None, bias_t: Tensor | None, _: None) -> Any:
        r"""Compute $w D \dot x + \hat x \dot w + \dot b$."""
        x, weight = ctx.saved_tensors
        layout = ctx.layout
        standardized, r = formulas.standardize(x, layout)
        tangent: Any = None
        if x_t is not None:
            d = merge(r * project(split(wide(x_t), layout), standardized, layout), layout)
            tangent = weighted(d, weight, layout)
        if weight_t is not None:
            tangent = plus(tangent, weighted(merge(standardized, layout), weight_t, layout))
        if bias_t is not None:
            shift = aligned(bias_t, layout).expand_as(x)
            # Two tangents must not share memory, because functions may change one of them in place.
            tangent = shift.clone() if tangent is None else plus(tangent, shift)
        return (tangent.to(x.dtype), *[None] * ctx.statistics)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, weight: Any, bias: Any, layout: StatisticsLayout) -> Any:
        """Use the kernel if the batch can become samples, else the formula."""
        x_dim, weight_dim, bias_dim, _ = in_dims
        samples = x_dim is not None and weight_dim is None and bias_dim is None
        if samples and layout.kind == "trailing":
            outputs = Normalization.call(x.movedim(x_dim, 0), weight, bias, layout._replace(rank=layout.rank + 1))
        elif samples and layout.kind == "groups":
            x = x.movedim(x_dim, 0)
            outputs = Normalization.call(x.reshape(-1, *x.shape[2:]), weight, bias, layout)
            outputs = tuple(each.reshape(*x.shape[:2], *each.shape[1:]) for each in outputs)
        else:
            x, weight, bias = _in_front(in_dims, x, weight, bias)
            outputs = (formulas.normalized(x, weight, bias, layout),)
        return outputs, (0,) * len(outputs)


class NormalizationGradient(AnyOrderFunction):
    """The wanted gradients of input, weight and bias. Saves cotangent, input and weight."""

    @staticmethod
    def forward(
        cotangent: Tensor,
        x: Tensor,
        weight: Tensor | None,
        layout: StatisticsLayout,
        wanted: tuple[bool, ...],
        *statistics: Tensor,
    ) -> tuple[Tensor, ...]:
        """Compute a tuple of the wanted gradients."""
        # The kernel returns NaN for instances without elements.
        if statistics and x.numel():
            return gradient_kernel(cotangent, x, weight, layout, wanted, *statistics)
        return formulas.gradient(cotangent, x, weight, layout, wanted)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Save the tensors that determine the gradients, without the statistics."""
        del output
        cotangent, x, weight, ctx.layout, ctx.wanted, *statistics = inputs
        ctx.statistics = len(statistics)
        ctx.save_for_backward(cotangent, x, weight)
        ctx.save_for_forward(cotangent, x, weight)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        r"""Return $w D u + a \hat x + c$, $\partial_x \langle u, D p \rangle + D (a g)$, $\sum g D u$ for g, x, w."""
        cotangent, x, weight = ctx.saved_tensors
        layout = ctx.layout
        u, a, c = placed(cotangents, ctx.wanted)
        needs_g, needs_x, needs_weight = ctx.needs_input_grad[:3]
        found = None if u is None else curvature_kernel(cotangent, x, weight, u, a, c, layout)
        if found is not None:
            needed = [each if need else None for each, need in zip(found, ctx.needs_input_grad[:3], strict=True)]
            return (*needed, *[None] * (2 + ctx.statistics))
        g = wide(cotangent)
        standardized, r = formulas.standardize(x, layout)
        by_g: Any = None
        by_x: Any = None
        by_weight: Any = None
        if u is not None:
            u = split(wide(u), layout)
            if needs_g or needs_weight:
                d = merge(r * project(u, standardized, layout), layout)
                by_g = weighted(d, weight, layout) if needs_g else None
                by_weight = reduced(g * d, layout) if needs_weight else None
            if needs_x:
                p = split(weighted(g, weight, layout), layout)
                by_x = curvature(u, p, standardized, r, layout)
        if a is not None:
            if needs_g:
                by_g = plus(by_g, weighted(merge(standardized, layout), a, layout))
            if needs_x:
                q = split(weighted(g, a, layout), layout)
                by_x = plus(by_x, r * project(q, standardized, layout))
        if c is not None and needs_g:
            by_g = plus(by_g, aligned(c, layout).expand_as(cotangent))
        return (
            None if by_g is None else by_g.to(cotangent.dtype),
            None if by_x is None else merge(by_x, layout).to(x.dtype),
            None if by_weight is None else by_weight.to(weight.dtype),
            *[None] * (2 + ctx.statistics),
        )

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, g_t: Tensor | None, x_t: Tensor | None, weight_t: Tensor | None, *_: None) -> tuple[Tensor, ...]:
        """Compute the tangent of each wanted gradient."""
        cotangent, x, weight = ctx.saved_tensors
        layout, wanted = ctx.layout, ctx.wanted
        g = wide(cotangent)
        standardized, r = formulas.standardize(x, layout)
        x_t = None if x_t is None else split(wide(x_t), layout)
        tangents = []
        if wanted[0]:
            by_x: Any = None
            if x_t is not None:
                p = split(weighted(g, weight, layout), layout)
                by_x = curvature(p, x_t, standardized, r, layout)
            p_t = plus(
                None if g_t is None else weighted(wide(g_t), weight, layout),
                None if weight_t is None else weighted(g, weight_t, layout),
            )
            if p_t is not None:
                by_x = plus(by_x, r * project(split(p_t, layout), standardized, layout))
            tangents.append(merge(by_x, layout).to(x.dtype))
        if wanted[1]:
            product = plus(
                None if g_t is None else wide(g_t) * merge(standardized, layout),
                None if x_t is None else g * merge(r * project(x_t, standardized, layout), layout),
            )
            product = torch.zeros_like(g) if product is None else product
            tangents.append(reduced(product, layout).to(layout.parameter_dtype))
        if wanted[2]:
            tangents.append(
                reduced(torch.zeros_like(g) if g_t is None else wide(g_t), layout).to(layout.parameter_dtype)
            )
        return tuple(tangents)

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[Any, ...],
        cotangent: Tensor,
        x: Tensor,
        weight: Tensor | None,
        layout: StatisticsLayout,
        wanted: tuple[bool, ...],
        *_: Tensor,
    ) -> Any:
        """Use the formula, which takes batches in front; unbatched inputs are standardized once."""
        cotangent, x, weight = _in_front(in_dims, cotangent, x, weight)
        if in_dims[0] is None:
            cotangent = cotangent.expand(info.batch_size, *cotangent.shape)
        found = formulas.gradient(cotangent, x, weight, layout, wanted)
        return found, (0,) * len(found)


def _in_front(in_dims: tuple[Any, ...], *tensors: Tensor | None) -> tuple[Any, ...]:
    return tuple(
        each if each is None or dim is None else each.movedim(dim, 0)
        for each, dim in zip(tensors, in_dims, strict=False)
    )
