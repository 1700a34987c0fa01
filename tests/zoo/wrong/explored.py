"""Rules that are right at the given inputs and wrong at other inputs: found by `explore=True`."""

import torch
from zoo.bases import Cube, SavesInputs, Scale, X, Y
from zoo.specimen import Wrong

from hodiff.functions import nestable_jvp

EXPLORED = {"explore": True, "vmap": False}


class WrongAtZero(SavesInputs):
    """sinh(x), whose gradient is the quotient of a product, with a wrong limit at 0."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.sinh()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * torch.where(x == 0, 0.0, x.cosh())

    @staticmethod
    @nestable_jvp
    def jvp(ctx, t):
        (x,) = ctx.saved_tensors
        return t * x.cosh()


class WrongBeyondTen(Cube):
    """The branch for large numbers lacks a factor."""

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return torch.where(x.abs() > 10, x**2, 3 * x**2) * g


class WrongAtTies(SavesInputs):
    """The sum of all products, whose gradient counts equal elements once."""

    @staticmethod
    def forward(x):
        return x.sum() ** 2

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        tied = (x.reshape(-1, 1) == x.reshape(1, -1)).sum(-1).reshape(x.shape)
        return 2 * x.sum() * g / tied

    @staticmethod
    @nestable_jvp
    def jvp(ctx, t):
        (x,) = ctx.saved_tensors
        return 2 * x.sum() * t.sum()


class WrongForEvenSizes(Cube):
    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return (3 if x.numel() % 2 else 2) * x**2 * g


class WrongForOne(Cube):
    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return (3 if x.numel() > 1 else 2) * x**2 * g


class WrongWithoutDimensions(Cube):
    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return (3 if x.dim() else 2) * x**2 * g


class WrongBeyondABlock(Cube):
    """A kernel for blocks of 32 numbers that omits the rest."""

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * g * (torch.arange(x.numel(), device=x.device).reshape(x.shape) < 32)


class WrongInHalf(Cube):
    """A separate, wrong rule for low precision."""

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return (2 if x.dtype == torch.bfloat16 else 3) * x**2 * g


class WrongForExpanded(Scale):
    generate_vmap_rule = False

    @staticmethod
    def backward(ctx, g):
        by_x, by_y = Scale.backward(ctx, g)
        return by_x if by_x is None or 0 not in ctx.saved_tensors[0].stride() else by_x / 2, by_y


SPECIMENS = [
    Wrong("wrong_at_zero", WrongAtZero, X, ("HD101",), EXPLORED),
    Wrong("wrong_beyond_ten", WrongBeyondTen, X, ("HD101",), EXPLORED),
    Wrong("wrong_at_ties", WrongAtTies, X, ("HD101",), EXPLORED),
    Wrong("wrong_for_even_sizes", WrongForEvenSizes, X, ("HD101",), EXPLORED),
    Wrong("wrong_for_one", WrongForOne, X, ("HD101",), EXPLORED),
    Wrong("wrong_without_dimensions", WrongWithoutDimensions, X, ("HD101",), EXPLORED),
    Wrong("wrong_beyond_a_block", WrongBeyondABlock, X, ("HD101",), EXPLORED),
    Wrong("wrong_in_half", WrongInHalf, X, ("HD113",), EXPLORED),
    Wrong("wrong_for_expanded", WrongForExpanded, (X, Y), ("HD101",), EXPLORED),
]
