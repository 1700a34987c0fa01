"""Right Functions from which the wrong ones inherit all rules but one."""

import torch
from torch.autograd import Function

from hodiff.functions import nestable_jvp


def double(*numbers, shape=None):
    x = torch.tensor(numbers, dtype=torch.float64)
    return x if shape is None else x.reshape(shape)


X = double(0.5, -1.2, 2.0)
Y = double(1.5, 0.4, -0.7)
MATRIX = double(0.5, -1.2, 2.0, 0.3, 0.9, -0.6, shape=(2, 3))
WEIGHT = double(1.1, -0.2, 0.7, 0.4, -0.8, 1.3, shape=(2, 3))
BIAS = double(0.2, -0.5)


class SavesInputs(Function):
    """Every rule reads the inputs."""

    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)


class SavesForForward(Function):
    """Save inputs for forward mode only: backward reads nothing."""

    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_forward(*inputs)


class SavesNothing(Function):
    """Save nothing: the rules read nothing."""

    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass


class Cube(SavesInputs):
    """x³."""

    @staticmethod
    def forward(x):
        return x**3

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * g

    @staticmethod
    @nestable_jvp
    def jvp(ctx, t):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * t


class Exponential(SavesInputs):
    """exp(x)."""

    @staticmethod
    def forward(x):
        return x.exp()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return x.exp() * g

    @staticmethod
    @nestable_jvp
    def jvp(ctx, t):
        (x,) = ctx.saved_tensors
        return x.exp() * t


class Product(SavesInputs):
    """x² y, of equal shapes."""

    @staticmethod
    def forward(x, y):
        return x * x * y

    @staticmethod
    def backward(ctx, g):
        x, y = ctx.saved_tensors
        x_needed, y_needed = ctx.needs_input_grad
        return 2 * x * y * g if x_needed else None, x * x * g if y_needed else None

    @staticmethod
    @nestable_jvp
    def jvp(ctx, x_t, y_t):
        x, y = ctx.saved_tensors
        return 2 * x * y * x_t + x * x * y_t


class SineAndCosine(SavesInputs):
    """(sin x, cos x)."""

    @staticmethod
    def forward(x):
        return x.sin(), x.cos()

    @staticmethod
    def backward(ctx, g_sin, g_cos):
        (x,) = ctx.saved_tensors
        return x.cos() * g_sin - x.sin() * g_cos

    @staticmethod
    @nestable_jvp
    def jvp(ctx, t):
        (x,) = ctx.saved_tensors
        return x.cos() * t, -x.sin() * t


class SumOfSquares(SavesInputs):
    """Σ x², a number."""

    @staticmethod
    def forward(x):
        return (x * x).sum()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 2 * x * g

    @staticmethod
    @nestable_jvp
    def jvp(ctx, t):
        (x,) = ctx.saved_tensors
        return (2 * x * t).sum()


class Linear(Function):
    """X Wᵀ + b."""

    generate_vmap_rule = True

    @staticmethod
    def forward(X, W, b):
        return X @ W.T + b

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:2])
        ctx.save_for_forward(*inputs[:2])

    @staticmethod
    def backward(ctx, g):
        X, W = ctx.saved_tensors
        X_needed, W_needed, b_needed = ctx.needs_input_grad
        return g @ W if X_needed else None, g.T @ X if W_needed else None, g.sum(0) if b_needed else None

    @staticmethod
    @nestable_jvp
    def jvp(ctx, X_t, W_t, b_t):
        X, W = ctx.saved_tensors
        return X_t @ W.T + X @ W_t.T + b_t


class Gram(SavesInputs):
    """Xᵀ X."""

    @staticmethod
    def forward(X):
        return X.T @ X

    @staticmethod
    def backward(ctx, g):
        (X,) = ctx.saved_tensors
        return X @ (g + g.T)

    @staticmethod
    @nestable_jvp
    def jvp(ctx, t):
        (X,) = ctx.saved_tensors
        return t.T @ X + X.T @ t


class Scale(SavesInputs):
    """x y with broadcasting."""

    @staticmethod
    def forward(x, y):
        return x * y

    @staticmethod
    def backward(ctx, g):
        x, y = ctx.saved_tensors
        x_needed, y_needed = ctx.needs_input_grad
        return (g * y).sum_to_size(x.shape) if x_needed else None, (g * x).sum_to_size(y.shape) if y_needed else None

    @staticmethod
    @nestable_jvp
    def jvp(ctx, x_t, y_t):
        x, y = ctx.saved_tensors
        return x_t * y + x * y_t


class Power(Function):
    """xⁿ for a Python integer n."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, n):
        return x**n

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, ctx.n = inputs
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return ctx.n * x ** (ctx.n - 1) * g, None

    @staticmethod
    @nestable_jvp
    def jvp(ctx, t, n_t):
        (x,) = ctx.saved_tensors
        return ctx.n * x ** (ctx.n - 1) * t


class Masked(SavesInputs):
    """x² where the mask is True, else 0; the mask is an input."""

    @staticmethod
    def forward(x, mask):
        return x * x * mask

    @staticmethod
    def backward(ctx, g):
        x, mask = ctx.saved_tensors
        return 2 * x * mask * g, None

    @staticmethod
    @nestable_jvp
    def jvp(ctx, t, mask_t):
        x, mask = ctx.saved_tensors
        return 2 * x * mask * t


class ExponentialOfOutput(Function):
    """exp(x), whose backward reads the output; forward mode saves the input."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.exp()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return y * g

    @staticmethod
    @nestable_jvp
    def jvp(ctx, t):
        (x,) = ctx.saved_tensors
        return x.exp() * t


class Sinh(Function):
    """(sinh x, cosh x); the second output is saved for backward."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.sinh(), x.cosh()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*output)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, g, g_cosh):
        y, cosh = ctx.saved_tensors
        return cosh * g + y * g_cosh

    @staticmethod
    @nestable_jvp
    def jvp(ctx, t):
        (x,) = ctx.saved_tensors
        return x.cosh() * t, x.sinh() * t


def batched_like_input(function):
    """Add a handwritten batching rule to an elementwise Function of one tensor."""

    def vmap(info, in_dims, x):
        return function.apply(x), in_dims[0]

    function.generate_vmap_rule = False
    function.vmap = staticmethod(vmap)
    return function
