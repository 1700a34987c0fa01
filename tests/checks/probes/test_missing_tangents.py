"""A jvp that is correct if all arguments have tangents, and wrong if only one argument has a tangent."""

import pytest
import torch
from torch.autograd import Function

from hodiff.checks import check

X = torch.tensor([[0.5, -1.2], [2.0, 0.3]], dtype=torch.float64)
ROW = torch.tensor([0.8, -0.4], dtype=torch.float64)


class Affine(Function):
    """x² + row, with None for missing tangents."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, row):
        return x**2 + row

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])
        ctx.save_for_forward(inputs[0])
        ctx.row_shape = inputs[1].shape
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        if g is None:
            return None, None
        by_x = 2 * x * g if ctx.needs_input_grad[0] else None
        return by_x, g.sum_to_size(ctx.row_shape) if ctx.needs_input_grad[1] else None

    @staticmethod
    def jvp(ctx, x_t, row_t):
        (x,) = ctx.saved_tensors
        if x_t is None:
            return row_t.expand(x.shape)
        return 2 * x * x_t if row_t is None else 2 * x * x_t + row_t


class RowOfItsOwnShape(Affine):
    @staticmethod
    def jvp(ctx, x_t, row_t):
        return row_t if x_t is None else Affine.jvp(ctx, x_t, row_t)


class BothExpected(Affine):
    @staticmethod
    def jvp(ctx, x_t, row_t):
        (x,) = ctx.saved_tensors
        return 2 * x * x_t + row_t


class OneTooMany(Affine):
    @staticmethod
    def jvp(ctx, x_t, row_t):
        tangent = Affine.jvp(ctx, x_t, row_t)
        return tangent if x_t is not None and row_t is not None else (tangent, tangent)


class RowForgotten(Affine):
    @staticmethod
    def jvp(ctx, x_t, row_t):
        (x,) = ctx.saved_tensors
        return torch.zeros_like(x) if x_t is None else Affine.jvp(ctx, x_t, row_t)


class ByIterations(Affine):
    """Its tangent is slightly off without a tangent of x, as with a solver that stops at a tolerance."""

    @staticmethod
    def jvp(ctx, x_t, row_t):
        tangent = Affine.jvp(ctx, x_t, row_t)
        return tangent if x_t is not None else tangent * (1 + 1e-9)


class OfAnIndex(Function):
    """x² at some indices; torch gives an index no tangent, even where it materializes other tangents."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, index, row):
        return x[index] ** 2 * row

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, g):
        x, index, row = ctx.saved_tensors
        by_x = torch.zeros_like(x).index_add(0, index, 2 * x[index] * row * g) if ctx.needs_input_grad[0] else None
        return by_x, None, (x[index] ** 2 * g).sum_to_size(row.shape) if ctx.needs_input_grad[2] else None

    @staticmethod
    def jvp(ctx, x_t, index_t, row_t):
        assert index_t is None
        x, index, row = ctx.saved_tensors
        return 2 * x[index] * x_t[index] * row + x[index] ** 2 * row_t


class WrongOfAnIndex(OfAnIndex):
    @staticmethod
    def jvp(ctx, x_t, index_t, row_t):
        tangent = OfAnIndex.jvp(ctx, x_t, index_t, row_t)
        return tangent if x_t.any() else -tangent


def first_order_check(function):
    return check(function, (X, ROW), order=1, scipy=False)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("function", [Affine, ByIterations])
def test_right_jvp_with_a_single_tangent_passes(function):
    report = first_order_check(function)
    assert report.ok, str(report)


def test_integer_arguments_have_no_tangents():
    index = torch.tensor([1, 0])

    def verdict(function):
        return check(lambda x, row: function.apply(x.sin(), index, row), (X, ROW), order=1, scipy=False, vmap=False)

    assert verdict(OfAnIndex).ok
    assert "HD102" in verdict(WrongOfAnIndex).codes


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("function", "code", "said"),
    [
        (RowOfItsOwnShape, "HD408", r"shape (2,) for an output of shape (2, 2) where only row has a tangent"),
        (BothExpected, "HD408", "jvp of BothExpected where only x has a tangent: TypeError"),
        (OneTooMany, "HD408", "returns 2 tangents where only x has one, and 1"),
        (RowForgotten, "HD102", "one at a time do not add up"),
    ],
)
def test_wrong_jvp_with_a_single_tangent_is_named(function, code, said):
    (finding,) = first_order_check(function).errors
    assert finding.code == code
    assert said in " ".join((finding.message, *finding.evidence))
