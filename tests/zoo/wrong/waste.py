"""Wasteful rules, and points and functions that a check cannot judge: HD501, HD502, HD901 and HD903."""

import torch
import torch.nn.functional as F
from torch.autograd import Function
from zoo.bases import BIAS, MATRIX, WEIGHT, Cube, Linear, Scale, SumOfSquares, X, Y, double
from zoo.specimen import Wrong

from hodiff.functions import nestable_jvp


class AllGradients(Linear):
    @staticmethod
    def backward(ctx, g):
        X, W = ctx.saved_tensors
        return g @ W, g.T @ X, g.sum(0)


class GradientForConstant(Scale):
    @staticmethod
    def backward(ctx, g):
        x, y = ctx.saved_tensors
        return (g * y).sum_to_size(x.shape), (g * x).sum_to_size(y.shape)


def layer_with_all_gradients(X, W, b):
    return torch.tanh(AllGradients.apply(X, W, b))


class UnreadBias(Linear):
    """The bias is saved, but no rule reads it."""

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs[:2])

    @staticmethod
    def backward(ctx, g):
        X, W, _ = ctx.saved_tensors
        X_needed, W_needed, b_needed = ctx.needs_input_grad
        return g @ W if X_needed else None, g.T @ X if W_needed else None, g.sum(0) if b_needed else None


class UnreadInput(SumOfSquares):
    """The mean of x; x is saved although the rules need only its shape."""

    @staticmethod
    def forward(x):
        return x.mean()

    @staticmethod
    def setup_context(ctx, inputs, output):
        (x,) = inputs
        ctx.save_for_backward(x)
        ctx.shape = x.shape

    @staticmethod
    def backward(ctx, g):
        return (g / ctx.shape.numel()).expand(ctx.shape)

    @staticmethod
    @nestable_jvp
    def jvp(ctx, t):
        return t.mean()


class DenseSmoothing(Cube):
    """Mean over neighbours, with a dense matrix saved for three bands."""

    @staticmethod
    def forward(x):
        return (x.roll(1, -1) + 2 * x + x.roll(-1, -1)) / 4

    @staticmethod
    def setup_context(ctx, inputs, output):
        (x,) = inputs
        eye = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
        ctx.save_for_backward((eye.roll(1, -1) + 2 * eye + eye.roll(-1, -1)) / 4)

    @staticmethod
    def backward(ctx, g):
        (matrix,) = ctx.saved_tensors
        return g @ matrix

    @staticmethod
    @nestable_jvp
    def jvp(ctx, t):
        return (t.roll(1, -1) + 2 * t + t.roll(-1, -1)) / 4


class CopiedMask(Function):
    """x where a mask is True; the mask is saved twice."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, mask):
        return x * mask

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, mask = inputs
        ctx.save_for_backward(mask.clone())
        ctx.save_for_forward(mask)

    @staticmethod
    def backward(ctx, g):
        (mask,) = ctx.saved_tensors
        return g * mask, None

    @staticmethod
    @nestable_jvp
    def jvp(ctx, t, _):
        (mask,) = ctx.saved_tensors
        return t * mask


class FloatMask(Function):
    """max(x, 0), with a mask of eight bytes per number."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.clamp(min=0)

    @staticmethod
    def setup_context(ctx, inputs, output):
        mask = (inputs[0] > 0).to(inputs[0].dtype)
        ctx.save_for_backward(mask)
        ctx.save_for_forward(mask)

    @staticmethod
    def backward(ctx, g):
        (mask,) = ctx.saved_tensors
        return g * mask

    @staticmethod
    @nestable_jvp
    def jvp(ctx, t):
        (mask,) = ctx.saved_tensors
        return t * mask


class RepeatedWeights(Function):
    """A row of constant weights, saved once per sample."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, weights):
        return x * weights

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, weights = inputs
        ctx.save_for_backward(weights.expand_as(x).contiguous())
        ctx.save_for_forward(weights)

    @staticmethod
    def backward(ctx, g):
        (weights,) = ctx.saved_tensors
        return g * weights, None

    @staticmethod
    @nestable_jvp
    def jvp(ctx, t, _):
        (weights,) = ctx.saved_tensors
        return t * weights


def dropped(x):
    return F.dropout(x * x, 0.5)


LONG = double(0.5, -1.2, 2.0, 0.3, 0.9, -0.6, 1.4, -0.8)
MASK = torch.tensor([True, False, True])
ROW = torch.tensor([1, 3, 2])
KINK = double(0.0, 1.5, -0.7)

SPECIMENS = [
    Wrong("all_gradients", AllGradients, (MATRIX, WEIGHT, BIAS), ("HD501",)),
    Wrong("gradient_for_constant", GradientForConstant, (MATRIX, Y), ("HD501",)),
    Wrong("layer_with_all_gradients", layer_with_all_gradients, (MATRIX, WEIGHT, BIAS), ("HD501",)),
    Wrong("unread_bias", UnreadBias, (MATRIX, WEIGHT, BIAS), ("HD502",)),
    Wrong("unread_input", UnreadInput, X, ("HD502",)),
    Wrong("dense_smoothing", DenseSmoothing, LONG, ("HD502",)),
    Wrong("copied_mask", CopiedMask, (X, MASK), ("HD502",)),
    Wrong("float_mask", FloatMask, X, ("HD502",)),
    Wrong("repeated_weights", RepeatedWeights, (MATRIX, ROW), ("HD502",)),
    Wrong("kink", torch.abs, KINK, ("HD901",)),
    Wrong("rounding_at_a_jump", torch.floor, double(1.0, 0.3), ("HD901",)),
    Wrong("dropped", dropped, X, ("HD903",)),
]
