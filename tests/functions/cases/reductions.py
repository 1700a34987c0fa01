"""Reductions and normalizations along dimensions, and the smooth absolute value."""

import torch
from functions.case import Extremes, FunctionCase, drawn, elementwise, total_bytes
from mpmath import mp

from hodiff.functions.softmax.logsumexp import LogSumExp
from hodiff.functions.softmax.reductions import AMax, LogCosh, amax, log_cosh, log_softmax, logsumexp, softmax
from hodiff.functions.softmax.softmax import LogSoftmax, Softmax, SoftmaxProduct

INF = float("inf")
NAN = float("nan")


def exponentials(x, dim):
    """Compute softmax by primitives, shifted by a constant."""
    e = torch.exp(x - x.detach().amax(dim, keepdim=True))
    return e / e.sum(dim, keepdim=True)


def exact_log_cosh(x):
    # A sum of positive terms loses no digits near zero.
    return mp.log1p(mp.sinh(x) ** 2) / 2 if abs(x) < 1 else abs(x) + mp.log1p(mp.exp(-2 * abs(x))) - mp.log(2)


CASES = [
    FunctionCase(
        name="logsumexp",
        function=lambda x: logsumexp(x, -1),
        Function=LogSumExp,
        inputs=drawn((3, 4)),
        formula=r"\log \sum_c e^{x_c}",
        reference=lambda x: torch.log(torch.exp(x).sum(-1)),
        saved_bytes=lambda x: x.nbytes + x.nbytes // 4,
        saved="input, output",
        empty=lambda dtype: (torch.ones(0, 3, dtype=dtype),),
    ),
    FunctionCase(
        name="logsumexp-dims",
        function=lambda x: logsumexp(x, (0, 2), keepdim=True),
        Function=LogSumExp,
        inputs=drawn((2, 3, 2)),
        reference=lambda x: torch.log(torch.exp(x).sum((0, 2), keepdim=True)),
    ),
    FunctionCase(
        name="softmax",
        function=lambda x: softmax(x, 0),
        Function=Softmax,
        inputs=drawn((4, 3)),
        formula=r"e^{x_c} / \sum_k e^{x_k}",
        reference=lambda x: exponentials(x, 0),
        saved_bytes=total_bytes,
        saved="output",
        empty=lambda dtype: (torch.ones(0, 3, dtype=dtype),),
    ),
    FunctionCase(
        name="softmax-dims",
        function=lambda x: softmax(x, (0, 2)),
        Function=Softmax,
        inputs=drawn((2, 3, 2)),
        reference=lambda x: exponentials(x, (0, 2)),
    ),
    FunctionCase(
        name="softmax-product",
        function=lambda p, v: SoftmaxProduct.call(p, v, -1),
        Function=SoftmaxProduct,
        inputs=drawn((2, 3), (2, 3)),
        formula=r"p \circ v - p\,\langle p, v \rangle",
        reference=lambda p, v: p * v - p * (p * v).sum(-1, keepdim=True),
        saved_bytes=lambda p, v: p.nbytes + v.nbytes,
        saved="inputs",
    ),
    FunctionCase(
        name="log_softmax",
        function=lambda x: log_softmax(x, 1),
        Function=LogSoftmax,
        inputs=drawn((2, 3, 2)),
        formula=r"x_c - \log \sum_k e^{x_k}",
        reference=lambda x: torch.log(exponentials(x, 1)),
        saved_bytes=lambda x: x.nbytes,
        saved="input",
        empty=lambda dtype: (torch.ones(2, 3, 0, dtype=dtype),),
    ),
    elementwise(
        name="log_cosh",
        function=log_cosh,
        Function=LogCosh,
        formula=r"\log \cosh x",
        reference=lambda x: torch.log(torch.cosh(x)),
        extremes=[
            Extremes(
                exact_log_cosh,
                limits={INF: (INF, 1, 0, 0), -INF: (INF, -1, 0, 0), 0.0: (0, 0, 1, 0), NAN: (NAN, NAN, NAN, NAN)},
            )
        ],
    ),
    FunctionCase(
        name="amax",
        function=lambda x: amax(x, -1),
        Function=AMax,
        inputs=drawn((3, 4)),
        formula=r"\max_c x_c",
        reference=lambda x: x.max(-1).values,
        saved_bytes=lambda x: x.nbytes + x.nbytes // 4,
        saved="input, output",
        empty=lambda dtype: (torch.ones(0, 3, dtype=dtype),),
    ),
    FunctionCase(
        name="amax-dims",
        function=lambda x: amax(x, (0, -1), keepdim=True),
        Function=AMax,
        inputs=drawn((2, 3, 2)),
        reference=lambda x: x.movedim(1, 0).flatten(1).max(1).values.reshape(1, 3, 1),
    ),
]
