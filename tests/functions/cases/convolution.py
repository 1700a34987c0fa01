"""Convolutions."""

import itertools
from functools import partial

import torch
import torch.nn.functional as F
from functions.case import FunctionCase, drawn

from hodiff.functions.convolution.convolve import Convolution, conv1d, conv2d, conv3d


def factors(x, weight, bias=None):
    del bias
    return x.nbytes + weight.nbytes


def sum_of_shifts(x, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
    """Compute the convolution from its definition, by primitives that no correction replaces."""
    kernel = weight.shape[2:]
    stride, padding, dilation = (
        each if isinstance(each, tuple) else (each,) * len(kernel) for each in (stride, padding, dilation)
    )
    x = F.pad(x, [each for p in reversed(padding) for each in (p, p)])
    sizes = [(n - d * (k - 1) - 1) // s + 1 for n, k, s, d in zip(x.shape[2:], kernel, stride, dilation, strict=True)]
    y = 0.0
    for element in itertools.product(*map(range, kernel)):
        at = [
            slice(d * k, d * k + s * (n - 1) + 1, s)
            for k, n, s, d in zip(element, sizes, stride, dilation, strict=True)
        ]
        seen = x[(..., *at)].unflatten(1, (groups, -1))
        w = weight[(..., *element)].unflatten(0, (groups, -1))
        y = y + torch.einsum("ngi...,goi->ngo...", seen, w).flatten(1, 2)
    return y if bias is None else y + bias.reshape(-1, *[1] * len(kernel))


def case(name, function, *shapes, **options):
    return FunctionCase(
        name=name,
        function=partial(function, **options) if options else function,
        Function=Convolution,
        inputs=drawn(*shapes),
        formula=r"b_o + \sum_{i,k} w_{o,i,k}\, x_{n,i,st + dk - p}",
        reference=partial(sum_of_shifts, **options),
        saved_bytes=factors,
        saved="input and weight",
        empty=lambda dtype: tuple(
            torch.ones(0 if i == 0 else shape[0], *shape[1:], dtype=dtype) for i, shape in enumerate(shapes)
        ),
    )


CASES = [
    case("conv1d", conv1d, (1, 2, 4), (2, 2, 2), (2,)),
    case("conv1d-strided", conv1d, (1, 1, 9), (2, 1, 3), (2,), stride=2, padding=1, dilation=2),
    case("conv2d", conv2d, (1, 1, 3, 3), (2, 1, 2, 2), (2,), padding=1),
    case("conv2d-groups", conv2d, (1, 2, 2, 3), (4, 1, 2, 1), (4,), groups=2),
    case("conv3d", conv3d, (1, 1, 2, 2, 2), (1, 1, 1, 2, 2), (1,), padding=(0, 0, 1)),
]
