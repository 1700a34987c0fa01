"""Wrong first derivatives: HD101, HD102, HD109 and HD110."""

import torch
from torch.autograd import Function
from zoo.bases import (
    BIAS,
    MATRIX,
    WEIGHT,
    Cube,
    Gram,
    Linear,
    Masked,
    Product,
    SavesForForward,
    SavesInputs,
    SavesNothing,
    SineAndCosine,
    X,
    Y,
    double,
)
from zoo.specimen import Wrong

from hodiff.functions import nestable_jvp

MASK = torch.tensor([1, 0, 1])


class FlippedSign(Cube):
    @staticmethod
    def backward(ctx, g):
        return -Cube.backward(ctx, g)


class MissingTerm(Product):
    """x y² + x²; backward omits the second term."""

    @staticmethod
    def forward(x, y):
        return x * y * y + x * x

    @staticmethod
    def backward(ctx, g):
        x, y = ctx.saved_tensors
        x_needed, y_needed = ctx.needs_input_grad
        return y * y * g if x_needed else None, 2 * x * y * g if y_needed else None

    @staticmethod
    @nestable_jvp
    def jvp(ctx, x_t, y_t):
        x, y = ctx.saved_tensors
        return (y * y + 2 * x) * x_t + 2 * x * y * y_t


class MissingTranspose(Gram):
    @staticmethod
    def backward(ctx, g):
        (X,) = ctx.saved_tensors
        return 2 * X @ g


class TransposedSquareWeight(Linear):
    """The weight is square, so its transpose has the same shape."""

    @staticmethod
    def backward(ctx, g):
        _, W = ctx.saved_tensors
        X_needed, W_needed, b_needed = ctx.needs_input_grad
        _, by_W, by_b = Linear.backward(ctx, g)
        return g @ W.T if X_needed else None, by_W if W_needed else None, by_b if b_needed else None


class ForgottenBias(Linear):
    @staticmethod
    def backward(ctx, g):
        return *Linear.backward(ctx, g)[:2], None


class WrongSecondOutput(SineAndCosine):
    @staticmethod
    def backward(ctx, g_sin, g_cos):
        (x,) = ctx.saved_tensors
        return x.cos() * g_sin + x.sin() * g_cos


class TangentOfOneInput(Product):
    @staticmethod
    @nestable_jvp
    def jvp(ctx, x_t, y_t):
        x, y = ctx.saved_tensors
        return 2 * x * y * x_t


class TangentOfOneOutput(SineAndCosine):
    @staticmethod
    @nestable_jvp
    def jvp(ctx, t):
        (x,) = ctx.saved_tensors
        return x.cos() * t, x.sin() * t


class HardGate(SavesForForward):
    """tanh(3 x), whose backward returns the incoming gradient."""

    @staticmethod
    def forward(x):
        return torch.tanh(3 * x)

    @staticmethod
    def backward(ctx, g):
        return g

    @staticmethod
    @nestable_jvp
    def jvp(ctx, t):
        (x,) = ctx.saved_tensors
        return 3 * t * (1 - torch.tanh(3 * x) ** 2)


class GumbelSoftmax(SavesForForward):
    """A softmax with given noise, whose backward returns the incoming gradient."""

    @staticmethod
    def forward(x):
        return ((x + torch.arange(3).to(x) / 7) / 0.5).softmax(-1)

    @staticmethod
    def backward(ctx, g):
        return g

    @staticmethod
    @nestable_jvp
    def jvp(ctx, t):
        (x,) = ctx.saved_tensors
        p = ((x + torch.arange(3).to(x) / 7) / 0.5).softmax(-1)
        return p * (t - (p * t).sum(-1, keepdim=True)) / 0.5


class UndeclaredRounding(SavesNothing):
    """Rounding, straight-through in both modes without declaring it."""

    @staticmethod
    def forward(x):
        return x.round()

    @staticmethod
    def backward(ctx, g):
        return g

    @staticmethod
    @nestable_jvp
    def jvp(ctx, t):
        return t.clone()


class OneInputGoesThrough(Product):
    @staticmethod
    def backward(ctx, g):
        x, _ = ctx.saved_tensors
        x_needed, y_needed = ctx.needs_input_grad
        return g if x_needed else None, x * x * g if y_needed else None


def shaped_rounding(x):
    return torch.sin(UndeclaredRounding.apply(x) + x)


class IgnoredMask(Masked):
    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 2 * x * g, None


class MaskedSum(Function):
    """Sum of unmasked elements; the gradient reaches all elements."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, mask):
        return (x * mask).sum(-1)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_forward(inputs[1])
        ctx.shape = inputs[0].shape

    @staticmethod
    def backward(ctx, g):
        return g.unsqueeze(-1).expand(ctx.shape), None

    @staticmethod
    @nestable_jvp
    def jvp(ctx, t, mask_t):
        (mask,) = ctx.saved_tensors
        return (t * mask).sum(-1)


class ClippedSquare(SavesInputs):
    """x² for positive x, else 0."""

    @staticmethod
    def forward(x):
        return torch.where(x > 0, x * x, 0.0)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 2 * x * g

    @staticmethod
    @nestable_jvp
    def jvp(ctx, t):
        (x,) = ctx.saved_tensors
        return torch.where(x > 0, 2 * x, 0.0) * t


class PaddedLength(Function):
    """Σ x² over the first entries of each row; the padding gets a gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, length):
        return x[..., :length].square().sum(-1)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])
        ctx.save_for_forward(inputs[0])
        ctx.length = inputs[1]

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 2 * x * g.unsqueeze(-1), None

    @staticmethod
    @nestable_jvp
    def jvp(ctx, t, length_t):
        (x,) = ctx.saved_tensors
        return (2 * x * t)[..., : ctx.length].sum(-1)


SQUARE = double(1.1, -0.2, 0.7, 0.4, shape=(2, 2))


SPECIMENS = [
    Wrong("flipped_sign", FlippedSign, X, ("HD101",)),
    Wrong("missing_term", MissingTerm, (X, Y), ("HD101",)),
    Wrong("missing_transpose", MissingTranspose, MATRIX, ("HD101",)),
    Wrong("transposed_square_weight", TransposedSquareWeight, (MATRIX[:, :2], SQUARE, BIAS), ("HD101",)),
    Wrong("forgotten_bias", ForgottenBias, (MATRIX, WEIGHT, BIAS), ("HD101",)),
    Wrong("wrong_second_output", WrongSecondOutput, X, ("HD101",)),
    Wrong("tangent_of_one_input", TangentOfOneInput, (X, Y), ("HD102",)),
    Wrong("tangent_of_one_output", TangentOfOneOutput, X, ("HD102",)),
    Wrong("hard_gate", HardGate, X, ("HD109",)),
    Wrong("gumbel_softmax", GumbelSoftmax, X, ("HD109",)),
    Wrong("undeclared_rounding", UndeclaredRounding, X + 0.1, ("HD109",)),
    Wrong("one_input_goes_through", OneInputGoesThrough, (X, Y), ("HD109",)),
    Wrong("shaped_rounding", shaped_rounding, X + 0.1, ("HD109",)),
    Wrong("ignored_mask", IgnoredMask, (X, MASK), ("HD110",)),
    Wrong("masked_sum", MaskedSum, (MATRIX, MASK), ("HD110",)),
    Wrong("clipped_square", ClippedSquare, X, ("HD110",)),
    Wrong("padded_length", PaddedLength, (MATRIX, 2), ("HD110",)),
]
