"""Rules that are wrong only under a condition: memory layout, frozen inputs, sizes, batches, earlier calls."""

from typing import ClassVar

import torch
from torch.autograd import Function
from zoo.bases import (
    BIAS,
    MATRIX,
    WEIGHT,
    Cube,
    Linear,
    Product,
    SavesForForward,
    SavesInputs,
    SumOfSquares,
    X,
    Y,
    batched_like_input,
    double,
)
from zoo.specimen import Wrong

from hodiff.functions import nestable_jvp


@batched_like_input
class ShortcutForConstants(Cube):
    """For an expanded gradient, the first number of the slope is used for all."""

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        if g.numel() > 1 and not any(g.stride()):
            return g * (3 * x**2).mean()
        return 3 * x**2 * g


@batched_like_input
class RawMemoryOfGradient(Cube):
    """Read the incoming gradient from its first address on, as a kernel does; expanded rows are missing there."""

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        if 0 in g.stride():
            g = torch.as_strided(g, g.shape, torch.empty(g.shape).stride())
        return 3 * x**2 * g


class FlagOfTheOther(Product):
    """Return the gradient of x if y needs a gradient."""

    @staticmethod
    def backward(ctx, g):
        x, y = ctx.saved_tensors
        _, y_needed = ctx.needs_input_grad
        return 2 * x * y * g if y_needed else None, x * x * g if y_needed else None


class BiasByFlagOfWeight(Linear):
    @staticmethod
    def backward(ctx, g):
        X, W = ctx.saved_tensors
        X_needed, W_needed, _ = ctx.needs_input_grad
        by_W, by_b = (g.T @ X, g.sum(0)) if W_needed else (None, None)
        return g @ W if X_needed else None, by_W, by_b


class ZeroWhereFrozen(Product):
    """Return zeros instead of the gradient if an input is frozen."""

    @staticmethod
    def backward(ctx, g):
        x, y = ctx.saved_tensors
        x_needed, y_needed = ctx.needs_input_grad
        by_x = 2 * x * y * g if x_needed and y_needed else torch.zeros_like(x)
        return by_x if x_needed else None, x * x * g if y_needed else None


class CutBelowThreshold(Cube):
    @staticmethod
    def backward(ctx, g):
        return Cube.backward(ctx, g * (g.abs() > 1e-6))


class ClampedGradient(Cube):
    @staticmethod
    def backward(ctx, g):
        return Cube.backward(ctx, g.clamp(-100, 100))


class ClippedByNorm(SumOfSquares):
    @staticmethod
    def backward(ctx, g):
        by_x = SumOfSquares.backward(ctx, g)
        return by_x * (1e3 / by_x.norm().clamp_min(1e3))


class ClampedTangent(Cube):
    @staticmethod
    @nestable_jvp
    def jvp(ctx, t):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * t.clamp(-100, 100)


@batched_like_input
class ChannelsLast(Cube):
    """A kernel for channels-last memory with a wrong factor."""

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        last = x.dim() == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)
        return (2 if last else 3) * x**2 * g


@batched_like_input
class ChannelsLastGradient(Cube):
    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        last = g.dim() == 4 and not g.is_contiguous() and g.is_contiguous(memory_format=torch.channels_last)
        return (2 if last else 3) * x**2 * g


@batched_like_input
class EverySecond(Cube):
    """Assume that the last stride is 1."""

    @staticmethod
    def forward(x):
        last = x.stride()[-1] == 2
        return (torch.as_strided(x, x.shape, (*x.stride()[:-1], 1)) if last else x) ** 3


class BatchOfOne(Cube):
    generate_vmap_rule = False

    @staticmethod
    def vmap(info, in_dims, x):
        if info.batch_size == 1:
            return 2 * Cube.apply(x), in_dims[0]
        return Cube.apply(x), in_dims[0]


class BatchOfMany(Cube):
    """Batches are computed in blocks of 16, but only the first block is."""

    generate_vmap_rule = False

    @staticmethod
    def vmap(info, in_dims, x):
        x = x.movedim(in_dims[0], 0)
        return torch.cat([Cube.apply(x[:16]), x[16:]]), 0


class BatchOfBatches(Cube):
    """Assume two axes of a batch of vectors; nested batches have three."""

    generate_vmap_rule = False

    @staticmethod
    def vmap(info, in_dims, x):
        x = x.movedim(in_dims[0], 0)
        return (BatchOfBatches.apply(x) if x.dim() == 2 else x.sum(0, keepdim=True) * BatchOfBatches.apply(x)), 0


class SeventhBackward(Cube):
    """A counter on the class makes the seventh backward wrong."""

    count = 0

    @staticmethod
    def backward(ctx, g):
        SeventhBackward.count += 1
        return Cube.backward(ctx, g) * (1.5 if SeventhBackward.count % 7 == 0 else 1)


class TenthForward(Cube):
    count = 0

    @staticmethod
    def forward(x):
        TenthForward.count += 1
        return x**3 * (1.5 if TenthForward.count % 10 == 0 else 1)


class CubeSavedForTangents(SavesForForward):
    """x³; forward keeps nothing for backward."""

    jvp = Cube.jvp


@batched_like_input
class CacheOfClass(CubeSavedForTangents):
    """The class caches the slope of the last call."""

    slope = None

    @staticmethod
    def forward(x):
        CacheOfClass.slope = 3 * x**2
        return x**3

    @staticmethod
    def backward(ctx, g):
        return CacheOfClass.slope * g


@batched_like_input
class CacheOfFirstCall(CubeSavedForTangents):
    """The class caches the slope of the first call with each shape."""

    slopes: ClassVar[dict] = {}

    @staticmethod
    def forward(x):
        CacheOfFirstCall.slopes.setdefault(x.shape, 3 * x**2)
        return x**3

    @staticmethod
    def backward(ctx, g):
        return CacheOfFirstCall.slopes[g.shape] * g


class HardGumbel(Function):
    """A one-hot draw: the value is nearly always the same, but the gradient is not."""

    @staticmethod
    def forward(ctx, x):
        soft = (x - 0.1 * torch.empty_like(x).exponential_().log()).softmax(-1)
        ctx.save_for_backward(soft)
        return torch.nn.functional.one_hot(soft.argmax(-1), 3).to(x)

    @staticmethod
    def backward(ctx, g):
        (p,) = ctx.saved_tensors
        return p * (g - (p * g).sum(-1, keepdim=True))


def hard_gumbel(x):
    return HardGumbel.apply(x) * x


class SoftGumbel(SavesInputs):
    @staticmethod
    def forward(x):
        return (x - torch.empty_like(x).exponential_().log()).softmax(-1)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        p = x.softmax(-1)
        return p * (g - (p * g).sum(-1, keepdim=True))


class FloatFactor(SavesForForward):
    """x / 3, with the factor in float32."""

    @staticmethod
    def forward(x):
        return x / 3

    @staticmethod
    def backward(ctx, g):
        return g * torch.tensor([1 / 3], device=g.device)

    @staticmethod
    @nestable_jvp
    def jvp(ctx, t):
        return t / 3


class CutBesideAKink(SavesInputs):
    """max(x, 0)² + |x|, right at first order; large difference steps across the kink hide the cut."""

    @staticmethod
    def forward(x):
        return x.clamp_min(0) ** 2 + x.abs()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return (2 * x.detach().clamp_min(0) + x.sign()) * g

    @staticmethod
    @nestable_jvp
    def jvp(ctx, t):
        (x,) = ctx.saved_tensors
        return (2 * x.clamp_min(0) + x.sign()) * t


class BranchOnGradient(Cube):
    """Skip work for zero gradients, by a branch that fails for batched gradients."""

    @staticmethod
    def backward(ctx, g):
        return Cube.backward(ctx, g) if bool((g != 0).any()) else torch.zeros_like(g)


class OldCompared(Function):
    """max(x, 0): backward reads only which elements of an intermediate are positive."""

    @staticmethod
    def forward(ctx, x):
        rectified = x.clamp_min(0)
        ctx.save_for_backward(rectified)
        return rectified * 3

    @staticmethod
    def backward(ctx, g):
        (rectified,) = ctx.saved_tensors
        return torch.where(rectified > 0, 3 * g, torch.zeros_like(g))


class OldSelected(Function):
    @staticmethod
    def forward(ctx, x):
        rectified = x.clamp(min=0)
        ctx.save_for_backward(rectified)
        return rectified.clone()

    @staticmethod
    def backward(ctx, g):
        (rectified,) = ctx.saved_tensors
        g = g.clone()
        g[rectified <= 0] = 0
        return g


IMAGE = torch.linspace(-1, 1, 36, dtype=torch.float64).add(0.013).reshape(1, 3, 3, 4)
LAYER = (MATRIX, WEIGHT, BIAS)

SPECIMENS = [
    Wrong("shortcut_for_constants", ShortcutForConstants, X, ("HD309",)),
    Wrong("raw_memory_of_gradient", RawMemoryOfGradient, MATRIX, ("HD309",)),
    Wrong("flag_of_the_other", FlagOfTheOther, (X, Y), ("HD101",)),
    Wrong("bias_by_flag_of_weight", BiasByFlagOfWeight, LAYER, ("HD101",)),
    Wrong("zero_where_frozen", ZeroWhereFrozen, (X, Y), ("HD101",)),
    Wrong("cut_below_threshold", CutBelowThreshold, X, ("HD101",)),
    Wrong("clamped_gradient", ClampedGradient, X, ("HD101",)),
    Wrong("clipped_by_norm", ClippedByNorm, X, ("HD101",)),
    Wrong("clamped_tangent", ClampedTangent, X, ("HD102",)),
    Wrong("channels_last", ChannelsLast, IMAGE, ("HD309",)),
    Wrong("channels_last_gradient", ChannelsLastGradient, IMAGE, ("HD309",)),
    Wrong("every_second", EverySecond, MATRIX, ("HD309",)),
    Wrong("batch_of_one", BatchOfOne, X, ("HD402",)),
    Wrong("batch_of_many", BatchOfMany, X, ("HD402",)),
    Wrong("batch_of_batches", BatchOfBatches, X, ("HD402",)),
    Wrong("seventh_backward", SeventhBackward, X, ("HD305",)),
    Wrong("tenth_forward", TenthForward, X, ("HD903",)),
    Wrong("cache_of_class", CacheOfClass, X, ("HD305",)),
    Wrong("cache_of_first_call", CacheOfFirstCall, X, ("HD101",)),
    Wrong("hard_gumbel", hard_gumbel, double(2.0, 0.5, -0.3), ("HD405", "HD903")),
    Wrong("soft_gumbel", SoftGumbel, X, ("HD903",)),
    Wrong("float_factor", FloatFactor, X, ("HD306",)),
    Wrong("cut_beside_a_kink", CutBesideAKink, double(1.7e-3, -1.2, 2.0), ("HD104",)),
    Wrong("branch_on_gradient", BranchOnGradient, X, ("HD407",)),
    Wrong("old_compared", OldCompared, X, ("HD405", "HD502")),
    Wrong("old_selected", OldSelected, X, ("HD405", "HD502")),
]
