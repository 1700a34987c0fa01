"""Derivatives that are wrong or fail at some points or in some dtypes: HD111 to HD113, HD409."""

import torch
from zoo.bases import MATRIX, Cube, SavesInputs, X, Y, double
from zoo.specimen import Wrong

from hodiff.functions import nestable_jvp


def log_of_sigmoid(x):
    """log(sigmoid(x)), whose value is -inf below -746."""
    return torch.log(torch.sigmoid(x))


def bump(x):
    """exp(-1 / x) for positive x, else 0: smooth everywhere, and 0 * inf at 0."""
    return torch.where(x > 0, torch.exp(-1 / x), 0.0)


def divided_difference(x, y):
    """(exp x - exp y) / (x - y), with its limit at x = y."""
    return torch.where(x == y, x.exp(), (x.exp() - y.exp()) / (x - y))


class SineRatio(SavesInputs):
    """sin(x) / x with the right value at 0, and a derivative that divides by 0 there."""

    @staticmethod
    def forward(x):
        return torch.sinc(x / torch.pi)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * (x.cos() / x - x.sin() / x**2)

    @staticmethod
    @nestable_jvp
    def jvp(ctx, t):
        (x,) = ctx.saved_tensors
        return t * (x.cos() / x - x.sin() / x**2)


class Cancelling(SavesInputs):
    """x - sin(x), computed in float64; the derivative 1 - cos(x) cancels."""

    @staticmethod
    def forward(x):
        return (x.double() - x.double().sin()).to(x.dtype)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * (1 - x.cos())

    @staticmethod
    @nestable_jvp
    def jvp(ctx, t):
        (x,) = ctx.saved_tensors
        return t * (1 - x.cos())


class Gaussian(SavesInputs):
    """exp(-x²), which is 0 at infinity, and -2 x exp(-x²) is inf * 0 there."""

    @staticmethod
    def forward(x):
        return torch.exp(-x * x)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return -2 * x * torch.exp(-x * x) * g

    @staticmethod
    @nestable_jvp
    def jvp(ctx, t):
        (x,) = ctx.saved_tensors
        return -2 * x * torch.exp(-x * x) * t


class Lorentzian(SavesInputs):
    """1 / (1 + x²), whose derivative is inf / inf at infinity."""

    @staticmethod
    def forward(x):
        return 1 / (1 + x * x)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return -2 * x / (1 + x * x) ** 2 * g

    @staticmethod
    @nestable_jvp
    def jvp(ctx, t):
        (x,) = ctx.saved_tensors
        return -2 * x / (1 + x * x) ** 2 * t


class MeanOfEmptyBatch(SavesInputs):
    """X w; the gradient of w is a mean over samples scaled back, which is 0 / 0 without samples."""

    @staticmethod
    def forward(X, w):
        return X @ w

    @staticmethod
    def backward(ctx, g):
        X, w = ctx.saved_tensors
        X_needed, w_needed = ctx.needs_input_grad
        mean = (g[:, None] * X).mean(0) if w_needed else None
        return g[:, None] * w if X_needed else None, mean * len(X) if w_needed else None

    @staticmethod
    @nestable_jvp
    def jvp(ctx, X_t, w_t):
        X, w = ctx.saved_tensors
        return X_t @ w + X @ w_t


class UnnamedSize(SavesInputs):
    """Cubes by rows; the size -1 is ambiguous without elements."""

    @staticmethod
    def forward(x):
        return x.flatten(1) ** 3

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return (3 * x.reshape(len(x), -1) ** 2 * g).reshape(x.shape)

    @staticmethod
    @nestable_jvp
    def jvp(ctx, t):
        (x,) = ctx.saved_tensors
        return (3 * x**2 * t).flatten(1)


class ScaledCube(Cube):
    """x³; jvp scales the tangent by its largest element to avoid overflow."""

    @staticmethod
    @nestable_jvp
    def jvp(ctx, t):
        (x,) = ctx.saved_tensors
        largest = x.abs().max() + 1
        return 3 * (x / largest) ** 2 * t * largest**2


class StackedBatch(Cube):
    """x³; the batching rule loops over rows, and fails without rows."""

    generate_vmap_rule = False

    @staticmethod
    def vmap(info, in_dims, x):
        x = x.movedim(in_dims[0], 0)
        columns = [StackedBatch.apply(each) for each in x.unbind(-1)]
        return torch.stack(columns, -1), 0


SMALL = torch.tensor([0.003, -0.002])


SPECIMENS = [
    Wrong("log_of_sigmoid", log_of_sigmoid, X, ("HD111",)),
    Wrong("bump_at_zero", bump, double(0.0, 0.7, -1.2), ("HD112",)),
    Wrong("bump_nearby", bump, double(0.5, 0.7, -1.2), ("HD112",)),
    Wrong("divided_difference", divided_difference, (double(0.3, 0.8), double(0.3, -0.4)), ("HD112",)),
    Wrong("sine_ratio", SineRatio, double(0.0, 0.9), ("HD112",)),
    Wrong("gaussian", Gaussian, X, ("HD112",)),
    Wrong("lorentzian", Lorentzian, X, ("HD112",)),
    Wrong("gaussian_by_torch", lambda x: torch.exp(-(x**2)), X, ("HD112",)),
    Wrong("mean_of_empty_batch", MeanOfEmptyBatch, (MATRIX, Y), ("HD112",)),
    Wrong("unnamed_size", UnnamedSize, MATRIX, ("HD409",)),
    Wrong("scaled_cube", ScaledCube, X, ("HD409",)),
    Wrong("stacked_batch", StackedBatch, X, ("HD409",)),
    Wrong("cancelling", Cancelling, SMALL, ("HD113",)),
]
