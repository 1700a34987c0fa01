"""Right functions at points that could mislead a check: kinks, cancellation, small numbers."""

import torch
from zoo.bases import MATRIX, Cube, SavesInputs, X, double
from zoo.specimen import Right

from hodiff.functions import nestable_jvp


class RectifiedSquare(SavesInputs):
    """max(x, 0)²."""

    @staticmethod
    def forward(x):
        return x.clamp_min(0) ** 2 + x.abs()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return (2 * x.clamp_min(0) + x.sign()) * g

    @staticmethod
    @nestable_jvp
    def jvp(ctx, t):
        (x,) = ctx.saved_tensors
        return (2 * x.clamp_min(0) + x.sign()) * t


class ShiftedSquare(SavesInputs):
    """((x + 1e8) - 1e8)², which loses digits in float64, and not in a buffer of float32."""

    @staticmethod
    def forward(x):
        return ((x + 1e8) - 1e8) ** 2

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 2 * ((x + 1e8) - 1e8) * g

    @staticmethod
    @nestable_jvp
    def jvp(ctx, t):
        (x,) = ctx.saved_tensors
        return 2 * ((x + 1e8) - 1e8) * t


def shifted_square(x):
    return ((x + 1e8) - 1e8) ** 2


def cube(x):
    return x**3


def written_into(x):
    """Write in place, for which gradcheck's legacy vmap has no rule."""
    y = torch.zeros_like(x)
    y[0] = x[0] * x[1]
    y[1:].copy_(x[1:] ** 2)
    return y


class ByEinsum(SavesInputs):
    """x³, by operators without a rule in gradcheck's legacy vmap."""

    @staticmethod
    def forward(x):
        return x**3

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return torch.einsum("ij,ij->ij", 3 * x**2, g).unflatten(0, (-1, 1)).flatten(0, 1)

    @staticmethod
    @nestable_jvp
    def jvp(ctx, t):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * t


def unfolded(x):
    return x.unfold(-1, 2, 1).square().sum(-1)


SPECIMENS = [
    Right("small_argument_of_cube", cube, 1e-6 * X),
    Right("small_argument_of_a_function", Cube, 1e-6 * X),
    Right("shifted_square", shifted_square, X),
    Right("shifted_square_by_rules", ShiftedSquare, X),
    Right("beside_a_kink", RectifiedSquare, double(7e-4, -1.2, 2.0)),
    Right("close_to_a_kink", RectifiedSquare, double(1e-5, -1.2, 2.0)),
    Right("a_step_from_a_kink", RectifiedSquare, double(0.03, -1.2, 2.0)),
    Right("relu_beside_its_kink", torch.relu, double(7e-4, -1.2, 2.0)),
    Right("written_into", written_into, X),
    Right("by_einsum", ByEinsum, MATRIX),
    Right("unfolded", unfolded, MATRIX),
]
