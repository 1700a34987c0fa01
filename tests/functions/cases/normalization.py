"""Normalizations."""

from functools import partial

import torch
from functions.case import FunctionCase, normal, uniform

from hodiff.functions.normalization.layers import (
    Normalization,
    batch_norm,
    group_norm,
    instance_norm,
    layer_norm,
    rms_norm,
)

FORMULA = r"\frac{x - \operatorname{mean} x}{\sqrt{\operatorname{var} x + \varepsilon}}\, w + b"


def by_primitives(x, weight, bias, dims, eps=1e-5):
    """Compute the normalization from its definition; parameters must broadcast."""
    y = (x - x.mean(dims, keepdim=True)) / torch.sqrt(x.var(dims, correction=0, keepdim=True) + eps)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def channels(parameter, x):
    return parameter.reshape(-1, *[1] * (x.dim() - 2))


def grouped(x, weight, bias, groups):
    y = by_primitives(x.reshape(x.shape[0], groups, -1), None, None, 2).reshape(x.shape)
    return y if weight is None else y * channels(weight, x) + channels(bias, x)


def drawn(shape, parameter, count=2):
    def inputs(dtype, g):
        parameters = [uniform(0.5, 2, parameter, dtype, g), normal(parameter, dtype, g)]
        return (normal(shape, dtype, g), *parameters[:count])

    return inputs


def bytes_with(statistics):
    """Return a function that counts the bytes of input, weight and statistics."""
    return lambda x, *parameters: x.nbytes + sum(each.nbytes for each in parameters[:1]) + statistics * x.element_size()


RUNNING = (torch.tensor([0.5, -1.0], dtype=torch.float64), torch.tensor([0.8, 2.0], dtype=torch.float64))


def evaluated(x, weight, bias):
    mean, variance = (each.to(x.dtype) for each in RUNNING)
    return batch_norm(x, mean, variance, weight, bias)


def empty(shape, parameters):
    shapes = shape, (parameters,), (parameters,)
    return lambda dtype: tuple(torch.ones(shape, dtype=dtype) for shape in shapes)


CASES = [
    FunctionCase(
        name="layer_norm",
        function=lambda x, w, b: layer_norm(x, (4,), w, b),
        Function=Normalization,
        inputs=drawn((2, 4), (4,)),
        formula=FORMULA,
        reference=lambda x, w, b: by_primitives(x, w, b, -1),
        saved_bytes=bytes_with(2 * 2),
        saved="input, weight, 2 numbers a sample",
        empty=empty((0, 4), 4),
    ),
    FunctionCase(
        name="layer_norm-plain-two-dimensions",
        function=lambda x: layer_norm(x, (2, 3)),
        Function=Normalization,
        inputs=drawn((2, 2, 3), (2, 3), 0),
        reference=lambda x: by_primitives(x, None, None, (-2, -1)),
        saved_bytes=bytes_with(2 * 2),
    ),
    FunctionCase(
        name="rms_norm",
        function=lambda x, w: rms_norm(x, (4,), w),
        Function=Normalization,
        inputs=drawn((2, 4), (4,), 1),
        formula=r"\frac{x}{\sqrt{\operatorname{mean} x^2 + \varepsilon}}\, w",
        reference=lambda x, w: x / torch.sqrt(x.square().mean(-1, keepdim=True) + torch.finfo(x.dtype).eps) * w,
        saved_bytes=bytes_with(0),
        saved="input, weight",
    ),
    FunctionCase(
        name="group_norm",
        function=lambda x, w, b: group_norm(x, 2, w, b),
        Function=Normalization,
        inputs=drawn((2, 4, 2), (4,)),
        formula=FORMULA,
        reference=partial(grouped, groups=2),
        saved_bytes=bytes_with(2 * 4),
        saved="input, weight, 2 numbers a group",
        empty=empty((0, 4, 2), 4),
    ),
    FunctionCase(
        name="instance_norm",
        function=lambda x, w, b: instance_norm(x, None, None, w, b),
        Function=Normalization,
        inputs=drawn((2, 2, 3), (2,)),
        formula=FORMULA,
        reference=partial(grouped, groups=2),
        saved_bytes=bytes_with(2 * 4),
        saved="input, weight, 2 numbers an instance",
        empty=empty((2, 2, 0), 2),
    ),
    FunctionCase(
        name="batch_norm-training",
        function=lambda x, w, b: batch_norm(x, None, None, w, b, training=True),
        Function=Normalization,
        inputs=drawn((3, 2, 2), (2,)),
        formula=FORMULA,
        reference=lambda x, w, b: by_primitives(x, channels(w, x), channels(b, x), (0, 2)),
        saved_bytes=bytes_with(3 * 2),
        saved="input, weight, 3 numbers a channel",
    ),
    FunctionCase(
        name="batch_norm-training-plain",
        function=lambda x: batch_norm(x, None, None, training=True),
        Function=Normalization,
        inputs=drawn((4, 3), (3,), 0),
        reference=lambda x: by_primitives(x, None, None, 0),
        saved_bytes=bytes_with(3 * 3),
    ),
    FunctionCase(
        name="batch_norm-evaluation",
        function=evaluated,
        Function=None,
        inputs=drawn((3, 2, 2), (2,)),
        formula=r"\frac{x - m}{\sqrt{v + \varepsilon}}\, w + b",
        reference=lambda x, w, b: (
            (x - channels(RUNNING[0], x)) / (channels(RUNNING[1], x) + 1e-5).sqrt() * channels(w, x) + channels(b, x)
        ),
        saved="input, one number a channel",
    ),
]
