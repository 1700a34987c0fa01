"""Tangents that are right at first order and constant to a second pass: HD108 and HD114."""

import torch
from zoo.bases import (
    BIAS,
    MATRIX,
    WEIGHT,
    Cube,
    Linear,
    Product,
    SineAndCosine,
    SumOfSquares,
    X,
    Y,
)
from zoo.specimen import BY_TORCH, Wrong

from hodiff.functions import nestable_jvp


class DetachedTangent(Product):
    @staticmethod
    @nestable_jvp
    def jvp(ctx, x_t, y_t):
        x, y = ctx.saved_tensors
        return 2 * x.detach() * y * x_t + x * x * y_t


class DetachedMatrixTangent(Linear):
    @staticmethod
    @nestable_jvp
    def jvp(ctx, X_t, W_t, b_t):
        X, W = ctx.saved_tensors
        return X_t @ W.detach().T + X @ W_t.T + b_t


class SavedTangentTuple(SineAndCosine):
    @staticmethod
    def setup_context(ctx, inputs, output):
        (x,) = inputs
        ctx.save_for_backward(x)
        ctx.save_for_forward(x.cos(), x.sin())

    @staticmethod
    @nestable_jvp
    def jvp(ctx, t):
        cosine, sine = ctx.saved_tensors
        return cosine * t, -sine * t


class SavedTangentSum(SumOfSquares):
    @staticmethod
    def setup_context(ctx, inputs, output):
        (x,) = inputs
        ctx.save_for_backward(x)
        ctx.save_for_forward(2 * x)

    @staticmethod
    @nestable_jvp
    def jvp(ctx, t):
        (slope,) = ctx.saved_tensors
        return (slope * t).sum()


class DetachedIncomingTangent(Cube):
    """Detach the incoming tangent, which depends on the inputs after another function."""

    @staticmethod
    @nestable_jvp
    def jvp(ctx, t):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * t.detach()


def detached_incoming_tangent_after_sine(x):
    return DetachedIncomingTangent.apply(torch.sin(x))


def tangent_of_a_layer(X, W, b):
    return torch.tanh(DetachedMatrixTangent.apply(X, W, b))


class PlainTangentOfLinear(Linear):
    @staticmethod
    def jvp(ctx, X_t, W_t, b_t):
        X, W = ctx.saved_tensors
        return X_t @ W.T + X @ W_t.T + b_t


LAYER = (MATRIX, WEIGHT, BIAS)


SPECIMENS = [
    Wrong("detached_tangent", DetachedTangent, (X, Y), ("HD108",)),
    Wrong("detached_matrix_tangent", DetachedMatrixTangent, LAYER, ("HD108",)),
    Wrong("saved_tangent_tuple", SavedTangentTuple, X, ("HD108",)),
    Wrong("saved_tangent_sum", SavedTangentSum, X, ("HD108",)),
    Wrong("tangent_of_a_layer", tangent_of_a_layer, LAYER, ("HD108",)),
    Wrong("detached_incoming_tangent", DetachedIncomingTangent, X, ("HD108",)),
    Wrong("detached_incoming_tangent_after_sine", detached_incoming_tangent_after_sine, X, ("HD108",)),
    Wrong("plain_tangent_of_linear", PlainTangentOfLinear, LAYER, ("HD114",), BY_TORCH),
]
