"""Right at first order, but an intermediate or an inner rule is treated as constant: HD103, HD105 and HD115."""

import torch
from torch.autograd import Function
from zoo.bases import (
    BIAS,
    MATRIX,
    WEIGHT,
    Cube,
    Exponential,
    Linear,
    SavesInputs,
    X,
    Y,
)
from zoo.specimen import Wrong

from hodiff.functions import nestable_jvp


class SavedSlope(Cube):
    """setup_context computes the slope outside the graph."""

    @staticmethod
    def setup_context(ctx, inputs, output):
        (x,) = inputs
        ctx.save_for_backward(3 * x**2)
        ctx.save_for_forward(x)

    @staticmethod
    def backward(ctx, g):
        (slope,) = ctx.saved_tensors
        return slope * g


class SavedNorm(SavesInputs):
    """x / |x|, with a saved norm."""

    @staticmethod
    def forward(x):
        return x / x.norm()

    @staticmethod
    def setup_context(ctx, inputs, output):
        (x,) = inputs
        ctx.save_for_backward(x, x.norm())
        ctx.save_for_forward(x)

    @staticmethod
    def backward(ctx, g):
        x, norm = ctx.saved_tensors
        return g / norm - x * (x * g).sum() / norm**3

    @staticmethod
    @nestable_jvp
    def jvp(ctx, t):
        (x,) = ctx.saved_tensors
        norm = x.norm()
        return t / norm - x * (x * t).sum() / norm**3


class ResidualWithoutGradient(Function):
    """The residual is an output that is marked non-differentiable."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.sinh(), x.cosh()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, g, _):
        (cosh,) = ctx.saved_tensors
        return cosh * g

    @staticmethod
    @nestable_jvp
    def jvp(ctx, t):
        (x,) = ctx.saved_tensors
        return x.cosh() * t, None


def sinh_without_gradient(x):
    return ResidualWithoutGradient.apply(x)[0]


class SavedActivation(Linear):
    """tanh(X Wᵀ + b), with the activation's slope saved."""

    @staticmethod
    def forward(X, W, b):
        return torch.tanh(X @ W.T + b)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0], inputs[1], 1 - output**2)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, g):
        X, W, slope = ctx.saved_tensors
        X_needed, W_needed, b_needed = ctx.needs_input_grad
        g = slope * g
        return g @ W if X_needed else None, g.T @ X if W_needed else None, g.sum(0) if b_needed else None

    @staticmethod
    @nestable_jvp
    def jvp(ctx, X_t, W_t, b_t):
        X, W, b = ctx.saved_tensors
        return (1 - torch.tanh(X @ W.T + b) ** 2) * (X_t @ W.T + X @ W_t.T + b_t)


class SavedRatioOfTwo(SavesInputs):
    """x² / y, with a saved intermediate of both inputs."""

    @staticmethod
    def forward(x, y):
        return x * x / y

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, y = inputs
        ctx.save_for_backward(x / y)
        ctx.save_for_forward(x, y)

    @staticmethod
    def backward(ctx, g):
        (ratio,) = ctx.saved_tensors
        x_needed, y_needed = ctx.needs_input_grad
        return 2 * ratio * g if x_needed else None, -ratio * ratio * g if y_needed else None

    @staticmethod
    @nestable_jvp
    def jvp(ctx, x_t, y_t):
        x, y = ctx.saved_tensors
        return 2 * x / y * x_t - (x / y) ** 2 * y_t


def inside_a_plain_function(x):
    """Call the wrong Function two calls deep."""
    return torch.sin(x) * SavedSlope.apply(x).sum()


class IgnoredPreactivation(Function):
    """tanh(X Wᵀ), with the slope as an output whose gradient is ignored."""

    generate_vmap_rule = True

    @staticmethod
    def forward(X, W):
        y = torch.tanh(X @ W.T)
        return y, 1 - y * y

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs, output[1])
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, g, g_slope):
        X, W, slope = ctx.saved_tensors
        X_needed, W_needed = ctx.needs_input_grad
        g = slope * g
        return g @ W if X_needed else None, g.T @ X if W_needed else None

    @staticmethod
    @nestable_jvp
    def jvp(ctx, X_t, W_t):
        X, W = ctx.saved_tensors
        y = torch.tanh(X @ W.T)
        z_t = X_t @ W.T + X @ W_t.T
        return (1 - y * y) * z_t, -2 * y * (1 - y * y) * z_t


def tanh_layer(X, W):
    return IgnoredPreactivation.apply(X, W)[0]


class IgnoredNorm(Function):
    """x / |x|, with the norm as an output whose gradient is ignored."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        norm = x.norm()
        return x / norm, norm

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs, output[1])
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, g, g_norm):
        x, norm = ctx.saved_tensors
        return g / norm - x * (x * g).sum() / norm**3

    @staticmethod
    @nestable_jvp
    def jvp(ctx, t):
        (x,) = ctx.saved_tensors
        norm = x.norm()
        along = (x * t).sum()
        return t / norm - x * along / norm**3, along / norm


def normalized(x):
    return IgnoredNorm.apply(x)[0]


class CutCosine(SavesInputs):
    """cos(x), with a right first derivative and a cut second derivative."""

    @staticmethod
    def forward(x):
        return x.cos()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return -x.detach().sin() * g

    @staticmethod
    @nestable_jvp
    def jvp(ctx, t):
        (x,) = ctx.saved_tensors
        return -x.detach().sin() * t


class WrongThirdOrderBothModes(Exponential):
    """sin(x), whose cosine is right to first order only."""

    @staticmethod
    def forward(x):
        return x.sin()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return CutCosine.apply(x) * g

    @staticmethod
    @nestable_jvp
    def jvp(ctx, t):
        (x,) = ctx.saved_tensors
        return CutCosine.apply(x) * t


LAYER = (MATRIX, WEIGHT, BIAS)


SPECIMENS = [
    Wrong("saved_norm", SavedNorm, X, ("HD103",)),
    Wrong("residual_without_gradient", sinh_without_gradient, X, ("HD103",)),
    Wrong("saved_activation", SavedActivation, LAYER, ("HD103",)),
    Wrong("saved_ratio_of_two", SavedRatioOfTwo, (X, Y), ("HD103",)),
    Wrong("inside_a_plain_function", inside_a_plain_function, X, ("HD103",)),
    Wrong("ignored_preactivation", tanh_layer, (MATRIX, WEIGHT), ("HD105",)),
    Wrong("ignored_norm", normalized, X, ("HD105",)),
    Wrong("wrong_third_order_both_modes", WrongThirdOrderBothModes, X, ("HD104", "HD115"), {"order": 3}),
]
