"""State that a rule keeps or assumes: HD304 to HD309."""

import torch
from zoo.bases import (
    BIAS,
    MATRIX,
    WEIGHT,
    Cube,
    ExponentialOfOutput,
    Linear,
    SavesInputs,
    SineAndCosine,
    SumOfSquares,
    X,
    batched_like_input,
)
from zoo.specimen import Wrong

from hodiff.functions import nestable_jvp


class SlopeOnContext(Cube):
    """An attribute of ctx holds the slope, whose derivative is lost."""

    @staticmethod
    def setup_context(ctx, inputs, output):
        (x,) = inputs
        ctx.slope = 3 * x**2
        ctx.save_for_forward(x)

    @staticmethod
    def backward(ctx, g):
        return ctx.slope * g


class OutputOnContext(ExponentialOfOutput):
    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.y = output
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, g):
        return ctx.y * g


class WeightOnContext(Linear):
    @staticmethod
    def setup_context(ctx, inputs, output):
        X, ctx.weight, _ = inputs
        ctx.save_for_backward(X)
        ctx.save_for_forward(*inputs[:2])

    @staticmethod
    def backward(ctx, g):
        (X,) = ctx.saved_tensors
        X_needed, W_needed, b_needed = ctx.needs_input_grad
        return g @ ctx.weight if X_needed else None, g.T @ X if W_needed else None, g.sum(0) if b_needed else None


class ListOnContext(SineAndCosine):
    """A list on ctx keeps tensors alive."""

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.parts = [inputs[0]]
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, g_sin, g_cos):
        (x,) = ctx.parts
        return x.cos() * g_sin - x.sin() * g_cos


def layer_of_context(X, W, b):
    return torch.tanh(WeightOnContext.apply(X, W, b))


class DropoutInBackward(Linear):
    """Backward draws a new mask."""

    @staticmethod
    def backward(ctx, g):
        return Linear.backward(ctx, 2 * g * (torch.rand_like(g) > 0.5))


@batched_like_input
class FloatBuffer(Cube):
    """Collect the result in a buffer of the default dtype."""

    @staticmethod
    def forward(x):
        out = torch.zeros(x.shape, device=x.device)
        return out.copy_(x**3)


class FloatTangent(SumOfSquares):
    @staticmethod
    @nestable_jvp
    def jvp(ctx, t):
        (x,) = ctx.saved_tensors
        return (2 * x * t).float().sum().to(t.dtype)


class HostBufferInBackward(SumOfSquares):
    """Create a tensor in backward on the default device."""

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return torch.full(x.shape, 2.0, dtype=x.dtype) * x * g


def positions(x):
    """Use a ramp on the CPU in a plain function."""
    return torch.sin(x * torch.arange(len(x), dtype=x.dtype))


@batched_like_input
class EmptyInBackward(Cube):
    """Backward writes only positive entries of uninitialized memory; the batching rule is elementwise."""

    @staticmethod
    def forward(x):
        return x.clamp_min(0) ** 3

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return torch.where(x > 0, 3 * x**2 * g, torch.empty_like(x))

    @staticmethod
    @nestable_jvp
    def jvp(ctx, t):
        (x,) = ctx.saved_tensors
        return 3 * x.clamp_min(0) ** 2 * t


class EmptyInForward(SavesInputs):
    """Σ x², accumulated into uninitialized memory."""

    @staticmethod
    def forward(x):
        return (x * x).sum() + 0 * torch.empty((), dtype=x.dtype, device=x.device)

    @staticmethod
    def backward(ctx, g):
        return SumOfSquares.backward(ctx, g)

    @staticmethod
    def jvp(ctx, t):
        return SumOfSquares.jvp(ctx, t)


class ReadsStorage(Cube):
    """Read memory row by row without regard to strides, like a careless kernel."""

    generate_vmap_rule = False

    @staticmethod
    def forward(x):
        return x.as_strided(x.shape, torch.empty(x.shape, device="meta").stride()) ** 3

    @staticmethod
    def vmap(info, in_dims, x):
        return ReadsStorage.apply(x.movedim(in_dims[0], 0).contiguous()), 0


LAYER = (MATRIX, WEIGHT, BIAS)


SPECIMENS = [
    Wrong("slope_on_context", SlopeOnContext, X, ("HD304",)),
    Wrong("output_on_context", OutputOnContext, X, ("HD304",)),
    Wrong("weight_on_context", WeightOnContext, LAYER, ("HD304",)),
    Wrong("list_on_context", ListOnContext, X, ("HD304",)),
    Wrong("layer_of_context", layer_of_context, LAYER, ("HD304",)),
    Wrong("dropout_in_backward", DropoutInBackward, LAYER, ("HD305",)),
    Wrong("float_buffer", FloatBuffer, X, ("HD306",)),
    Wrong("float_tangent", FloatTangent, X, ("HD306",)),
    Wrong("host_buffer_in_backward", HostBufferInBackward, X, ("HD307",)),
    Wrong("positions", positions, X, ("HD307",)),
    Wrong("empty_in_backward", EmptyInBackward, X, ("HD308",)),
    Wrong("empty_in_forward", EmptyInForward, X, ("HD308",)),
    Wrong("reads_storage", ReadsStorage, MATRIX, ("HD309",)),
]
