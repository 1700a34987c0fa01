"""Missing rules and derivatives: HD401 to HD408."""

import torch
import torch.nn.functional as F
from torch.autograd import Function
from zoo.bases import (
    BIAS,
    MATRIX,
    WEIGHT,
    Cube,
    Exponential,
    Linear,
    Product,
    SavesInputs,
    SavesNothing,
    SineAndCosine,
    SumOfSquares,
    X,
    Y,
)
from zoo.specimen import BY_TORCH, Wrong

from hodiff.functions import nestable_jvp


class NoTangent(Cube):
    jvp = Function.jvp


class NoTangentOfLinear(Linear):
    jvp = Function.jvp


def half_a_tangent(x):
    """Add two Functions, one of which has a jvp."""
    return NoTangent.apply(Exponential.apply(x))


class DoubledBatch(Cube):
    generate_vmap_rule = False

    @staticmethod
    def vmap(info, in_dims, x):
        return 2 * Cube.apply(x), in_dims[0]


class BatchInFront(Cube):
    """Right only if the batch dimension comes first."""

    generate_vmap_rule = False

    @staticmethod
    def vmap(info, in_dims, x):
        return Cube.apply(x), 0


class BatchAtTheEnd(Product):
    """Broadcast the unbatched argument along the batch dimension."""

    generate_vmap_rule = False

    @staticmethod
    def vmap(info, in_dims, x, y):
        x, y = (each if dim is None else each.movedim(dim, -1) for each, dim in zip((x, y), in_dims, strict=True))
        return BatchAtTheEnd.apply(*torch.broadcast_tensors(x, y)), -1


class SumOverBatch(SumOfSquares):
    """The gradient adds the samples and divides the sum among them."""

    generate_vmap_rule = False

    @staticmethod
    def vmap(info, in_dims, x):
        return SumOfSquares.apply(x).expand(info.batch_size), 0


class TupleBatch(SineAndCosine):
    """The batching rule swaps the outputs."""

    generate_vmap_rule = False

    @staticmethod
    def vmap(info, in_dims, x):
        return SineAndCosine.apply(x)[::-1], (in_dims[0], in_dims[0])


class NoBatchingOfLinear(Linear):
    generate_vmap_rule = False


class SurrogateGradient(SavesNothing):
    """Rounding with a declared surrogate derivative, which compiled tangents ignore."""

    @staticmethod
    def forward(x):
        return x.round()

    @staticmethod
    def backward(ctx, g):
        return g.clone()

    @staticmethod
    @nestable_jvp
    def jvp(ctx, t):
        return t.clone()


class OtherWhenCompiled(Cube):
    """Compute something else in compiled code."""

    @staticmethod
    def forward(x):
        return x**3 + 1 if torch.compiler.is_compiling() else x**3


class ContextInForwardOfTwo(Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        ctx.save_for_forward(x, y)
        return x * x * y

    @staticmethod
    def backward(ctx, g):
        return Product.backward(ctx, g)

    @staticmethod
    def jvp(ctx, x_t, y_t):
        return Product.jvp(ctx, x_t, y_t)


def piecewise(x):
    """A torch function with a first derivative only."""
    return F.hardsigmoid(x) * x


def distances(x, y):
    """Distances, which torch differentiates only once."""
    return torch.cdist(x, y) ** 2


def normalized_rows(x):
    """Layer normalization, whose tangent in torch is constant to reverse mode."""
    return F.layer_norm(x, x.shape[-1:])


def _cube(x: torch.Tensor) -> torch.Tensor:
    return x**3


# pytest imports this module twice for doctests, and a second definition would free the first operator.
if not hasattr(torch.ops.hodiff_zoo, "cube"):
    torch.library.custom_op("hodiff_zoo::cube", _cube, mutates_args=())
opaque_cube = torch.ops.hodiff_zoo.cube


class BranchInBackward(Cube):
    """x³; backward branches on values."""

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * g if bool((x != 0).any()) else torch.zeros_like(x)


def writes_into_constant(x):
    """Write in place into a tensor without a batch dimension."""
    out = torch.zeros(len(x), dtype=x.dtype, device=x.device)
    out += x**3
    return out


class FrozenInputRaises(Product):
    """Raise if y needs no gradient."""

    @staticmethod
    def backward(ctx, g):
        x, y = ctx.saved_tensors
        x_needed, y_needed = ctx.needs_input_grad
        by_y = x * x * g if y_needed else None
        return 2 * x * y * g if x_needed else None, by_y.reshape(y.shape)


class TangentRaises(Product):
    """jvp accepts one tangent, but gets two."""

    @staticmethod
    @nestable_jvp
    def jvp(ctx, t):
        x, y = ctx.saved_tensors
        return 2 * x * y * t


class BiasOfItsOwnShape(Linear):
    """The tangent of the bias has the output's shape only if another argument has a tangent."""

    @staticmethod
    def setup_context(ctx, inputs, output):
        Linear.setup_context(ctx, inputs, output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, g):
        return (None, None, None) if g is None else Linear.backward(ctx, g)

    @staticmethod
    @nestable_jvp
    def jvp(ctx, X_t, W_t, b_t):
        X, W = ctx.saved_tensors
        by_X = None if X_t is None else X_t @ W.T
        by_W = None if W_t is None else X @ W_t.T
        return sum(each for each in (by_X, by_W, b_t) if each is not None)


class SecondOrderRaises(SavesInputs):
    """Backward raises if it is differentiated."""

    @staticmethod
    def forward(x):
        return x.sin()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return RefusingCosine.apply(x) * g

    @staticmethod
    @nestable_jvp
    def jvp(ctx, t):
        (x,) = ctx.saved_tensors
        return x.cos() * t


class RefusingCosine(SavesInputs):
    @staticmethod
    def forward(x):
        return x.cos()

    @staticmethod
    def backward(ctx, g):
        raise NotImplementedError("the second derivative is not written yet")

    @staticmethod
    @nestable_jvp
    def jvp(ctx, t):
        (x,) = ctx.saved_tensors
        return -x.sin() * t


LAYER = (MATRIX, WEIGHT, BIAS)
EAGER = {"compile": "aot_eager"}

SPECIMENS = [
    Wrong("no_tangent_of_linear", NoTangentOfLinear, LAYER, ("HD401",)),
    Wrong("half_a_tangent", half_a_tangent, X, ("HD401",)),
    Wrong("doubled_batch", DoubledBatch, X, ("HD402",)),
    Wrong("batch_in_front", BatchInFront, X, ("HD402",)),
    Wrong("batch_at_the_end", BatchAtTheEnd, (X, Y), ("HD402",)),
    Wrong("sum_over_batch", SumOverBatch, X, ("HD402",)),
    Wrong("tuple_batch", TupleBatch, X, ("HD402",)),
    Wrong("no_batching_of_linear", NoBatchingOfLinear, LAYER, ("HD403",)),
    Wrong("surrogate_gradient", SurrogateGradient, X + 0.1, ("HD404",), {**EAGER, "approximate": True}),
    Wrong("other_when_compiled", OtherWhenCompiled, X, ("HD404",), EAGER),
    Wrong("context_in_forward_of_two", ContextInForwardOfTwo, (X, Y), ("HD405",)),
    Wrong("piecewise", piecewise, X, ("HD406",), BY_TORCH),
    Wrong("distances", distances, (MATRIX, WEIGHT), ("HD406",), BY_TORCH),
    Wrong("normalized_rows", normalized_rows, MATRIX, ("HD406",), BY_TORCH),
    Wrong("opaque_cube", opaque_cube, X, ("HD406",)),
    Wrong("branch_in_backward", BranchInBackward, X, ("HD407",)),
    Wrong("writes_into_constant", writes_into_constant, X, ("HD407",)),
    Wrong("frozen_input_raises", FrozenInputRaises, (X, Y), ("HD408",)),
    Wrong("tangent_raises", TangentRaises, (X, Y), ("HD408",)),
    Wrong("bias_of_its_own_shape", BiasOfItsOwnShape, LAYER, ("HD408",)),
    Wrong("second_order_raises", SecondOrderRaises, X, ("HD408",)),
]
