"""Numbers that are wrong at some points or in some dtypes: HD111 to HD113."""

import torch
from zoo.bases import (
    SavesInputs,
    X,
    double,
)
from zoo.specimen import Wrong

from hodiff.functions import nestable_jvp


class OverflowingSoftplus(SavesInputs):
    """The value is stable, the derivative is inf / inf for large arguments."""

    @staticmethod
    def forward(x):
        return torch.logaddexp(x, torch.zeros_like(x))

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * x.exp() / (1 + x.exp())

    @staticmethod
    @nestable_jvp
    def jvp(ctx, t):
        (x,) = ctx.saved_tensors
        return t * torch.sigmoid(x)


def log_of_sigmoid(x):
    """The value itself is -inf from -746 on."""
    return torch.log(torch.sigmoid(x))


def bump(x):
    """exp(-1 / x) for positive x, else 0: smooth everywhere, and 0 * inf at 0."""
    return torch.where(x > 0, torch.exp(-1 / x), 0.0)


def divided_difference(x, y):
    """(exp x - exp y) / (x - y), and its limit at a tie."""
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


SMALL = torch.tensor([0.003, -0.002])


SPECIMENS = [
    Wrong("overflowing_softplus", OverflowingSoftplus, X, ("HD111",)),
    Wrong("log_of_sigmoid", log_of_sigmoid, X, ("HD111",)),
    Wrong("bump_at_zero", bump, double(0.0, 0.7, -1.2), ("HD112",)),
    Wrong("bump_nearby", bump, double(0.5, 0.7, -1.2), ("HD112",)),
    Wrong("divided_difference", divided_difference, (double(0.3, 0.8), double(0.3, -0.4)), ("HD112",)),
    Wrong("sine_ratio", SineRatio, double(0.0, 0.9), ("HD112",)),
    Wrong("cancelling", Cancelling, SMALL, ("HD113",)),
]
