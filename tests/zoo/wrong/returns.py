"""Rules with a wrong shape or number of results: HD201 to HD204."""

import torch
from zoo.bases import BIAS, MATRIX, WEIGHT, Cube, Gram, Linear, Product, Scale, SumOfSquares, X, Y, double
from zoo.specimen import Wrong

from hodiff.functions import nestable_jvp


class TransposedGradient(Gram):
    @staticmethod
    def backward(ctx, g):
        return Gram.backward(ctx, g).T


class SummedGradient(Cube):
    """Return a gradient of one number for three elements."""

    @staticmethod
    def backward(ctx, g):
        return Cube.backward(ctx, g).sum().reshape(1)


class UnreducedScale(Scale):
    @staticmethod
    def backward(ctx, g):
        x, y = ctx.saved_tensors
        x_needed, y_needed = ctx.needs_input_grad
        return g * y if x_needed else None, g * x if y_needed else None


class UnreducedBias(Linear):
    @staticmethod
    def backward(ctx, g):
        by_X, by_W, _ = Linear.backward(ctx, g)
        return by_X, by_W, g if ctx.needs_input_grad[2] else None


class TooFew(Product):
    @staticmethod
    def backward(ctx, g):
        x, y = ctx.saved_tensors
        return 2 * x * y * g


class TooMany(Cube):
    @staticmethod
    def backward(ctx, g):
        gradient = Cube.backward(ctx, g)
        return gradient, gradient


class TooFewOfThree(Linear):
    @staticmethod
    def backward(ctx, g):
        return Linear.backward(ctx, g)[:2]


class GradientOfFlag(SumOfSquares):
    """Return a gradient for a flag."""

    @staticmethod
    def forward(x, halved):
        return (x * x).sum() / 2 if halved else (x * x).sum()

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, halved = inputs
        ctx.factor = 1 if halved else 2
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return ctx.factor * x * g, torch.zeros_like(g)

    @staticmethod
    @nestable_jvp
    def jvp(ctx, t, halved_t):
        (x,) = ctx.saved_tensors
        return (ctx.factor * x * t).sum()


LAYER = (MATRIX, WEIGHT, BIAS)

SPECIMENS = [
    Wrong("transposed_gradient", TransposedGradient, MATRIX, ("HD201",)),
    Wrong("summed_gradient", SummedGradient, X, ("HD201",)),
    Wrong("unreduced_scale", UnreducedScale, (MATRIX, double(1.5, 0.4, -0.7)), ("HD202",)),
    Wrong("unreduced_column", UnreducedScale, (double(1.5, -0.4, shape=(2, 1)), MATRIX), ("HD202",)),
    Wrong("unreduced_bias", UnreducedBias, LAYER, ("HD202",)),
    Wrong("too_few", TooFew, (X, Y), ("HD203",)),
    Wrong("too_many", TooMany, X, ("HD203",)),
    Wrong("too_few_of_three", TooFewOfThree, LAYER, ("HD203",)),
    Wrong("gradient_of_flag", GradientOfFlag, (X, True), ("HD204",)),
]
