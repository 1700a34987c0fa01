"""Right at first order, but backward cuts the graph: HD104, HD106, HD107 and HD116."""

import numpy as np
import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from zoo.bases import (
    BIAS,
    MATRIX,
    WEIGHT,
    Cube,
    Exponential,
    Gram,
    Linear,
    Product,
    Scale,
    SineAndCosine,
    SumOfSquares,
    X,
    Y,
    batched_like_input,
)
from zoo.specimen import Wrong

from hodiff.functions import nestable_jvp


class DataOfWeight(Linear):
    @staticmethod
    def backward(ctx, g):
        X, W = ctx.saved_tensors
        X_needed, W_needed, b_needed = ctx.needs_input_grad
        return g @ W.data if X_needed else None, g.T @ X if W_needed else None, g.sum(0) if b_needed else None


class NoGradInside(SineAndCosine):
    @staticmethod
    def backward(ctx, g_sin, g_cos):
        (x,) = ctx.saved_tensors
        with torch.no_grad():
            sine, cosine = x.sin(), x.cos()
        return cosine * g_sin - sine * g_cos


@batched_like_input
class ItemOfScale(Function):
    """x² of a scalar; .item() leaves the graph. The batching rule is written for it."""

    @staticmethod
    def forward(x):
        return x * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return torch.stack([2 * each.item() * part for each, part in zip(x, g, strict=True)])

    @staticmethod
    @nestable_jvp
    def jvp(ctx, t):
        (x,) = ctx.saved_tensors
        return 2 * x * t


class DetachedSum(SumOfSquares):
    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 2 * x.detach() * g


class DetachedMatrix(Gram):
    @staticmethod
    def backward(ctx, g):
        (X,) = ctx.saved_tensors
        return X.detach() @ (g + g.T)


@batched_like_input
class NumpyBackward(Exponential):
    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return torch.from_numpy(np.exp(x.detach().numpy())) * g


@batched_like_input
class ListBackward(Cube):
    """Backward converts to Python numbers, like a kernel that autograd does not record."""

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g.new_tensor([3 * each**2 for each in x.tolist()]) * g


@batched_like_input
class NumpySlope(Function):
    """Backward is a NumPy kernel without a derivative."""

    @staticmethod
    def forward(x):
        return torch.from_numpy(3 * x.numpy() ** 2)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx, g):
        return None

    @staticmethod
    def jvp(ctx, t):
        return None


class KernelBackward(Cube):
    """Backward calls a kernel Function that has no derivative itself."""

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return NumpySlope.apply(x) * g


class OnceDifferentiable(Cube):
    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        return Cube.backward(ctx, g)


class OnceDifferentiableTuple(SineAndCosine):
    @staticmethod
    @once_differentiable
    def backward(ctx, g_sin, g_cos):
        return SineAndCosine.backward(ctx, g_sin, g_cos)


class OnceDifferentiableLinear(Linear):
    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        return Linear.backward(ctx, g)


def penalized(x):
    return OnceDifferentiable.apply(torch.sin(x)) + x**2


class DetachedCotangentOfOneInput(Product):
    @staticmethod
    def backward(ctx, g):
        x, y = ctx.saved_tensors
        x_needed, y_needed = ctx.needs_input_grad
        return 2 * x * y * g if x_needed else None, x * x * g.detach() if y_needed else None


class DetachedCotangentOfLinear(Linear):
    @staticmethod
    def backward(ctx, g):
        return Linear.backward(ctx, g.detach())


class DetachedCotangentOfOneOutput(SineAndCosine):
    @staticmethod
    def backward(ctx, g_sin, g_cos):
        return SineAndCosine.backward(ctx, g_sin, g_cos.detach())


class DetachedCotangentOfBroadcast(Scale):
    @staticmethod
    def backward(ctx, g):
        return Scale.backward(ctx, g.detach())


class DetachedCotangentOfSum(SumOfSquares):
    @staticmethod
    def backward(ctx, g):
        return SumOfSquares.backward(ctx, g.detach())


LAYER = (MATRIX, WEIGHT, BIAS)


SPECIMENS = [
    Wrong("data_of_weight", DataOfWeight, LAYER, ("HD104",)),
    Wrong("no_grad_inside", NoGradInside, X, ("HD104",)),
    Wrong("item_of_scale", ItemOfScale, X, ("HD104",)),
    Wrong("detached_sum", DetachedSum, X, ("HD104",)),
    Wrong("detached_matrix", DetachedMatrix, MATRIX, ("HD104",)),
    Wrong("numpy_backward", NumpyBackward, X, ("HD106",)),
    Wrong("list_backward", ListBackward, X, ("HD106",)),
    Wrong("kernel_backward", KernelBackward, X, ("HD106",)),
    Wrong("once_differentiable_tuple", OnceDifferentiableTuple, X, ("HD107",)),
    Wrong("once_differentiable_linear", OnceDifferentiableLinear, LAYER, ("HD107",)),
    Wrong("penalized", penalized, X, ("HD107",)),
    Wrong("detached_cotangent_of_one_input", DetachedCotangentOfOneInput, (X, Y), ("HD116",)),
    Wrong("detached_cotangent_of_linear", DetachedCotangentOfLinear, LAYER, ("HD116",)),
    Wrong("detached_cotangent_of_one_output", DetachedCotangentOfOneOutput, X, ("HD116",)),
    Wrong("detached_cotangent_of_broadcast", DetachedCotangentOfBroadcast, (MATRIX, X), ("HD116",)),
    Wrong("detached_cotangent_of_sum", DetachedCotangentOfSum, X, ("HD116",)),
]
