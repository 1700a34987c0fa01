"""Rules that overwrite tensors: HD301 to HD303."""

from zoo.bases import (
    Cube,
    ExponentialOfOutput,
    Product,
    SavesInputs,
    SavesNothing,
    SineAndCosine,
    SumOfSquares,
    X,
    Y,
)
from zoo.specimen import Wrong

from hodiff.functions import nestable_jvp


class ScaledInPlaceTuple(SineAndCosine):
    @staticmethod
    def backward(ctx, g_sin, g_cos):
        (x,) = ctx.saved_tensors
        return g_sin.mul_(x.cos()).sub_(x.sin() * g_cos)


class ScaledInPlaceForTwo(Product):
    """The gradient for y is computed first, so both are right in the first call."""

    @staticmethod
    def backward(ctx, g):
        x, y = ctx.saved_tensors
        x_needed, y_needed = ctx.needs_input_grad
        by_y = x * x * g if y_needed else None
        return g.mul_(2 * x * y) if x_needed else None, by_y


class TangentInPlace(Cube):
    @staticmethod
    @nestable_jvp
    def jvp(ctx, t):
        (x,) = ctx.saved_tensors
        return t.mul_(3 * x**2)


class SavedOutputInPlace(ExponentialOfOutput):
    """The saved output becomes the gradient."""

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return y.mul_(g)


class SavedResidualInPlace(SumOfSquares):
    """A copy of the input is saved as an output and doubled in place."""

    @staticmethod
    def forward(x):
        return (x * x).sum(), x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output[1])
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, g, g_copy):
        (copy,) = ctx.saved_tensors
        return copy.mul_(2) * g + g_copy

    @staticmethod
    @nestable_jvp
    def jvp(ctx, t):
        (x,) = ctx.saved_tensors
        return (2 * x * t).sum(), t.clone()


def squares_by_copy(x):
    return SavedResidualInPlace.apply(x)[0]


class InputOverwritten(SavesNothing):
    """2 x, with the input as scratch memory, without mark_dirty."""

    @staticmethod
    def forward(x):
        y = 2 * x
        x.zero_()
        return y

    @staticmethod
    def backward(ctx, g):
        return 2 * g

    @staticmethod
    @nestable_jvp
    def jvp(ctx, t):
        return 2 * t


class ClampedInPlace(SavesInputs):
    """clamp(x)³, clamped in place; inputs inside the range do not change."""

    @staticmethod
    def forward(x):
        return x.clamp_(-5, 5) ** 3

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * (x.abs() < 5) * g

    @staticmethod
    @nestable_jvp
    def jvp(ctx, t):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * (x.abs() < 5) * t


class InputReturnedInPlace(InputOverwritten):
    """2 x, written into x."""

    @staticmethod
    def forward(x):
        return x.mul_(2)


SPECIMENS = [
    Wrong("scaled_in_place_tuple", ScaledInPlaceTuple, X, ("HD301",)),
    Wrong("scaled_in_place_for_two", ScaledInPlaceForTwo, (X, Y), ("HD301",)),
    Wrong("tangent_in_place", TangentInPlace, X, ("HD301",)),
    Wrong("saved_output_in_place", SavedOutputInPlace, X, ("HD302",)),
    Wrong("saved_residual_in_place", squares_by_copy, X, ("HD302",)),
    Wrong("input_overwritten", InputOverwritten, X, ("HD303",)),
    Wrong("clamped_in_place", ClampedInPlace, X, ("HD303",)),
    Wrong("input_returned_in_place", InputReturnedInPlace, X, ("HD303",)),
]
