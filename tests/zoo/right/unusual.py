"""Correct Functions that look suspicious."""

import numpy as np
import torch
from torch.autograd import Function
from zoo.bases import (
    BIAS,
    MATRIX,
    WEIGHT,
    Cube,
    Exponential,
    ExponentialOfOutput,
    Gram,
    Linear,
    Masked,
    Power,
    Product,
    SavesInputs,
    SavesNothing,
    Scale,
    SineAndCosine,
    Sinh,
    SumOfSquares,
    X,
    Y,
    batched_like_input,
    double,
)
from zoo.specimen import Right

from hodiff.functions import nestable_jvp


def sinh(x):
    """sinh(x); the residual is a second output, and backward adds its gradient."""
    return Sinh.apply(x)[0]


class ScaledInPlace(Function):
    """2 x, written in place with mark_dirty; batches are scaled out of place."""

    @staticmethod
    def forward(x):
        return x.mul_(2)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_dirty(output)

    @staticmethod
    def backward(ctx, g):
        return 2 * g

    @staticmethod
    def jvp(ctx, t):
        return t.mul_(2)

    @staticmethod
    def vmap(info, in_dims, x):
        return ScaledInPlace.apply(x), in_dims[0]


def scaled_copy(x):
    return ScaledInPlace.apply(x.clone()).sin()


class Sorted(Function):
    """Sorted values, and the order, which has no derivative."""

    @staticmethod
    def forward(x):
        values, order = x.sort(-1)
        return values, order

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])
        ctx.save_for_forward(output[1])

    @staticmethod
    def backward(ctx, g, _):
        (order,) = ctx.saved_tensors
        return torch.zeros_like(g).scatter(-1, order, g)

    @staticmethod
    @nestable_jvp
    def jvp(ctx, t):
        (order,) = ctx.saved_tensors
        return t.gather(-1, order), None

    @staticmethod
    def vmap(info, in_dims, x):
        return Sorted.apply(x.movedim(in_dims[0], 0)), (0, 0)


class FlippedView(SavesNothing):
    """x reversed, as a new tensor; nothing is saved."""

    @staticmethod
    def forward(x):
        return x.flip(-1)

    @staticmethod
    def backward(ctx, g):
        return FlippedView.apply(g)

    @staticmethod
    @nestable_jvp
    def jvp(ctx, t):
        return FlippedView.apply(t)


class Identity(FlippedView):
    """The identity: backward returns the incoming gradient itself."""

    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g

    @staticmethod
    @nestable_jvp
    def jvp(ctx, t):
        return t


class Sum(SavesNothing):
    """x + y: both gradients are the incoming gradient."""

    @staticmethod
    def forward(x, y):
        return x + y

    @staticmethod
    def backward(ctx, g):
        return g if ctx.needs_input_grad[0] else None, g if ctx.needs_input_grad[1] else None

    @staticmethod
    @nestable_jvp
    def jvp(ctx, x_t, y_t):
        return x_t + y_t


class Step(SavesNothing):
    """A step function: its gradient is None."""

    @staticmethod
    def forward(x):
        return (x > 0).to(x.dtype)

    @staticmethod
    def backward(ctx, g):
        return None

    @staticmethod
    @nestable_jvp
    def jvp(ctx, t):
        return torch.zeros_like(t)


def stepped(x):
    return x * x * Step.apply(x)


class SavedMask(Function):
    """relu(x)²: the saved mask is an intermediate that is locally constant."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.clamp_min(0).square()

    @staticmethod
    def setup_context(ctx, inputs, output):
        (x,) = inputs
        ctx.save_for_backward(x, x > 0)
        ctx.save_for_forward(x)

    @staticmethod
    def backward(ctx, g):
        x, mask = ctx.saved_tensors
        return 2 * x * mask * g

    @staticmethod
    @nestable_jvp
    def jvp(ctx, t):
        (x,) = ctx.saved_tensors
        return 2 * x * (x > 0) * t


class OptionalBias(Function):
    """X Wᵀ, plus b unless b is None."""

    generate_vmap_rule = True

    @staticmethod
    def forward(X, W, b):
        return X @ W.T if b is None else X @ W.T + b

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:2])
        ctx.save_for_forward(*inputs[:2])

    @staticmethod
    def backward(ctx, g):
        return Linear.backward(ctx, g)

    @staticmethod
    def jvp(ctx, X_t, W_t, b_t):
        return Linear.jvp(ctx, X_t, W_t, 0 if b_t is None else b_t)


class WithoutMaterializedZeros(SineAndCosine):
    """Two outputs; missing gradients arrive as None."""

    @staticmethod
    def setup_context(ctx, inputs, output):
        SineAndCosine.setup_context(ctx, inputs, output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, g_sin, g_cos):
        (x,) = ctx.saved_tensors
        parts = [slope * g for slope, g in ((x.cos(), g_sin), (-x.sin(), g_cos)) if g is not None]
        return sum(parts) if parts else None


def sine_only(x):
    return WithoutMaterializedZeros.apply(x)[0]


@batched_like_input
class NumpyExponential(Function):
    """exp(x) by a NumPy kernel; the rules call the Function itself."""

    @staticmethod
    def forward(x):
        return torch.from_numpy(np.exp(x.numpy()))

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return NumpyExponential.apply(x) * g

    @staticmethod
    @nestable_jvp
    def jvp(ctx, t):
        (x,) = ctx.saved_tensors
        return NumpyExponential.apply(x) * t


class GradOfPullback(SavesInputs):
    """sin(x)³, with a backward that calls autograd."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.sin() ** 3

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return torch.func.vjp(lambda x: x.sin() ** 3, x)[1](g)[0]

    @staticmethod
    @nestable_jvp
    def jvp(ctx, t):
        (x,) = ctx.saved_tensors
        return 3 * x.sin() ** 2 * x.cos() * t


class DetachedForValuesOnly(Cube):
    """A detached shift that cancels, so it does not affect the derivative."""

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        largest = x.detach().amax()
        return 3 * ((x - largest) + largest) ** 2 * g


class NumbersOnContext(Cube):
    """Shapes, flags and numbers may be stored on ctx."""

    @staticmethod
    def setup_context(ctx, inputs, output):
        Cube.setup_context(ctx, inputs, output)
        ctx.shape, ctx.factor, ctx.name = inputs[0].shape, 3.0, "cube"

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return (ctx.factor * x**2 * g).reshape(ctx.shape)


class ScratchInPlace(Cube):
    """Backward writes in place into its own temporary tensor."""

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return (x * x).mul_(3) * g


@batched_like_input
class EmptyThenFilled(Cube):
    """Uninitialized memory that is filled before it is read."""

    @staticmethod
    def forward(x):
        out = torch.empty_like(x)
        return torch.mul(x * x, x, out=out)


class ByHandBatching(Product):
    """A batching rule that moves each batch to the front."""

    generate_vmap_rule = False

    @staticmethod
    def vmap(info, in_dims, x, y):
        x, y = (
            each.expand(info.batch_size, *each.shape) if dim is None else each.movedim(dim, 0)
            for each, dim in zip((x, y), in_dims, strict=True)
        )
        return ByHandBatching.apply(x, y), 0


class LinearInY(Product):
    """x² y, with one rule for both inputs."""

    @staticmethod
    def backward(ctx, g):
        x, y = ctx.saved_tensors
        by_x, by_y = torch.func.vjp(lambda x, y: x * x * y, x, y)[1](g)
        return by_x if ctx.needs_input_grad[0] else None, by_y if ctx.needs_input_grad[1] else None


class AnyDtype(SumOfSquares):
    """Sum in float64, and return the input's dtype."""

    @staticmethod
    def forward(x):
        return x.double().square().sum().to(x.dtype)


LAYER = (MATRIX, WEIGHT, BIAS)
MASK = torch.tensor([1, 0, 1])


class Gaussian(SavesInputs):
    """exp(-x²), with a derivative that is 0 at infinity, as its limit."""

    @staticmethod
    def forward(x):
        return torch.exp(-x * x)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * Gaussian.slope(x)

    @staticmethod
    @nestable_jvp
    def jvp(ctx, t):
        (x,) = ctx.saved_tensors
        return t * Gaussian.slope(x)

    @staticmethod
    def slope(x):
        return torch.where(x.isinf(), 0.0, -2 * x * torch.exp(-x * x))


class CutAtInfinity(SavesInputs):
    """x³, but 0 at infinity, which is not the limit, so NaN there is no defect."""

    @staticmethod
    def forward(x):
        return torch.where(x.isinf(), 0.0, x**3)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * (3 * x**2 + 0 * x)

    @staticmethod
    @nestable_jvp
    def jvp(ctx, t):
        (x,) = ctx.saved_tensors
        return t * (3 * x**2 + 0 * x)


class NeedsRows(Cube):
    """x³ of rows, by rules that fail without rows; forward rejects empty inputs."""

    @staticmethod
    def forward(x):
        if not x.numel():
            raise ValueError("expected at least one row")
        return x**3

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return (3 * x.reshape(len(x), -1) ** 2 * g.reshape(len(x), -1)).reshape(x.shape)


class AnyRows(Cube):
    """x³ of rows, also without rows."""

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        rows = (len(x), x.shape[1])
        return (3 * x.reshape(rows) ** 2 * g.reshape(rows)).reshape(x.shape)


SPECIMENS = [
    Right("gaussian_safe_at_infinity", Gaussian, X),
    Right("no_limit_at_infinity", CutAtInfinity, X),
    Right("needs_rows", NeedsRows, MATRIX),
    Right("any_rows", AnyRows, MATRIX),
    Right("cube", Cube, X),
    Right("exponential", Exponential, X),
    Right("product", Product, (X, Y)),
    Right("sine_and_cosine", SineAndCosine, X),
    Right("sum_of_squares", SumOfSquares, X),
    Right("linear_layer", Linear, LAYER),
    Right("gram", Gram, MATRIX),
    Right("scale", Scale, (MATRIX, Y)),
    Right("power", Power, (X, 3)),
    Right("masked", Masked, (X, MASK)),
    Right("output_saved", ExponentialOfOutput, X),
    Right("residual_as_output", sinh, X),
    Right("residual_shown", Sinh, X),
    Right("in_place_and_dirty", scaled_copy, X),
    Right("sorted", Sorted, X),
    Right("flipped", FlippedView, MATRIX),
    Right("identity_function", Identity, X),
    Right("plain_sum", Sum, (X, Y)),
    Right("none_gradient", stepped, X),
    Right("saved_mask", SavedMask, X),
    Right("without_bias", OptionalBias, (MATRIX, WEIGHT, None)),
    Right("with_bias", OptionalBias, LAYER),
    Right("without_materialized_zeros", sine_only, X),
    Right("numpy_exponential", NumpyExponential, X),
    Right("pullback_of_autograd", GradOfPullback, X),
    Right("detached_shift", DetachedForValuesOnly, X),
    Right("numbers_on_context", NumbersOnContext, X),
    Right("scratch_in_place", ScratchInPlace, X),
    Right("empty_then_filled", EmptyThenFilled, X),
    Right("by_hand_batching", ByHandBatching, (X, Y)),
    Right("one_pullback_for_both", LinearInY, (X, Y)),
    Right("any_dtype", AnyDtype, X),
    Right("third_order", Exponential, X, {"order": 3}),
    Right("float32_function", Exponential, X.float()),
    Right("column", Scale, (double(1.5, -0.4, shape=(2, 1)), MATRIX)),
    Right("transposed_input", Gram, MATRIX.T),
]
