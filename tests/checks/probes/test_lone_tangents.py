"""A jvp that is right with all tangents, and not where one argument alone has one."""

import pytest
import torch
from torch.autograd import Function

from hodiff.checks import check

X = torch.tensor([[0.5, -1.2], [2.0, 0.3]], dtype=torch.float64)
ROW = torch.tensor([0.8, -0.4], dtype=torch.float64)


class Affine(Function):
    """x² + row, with the tangents that are not there as None."""

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


class RowForgotten(Affine):
    @staticmethod
    def jvp(ctx, x_t, row_t):
        (x,) = ctx.saved_tensors
        return torch.zeros_like(x) if x_t is None else Affine.jvp(ctx, x_t, row_t)


def brief(function):
    return check(function, (X, ROW), order=1, scipy=False)


def test_a_jvp_that_expands_is_right():
    report = brief(Affine)
    assert report.ok, str(report)


@pytest.mark.parametrize(
    ("function", "code", "said"),
    [
        (RowOfItsOwnShape, "HD408", r"shape (2,) for an output of shape (2, 2) where only row has a tangent"),
        (BothExpected, "HD408", "jvp of BothExpected where only x has a tangent: TypeError"),
        (RowForgotten, "HD102", "one at a time do not add up"),
    ],
)
def test_what_goes_wrong_with_one_tangent_is_named(function, code, said):
    (finding,) = brief(function).errors
    assert finding.code == code
    assert said in " ".join((finding.message, *finding.evidence))
