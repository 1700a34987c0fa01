"""Tests of convolution: geometries against torch's operator, the kernels that run, vmap, and refused arguments."""

import itertools
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from drawing import draw
from torch.utils._python_dispatch import TorchDispatchMode

import hodiff
from hodiff.functions.convolution.convolve import conv1d, conv2d, conv3d
from hodiff.functions.convolution.maps import (
    Convolution,
    ConvolutionInputGradient,
    ConvolutionWeightGradient,
    Geometry,
)

GEOMETRIES = [
    (conv1d, F.conv1d, (2, 4, 11), (6, 2, 3), {"stride": 2, "padding": 1, "dilation": 2, "groups": 2}),
    (conv1d, F.conv1d, (3, 2, 7), (3, 2, 1), {"stride": 3}),
    (conv1d, F.conv1d, (4, 9), (2, 4, 3), {"padding": "same", "dilation": 2}),
    (conv2d, F.conv2d, (2, 3, 8, 7), (4, 3, 3, 2), {"stride": (2, 3), "padding": (1, 0)}),
    (conv2d, F.conv2d, (2, 3, 9, 9), (4, 3, 3, 3), {"stride": 2}),
    (conv2d, F.conv2d, (2, 3, 10, 10), (4, 3, 3, 3), {"stride": 4, "dilation": (2, 1)}),
    (conv2d, F.conv2d, (2, 4, 5, 6), (4, 1, 3, 3), {"padding": "same", "groups": 4}),
    (conv2d, F.conv2d, (3, 5, 6), (2, 3, 2, 2), {"padding": "valid"}),
    (conv2d, F.conv2d, (1, 2, 3, 3), (2, 2, 3, 3), {"padding": 3}),
    (conv3d, F.conv3d, (2, 2, 4, 5, 6), (4, 1, 2, 3, 2), {"stride": (1, 2, 1), "padding": (0, 1, 1), "groups": 2}),
]


def close(a, b, tolerance=1e-11):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize(("ours", "theirs", "input_shape", "weight_shape", "options"), GEOMETRIES)
def test_derivatives_match_torch_for_all_geometries(ours, theirs, input_shape, weight_shape, options, with_bias):
    """Value, gradients and products by every route match torch's double backward."""
    tensors = (draw(*input_shape), draw(*weight_shape, seed=1), *([draw(weight_shape[0], seed=2)] * with_bias))
    directions = tuple(draw(*t.shape, seed=k) for k, t in enumerate(tensors, 3))

    def objective(function):
        return lambda arguments: function(*arguments, **options).sin().sum()

    close(ours(*tensors, **options), theirs(*tensors, **options))
    for a, b in zip(*(torch.func.grad(objective(f))(tensors) for f in (ours, theirs)), strict=True):
        close(a, b)
    truth = torch.func.vjp(torch.func.grad(objective(theirs)), tensors)[1](directions)[0]
    for route in ("reverse-over-reverse", "forward-over-reverse", "reverse-over-forward"):
        for a, b in zip(hodiff.hvp(objective(ours), tensors, directions, route=route), truth, strict=True):
            close(a, b, 1e-10)


@pytest.mark.parametrize("dilation", [1, 3])
@pytest.mark.parametrize("kernel", [(2, 3), (4, 2), (1, 5)])
def test_same_padding_puts_the_extra_zero_on_the_right(kernel, dilation):
    x, weight = draw(2, 1, 7, 8), draw(3, 1, *kernel, seed=1)
    total = [dilation * (k - 1) for k in kernel]
    padded = F.pad(x, [total[1] // 2, total[1] - total[1] // 2, total[0] // 2, total[0] - total[0] // 2])
    y = conv2d(x, weight, padding="same", dilation=dilation)
    close(y, F.conv2d(padded, weight, dilation=dilation))
    assert y.shape[-2:] == x.shape[-2:]


def test_output_and_both_gradients_are_one_trilinear_form():
    geometry = Geometry((2, 1), (1, 0), (1, 2), 2, (5, 6), (3, 2))
    x, weight = draw(2, 4, 5, 6), draw(6, 2, 3, 2, seed=1)
    y = Convolution.apply(x, weight, None, geometry)
    g = draw(*y.shape, seed=2)
    form = (g * y).sum()
    close((x * ConvolutionInputGradient.apply(g, weight, geometry)).sum(), form)
    close((weight * ConvolutionWeightGradient.apply(x, g, geometry, False)).sum(), form)


class Kernels(TorchDispatchMode):
    """Count convolution kernels by the derivative they compute."""

    def __init__(self):
        super().__init__()
        self.count = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.convolution.default:
            self.count["convolution"] += 1
        if func is torch.ops.aten.convolution_backward.default:
            by_input, by_weight, _ = args[-1]
            self.count["by input"] += by_input
            self.count["by weight"] += by_weight
        return func(*args, **(kwargs or {}))


def kernels_of_a_product(data_is_differentiated):
    x = draw(2, 3, 6, 6).requires_grad_(data_is_differentiated)
    weights = [draw(4, 3, 3, 3, seed=1).requires_grad_(), draw(2, 4, 3, 3, seed=2).requires_grad_()]
    with Kernels() as kernels:
        loss = conv2d(conv2d(x, weights[0]).tanh(), weights[1]).tanh().sum()
        gradients = torch.autograd.grad(loss, weights, create_graph=True)
        torch.autograd.grad(gradients, weights, [torch.ones_like(w) for w in weights])
    return dict(kernels.count)


def test_hvp_runs_no_kernel_by_constant_data():
    """The first layer runs convolution and weight gradient twice; the second layer runs all three maps three times."""
    assert kernels_of_a_product(False) == {"convolution": 5, "by input": 3, "by weight": 5}


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("batched", list(itertools.product([0, 1, None], [0, 3, None], [0, 1, None]))[:-1])
def test_vmap_matches_a_loop(batched, groups):
    shapes = [(2, 4, 5, 4), (6, 4 // groups, 3, 2), (6,)]
    # The batch dimension goes where `in_dims` puts it.
    tensors = [
        draw(*shape, seed=k) if dim is None else draw(3, *shape, seed=k).movedim(0, dim)
        for k, (shape, dim) in enumerate(zip(shapes, batched, strict=True))
    ]

    def gradients(function):
        def f(x, weight, bias):
            return function(x, weight, bias, stride=(1, 2), padding=1, groups=groups).sin().sum()

        return lambda *arguments: (f(*arguments), *torch.func.grad(f, (0, 1, 2))(*arguments))

    got = torch.func.vmap(gradients(conv2d), in_dims=batched)(*tensors)
    for k in range(3):
        one = [t if dim is None else t.select(dim, k) for t, dim in zip(tensors, batched, strict=True)]
        for a, b in zip(got, gradients(F.conv2d)(*one), strict=True):
            close(a[k], b)


def test_vmapped_hvp_runs_each_kernel_once():
    x, weight = draw(2, 3, 6, 6), draw(4, 3, 3, 3, seed=1)

    def product(v):
        return hodiff.hvp(lambda w: conv2d(x, w).sin().sum(), weight, v, route="forward-over-reverse")

    with Kernels() as one:
        product(torch.ones_like(weight))
    with Kernels() as many:
        torch.func.vmap(product)(draw(5, *weight.shape, seed=2))
    assert many.count == one.count


def test_channels_last_inputs_match():
    x, weight = draw(2, 3, 6, 5), draw(4, 3, 3, 3, seed=1)
    f = lambda x, w: conv2d(x, w, padding=1).sin().sum()  # noqa: E731
    strided = x.to(memory_format=torch.channels_last)
    for a, b in zip(*(torch.func.grad(f, (0, 1))(each, weight) for each in (x, strided)), strict=True):
        close(a, b)


def test_autocast_dtypes_match_torch():
    x, weight = torch.randn(1, 2, 4, 4), torch.randn(3, 2, 3, 3, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = conv2d(x, weight)
        assert y.dtype == torch.bfloat16
        assert conv2d(x.double(), weight.double()).dtype == torch.float64
        assert torch.equal(y, F.conv2d(x, weight))
    assert torch.autograd.grad(y.float().sum(), weight)[0].dtype == torch.float32


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (((3, 4, 4), (2, 3, 2)), {}, "conv2d: weight: expected 4 dimensions"),
        (((4, 4), (2, 3, 2, 2)), {}, "conv2d: input: expected 4 dimensions, or 3 without a batch, got shape (4, 4)"),
        (((1, 2, 4, 4), (2, 3, 2, 2)), {}, "conv2d: input: expected 3 channels"),
        (((1, 3, 4, 4), (2, 3, 2, 2), (3,)), {}, "conv2d: bias: expected shape (2,), got (3,)"),
        (((1, 4, 4, 4), (3, 2, 2, 2)), {"groups": 2}, "conv2d: groups: expected a divisor of the 3 out channels"),
        (((1, 3, 4, 4), (2, 3, 2, 2)), {"groups": 0}, "conv2d: groups"),
        (((1, 3, 4, 4), (2, 3, 2, 2)), {"stride": 0}, "conv2d: stride: expected an int of 1 or more, or 2 of them"),
        (((1, 3, 4, 4), (2, 3, 2, 2)), {"dilation": (1, 1, 1)}, "conv2d: dilation"),
        (((1, 3, 4, 4), (2, 3, 2, 2)), {"padding": -1}, "conv2d: padding: expected an int of 0 or more"),
        (((1, 3, 4, 4), (2, 3, 2, 2)), {"padding": "full"}, "conv2d: padding: expected ints, 'same' or 'valid'"),
        (((1, 3, 4, 4), (2, 3, 2, 2)), {"padding": "same", "stride": 2}, "'same' needs stride 1"),
        (((1, 3, 4, 4), (2, 3, 5, 2)), {}, "expected spatial sizes that hold the kernel (5, 2)"),
    ],
)
def test_rejects_bad_shapes_and_options(arguments, options, message):
    with pytest.raises(hodiff.errors.InputError) as refusal:
        conv2d(*(torch.zeros(shape) for shape in arguments), **options)
    assert message in str(refusal.value)


def test_rejects_mixed_and_integer_dtypes():
    with pytest.raises(hodiff.errors.InputError, match="expected one dtype, got input float64, weight float32"):
        conv1d(torch.zeros(1, 1, 3, dtype=torch.float64), torch.zeros(1, 1, 2))
    with pytest.raises(hodiff.errors.InputError, match="input: expected a floating-point tensor, got int64"):
        conv1d(torch.zeros(1, 1, 3, dtype=torch.int64), torch.zeros(1, 1, 2))
