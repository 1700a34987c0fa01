"""Defects of the other files in reductions, matrices and layers, and several at once."""

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
    ExponentialOfOutput,
    Gram,
    Linear,
    Product,
    SavesInputs,
    SineAndCosine,
    SumOfSquares,
    X,
    Y,
    double,
)
from zoo.specimen import BY_TORCH, Wrong

from hodiff.functions import nestable_jvp


class MeanOfSquares(SumOfSquares):
    """The gradient is the gradient of the sum."""

    @staticmethod
    def forward(x):
        return (x * x).mean()

    @staticmethod
    @nestable_jvp
    def jvp(ctx, t):
        (x,) = ctx.saved_tensors
        return (2 * x * t).mean()


def squashed_mean(x):
    return torch.tanh(MeanOfSquares.apply(x)) + x.sum()


class ZeroTangent(Gram):
    @staticmethod
    def jvp(ctx, t):
        return 0 * Gram.jvp(ctx, t)


class Probabilities(SavesInputs):
    """softmax, right by every route."""

    @staticmethod
    def forward(x):
        return x.softmax(-1)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        p = x.softmax(-1)
        return p * (g - (p * g).sum(-1, keepdim=True))

    @staticmethod
    @nestable_jvp
    def jvp(ctx, t):
        (x,) = ctx.saved_tensors
        p = x.softmax(-1)
        return p * (t - (p * t).sum(-1, keepdim=True))


class SavedProbabilities(Probabilities):
    @staticmethod
    def setup_context(ctx, inputs, output):
        (x,) = inputs
        ctx.save_for_backward(x.softmax(-1))
        ctx.save_for_forward(x)

    @staticmethod
    def backward(ctx, g):
        (p,) = ctx.saved_tensors
        return p * (g - (p * g).sum(-1, keepdim=True))


class SavedTangentProbabilities(Probabilities):
    @staticmethod
    def setup_context(ctx, inputs, output):
        (x,) = inputs
        ctx.save_for_backward(x)
        ctx.save_for_forward(x.softmax(-1))

    @staticmethod
    @nestable_jvp
    def jvp(ctx, t):
        (p,) = ctx.saved_tensors
        return p * (t - (p * t).sum(-1, keepdim=True))


class CutProbabilities(Probabilities):
    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        with torch.set_grad_enabled(False):
            p = x.softmax(-1)
        return p * (g - (p * g).sum(-1, keepdim=True))


class CutInHelper(Exponential):
    @staticmethod
    def backward(ctx, g):
        return slope_of_exponential(ctx.saved_tensors[0]) * g


def slope_of_exponential(x):
    return x.clone().detach().exp()


class Standardized(Function):
    """(x - mean) / deviation by rows, with both as outputs whose gradients are ignored."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        centred = x - x.mean(-1, keepdim=True)
        scale = centred.square().mean(-1, keepdim=True).rsqrt()
        return centred * scale, scale

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*output)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, g, g_scale):
        y, scale = ctx.saved_tensors
        return scale * (g - g.mean(-1, keepdim=True) - y * (g * y).mean(-1, keepdim=True))

    @staticmethod
    @nestable_jvp
    def jvp(ctx, t):
        (x,) = ctx.saved_tensors
        centred = x - x.mean(-1, keepdim=True)
        scale = centred.square().mean(-1, keepdim=True).rsqrt()
        t = t - t.mean(-1, keepdim=True)
        along = (centred * t).mean(-1, keepdim=True)
        return scale * t - centred * scale**3 * along, -(scale**3) * along


def standardized(x):
    return Standardized.apply(x)[0]


class OnceDifferentiableGram(Gram):
    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        return Gram.backward(ctx, g)


class Capped(SavesInputs):
    """min(x, 1)², whose gradient also flows above the cap."""

    @staticmethod
    def forward(x):
        return x.clamp_max(1) ** 2

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 2 * x.clamp_max(1) * g

    @staticmethod
    @nestable_jvp
    def jvp(ctx, t):
        (x,) = ctx.saved_tensors
        return 2 * x * (x < 1) * t


class DetachedCotangentOfGram(Gram):
    @staticmethod
    def backward(ctx, g):
        (X,) = ctx.saved_tensors
        with torch.no_grad():
            symmetric = g + g.T
        return X @ symmetric


class DividedInPlace(SumOfSquares):
    """The mean, divided in place by an augmented assignment."""

    @staticmethod
    def forward(x):
        return (x * x).mean()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        g /= x.numel()
        return 2 * x * g

    @staticmethod
    @nestable_jvp
    def jvp(ctx, t):
        (x,) = ctx.saved_tensors
        return (2 * x * t).mean()


class FreedOutput(ExponentialOfOutput):
    """The saved output is wiped after use."""

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        gradient = y * g
        y.zero_()
        return gradient


class DictionaryOnContext(Product):
    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.cache = dict(zip("xy", inputs, strict=True))
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, g):
        x, y = ctx.cache["x"], ctx.cache["y"]
        x_needed, y_needed = ctx.needs_input_grad
        return 2 * x * y * g if x_needed else None, x * x * g if y_needed else None


class NumpyNoise(Cube):
    @staticmethod
    def backward(ctx, g):
        return Cube.backward(ctx, g) * (1 + 0.1 * np.random.default_rng().random())


class FloatGradient(Gram):
    """Backward returns float32, which torch casts silently."""

    @staticmethod
    def backward(ctx, g):
        return Gram.backward(ctx, g).float()


class RidgeOnHost(Gram):
    @staticmethod
    def forward(X):
        return X.T @ X + torch.eye(X.shape[-1], dtype=X.dtype)


class PartlyWritten(SumOfSquares):
    """The last gradient, which should be zero, is never written."""

    @staticmethod
    def forward(x):
        return x[..., :-1].square().sum()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return torch.cat([2 * x[..., :-1] * g, torch.empty_like(x[..., -1:])], -1)

    @staticmethod
    @nestable_jvp
    def jvp(ctx, t):
        (x,) = ctx.saved_tensors
        return (2 * x * t)[..., :-1].sum()


class FrontForBoth(SineAndCosine):
    generate_vmap_rule = False

    @staticmethod
    def vmap(info, in_dims, x):
        return FrontForBoth.apply(x), (0, 0)


class BothProducts(SavesInputs):
    """A B; backward always computes both gradients."""

    @staticmethod
    def forward(A, B):
        return A @ B

    @staticmethod
    def backward(ctx, g):
        A, B = ctx.saved_tensors
        return g @ B.T, A.T @ g

    @staticmethod
    @nestable_jvp
    def jvp(ctx, A_t, B_t):
        A, B = ctx.saved_tensors
        return A_t @ B + A @ B_t


def square_by_root(x):
    """x², by a square root whose derivative is 0 / 0 at 0."""
    return torch.sqrt(x**4)


def item_inside(x):
    return x * float(x.detach().abs().max().item() > 0)


class SignAndNoBatching(Cube):
    generate_vmap_rule = False

    @staticmethod
    def backward(ctx, g):
        return -Cube.backward(ctx, g)


class OnceDifferentiableWithoutTangent(Exponential):
    jvp = Function.jvp

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        return Exponential.backward(ctx, g)


class ContextAndBatch(Cube):
    generate_vmap_rule = False

    @staticmethod
    def setup_context(ctx, inputs, output):
        (ctx.x,) = inputs
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, g):
        return 3 * ctx.x**2 * g

    @staticmethod
    def vmap(info, in_dims, x):
        return ContextAndBatch.apply(x), 0


class DetachedBothWays(Linear):
    @staticmethod
    def backward(ctx, g):
        X, W = ctx.saved_tensors
        X_needed, W_needed, b_needed = ctx.needs_input_grad
        return g @ W.detach() if X_needed else None, g.T @ X if W_needed else None, g.sum(0) if b_needed else None

    @staticmethod
    @nestable_jvp
    def jvp(ctx, X_t, W_t, b_t):
        X, W = ctx.saved_tensors
        return X_t @ W.detach().T + X @ W_t.T + b_t


class WrongTangentAndAllGradients(Product):
    @staticmethod
    def backward(ctx, g):
        x, y = ctx.saved_tensors
        return 2 * x * y * g, x * x * g

    @staticmethod
    def jvp(ctx, x_t, y_t):
        return -Product.jvp(ctx, x_t, y_t)


class KernelInLayer(Linear):
    """The gradient of X uses W as Python numbers, outside the graph."""

    generate_vmap_rule = False

    @staticmethod
    def backward(ctx, g):
        X, W = ctx.saved_tensors
        X_needed, W_needed, b_needed = ctx.needs_input_grad
        return (
            g @ g.new_tensor(W.tolist()) if X_needed else None,
            g.T @ X if W_needed else None,
            g.sum(0) if b_needed else None,
        )

    @staticmethod
    def vmap(info, in_dims, X, W, b):
        size = info.batch_size
        parts = [
            [x] * size if dim is None else x.movedim(dim, 0).unbind() for x, dim in zip((X, W, b), in_dims, strict=True)
        ]
        return torch.stack([KernelInLayer.apply(*each) for each in zip(*parts, strict=True)]), 0


LAYER = (MATRIX, WEIGHT, BIAS)

# Since torch 2.15, the derivative is right if the matrix is far from singular.
DETERMINANT = Wrong("determinant", torch.linalg.det, double(3.0, 0.4, 0.3, 2.0, shape=(2, 2)), ("HD406",), BY_TORCH)

SPECIMENS = [
    Wrong("mean_of_squares", MeanOfSquares, X, ("HD101",)),
    Wrong("squashed_mean", squashed_mean, X, ("HD101",)),
    Wrong("zero_tangent", ZeroTangent, MATRIX, ("HD102",)),
    Wrong("saved_probabilities", SavedProbabilities, MATRIX, ("HD103",)),
    Wrong("cut_probabilities", CutProbabilities, MATRIX, ("HD104",)),
    Wrong("cut_in_helper", CutInHelper, X, ("HD104",)),
    Wrong("standardized", standardized, MATRIX, ("HD105",)),
    Wrong("kernel_in_layer", KernelInLayer, LAYER, ("HD106",)),
    Wrong("once_differentiable_gram", OnceDifferentiableGram, MATRIX, ("HD107",)),
    Wrong("saved_tangent_probabilities", SavedTangentProbabilities, MATRIX, ("HD108",)),
    Wrong("capped", Capped, X, ("HD110",)),
    Wrong("square_by_root", square_by_root, double(0.0, 0.7), ("HD112",)),
    Wrong("detached_cotangent_of_gram", DetachedCotangentOfGram, MATRIX, ("HD116",)),
    Wrong("divided_in_place", DividedInPlace, X, ("HD301",)),
    Wrong("freed_output", FreedOutput, X, ("HD302",)),
    Wrong("dictionary_on_context", DictionaryOnContext, (X, Y), ("HD304",)),
    Wrong("numpy_noise", NumpyNoise, X, ("HD305",)),
    Wrong("float_gradient", FloatGradient, MATRIX, ("HD306",)),
    Wrong("ridge_on_host", RidgeOnHost, MATRIX, ("HD307",)),
    Wrong("partly_written", PartlyWritten, X, ("HD308",)),
    Wrong("front_for_both", FrontForBoth, X, ("HD402",)),
    *([DETERMINANT] if torch.__version__ < "2.15" else []),
    Wrong("item_inside", item_inside, X, ("HD407",)),
    Wrong("both_products", BothProducts, (MATRIX, WEIGHT.T), ("HD501",)),
    Wrong("sign_and_no_batching", SignAndNoBatching, X, ("HD101", "HD403")),
    Wrong("once_differentiable_without_tangent", OnceDifferentiableWithoutTangent, X, ("HD107", "HD401")),
    Wrong("context_and_batch", ContextAndBatch, X, ("HD304", "HD402")),
    Wrong("detached_both_ways", DetachedBothWays, LAYER, ("HD104", "HD108")),
    Wrong("wrong_tangent_and_all_gradients", WrongTangentAndAllGradients, (X, Y), ("HD102", "HD501")),
]
