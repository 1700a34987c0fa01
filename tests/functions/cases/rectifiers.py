"""Rectifiers."""

import torch
from functions.case import Extremes, FunctionCase, elementwise, normal, uniform
from functions.cases.activations import logistic
from mpmath import mp

from hodiff.functions.activations.rectifiers import ClippedReLU, ReLU, Softplus, clipped_relu, relu, softplus

INF = float("inf")
# The third derivative by β overflows below 1e-77, and some of its terms overflow earlier.
POSITIVE = ((1e-60, INF),)


def exact_softplus(x, beta):
    z = beta * x
    return (max(z, 0) + mp.log1p(mp.exp(-abs(z)))) / beta


CASES = [
    elementwise(
        name="relu",
        function=relu,
        Function=ReLU,
        formula=r"\max(x, 0)",
        reference=lambda x: 0.5 * (x + x.abs()),
        saved="output",
        extremes=[
            Extremes(
                lambda x: max(x, 0),
                domain=((-INF, 0.0), (0.0, INF)),
                limits={0.0: (0, 0, 0, 0), INF: (INF, 1, 0, 0), -INF: (0, 0, 0, 0)},
                ulps=(0, 0, 0, 0),
            )
        ],
    ),
    elementwise(
        name="clipped_relu",
        function=lambda x: clipped_relu(x, 0.75),
        Function=ClippedReLU,
        formula=r"\min(\max(x, 0), c)",
        reference=lambda x: 0.5 * (x.abs() - (x - 0.75).abs() + 0.75),
        saved="output",
        extremes=[
            Extremes(
                lambda x: min(max(x, 0), mp.mpf(0.75)),
                domain=((-INF, 0.0), (0.0, 0.75), (0.75, INF)),
                limits={0.0: (0, 0, 0, 0), 0.75: (0.75, 0, 0, 0), INF: (0.75, 0, 0, 0), -INF: (0, 0, 0, 0)},
                ulps=(0, 0, 0, 0),
            ),
        ],
    ),
    FunctionCase(
        name="softplus",
        function=softplus,
        Function=Softplus,
        inputs=lambda dtype, g: (normal((2, 3), dtype, g), uniform(0.5, 2, (3,), dtype, g)),
        formula=r"\tfrac{1}{\beta} \log(1 + e^{\beta x})",
        reference=lambda x, beta: torch.log(1 + torch.exp(beta * x)) / beta,
        saved_bytes=lambda x, beta: x.nbytes + beta.nbytes,
        saved="inputs",
        extremes=[
            Extremes(exact_softplus, others={1: 1.0}, limits={INF: (INF, 1, 0, 0), -INF: (0, 0, 0, 0)}),
            Extremes(exact_softplus, argnum=1, others={0: -3.0}, domain=POSITIVE, scale=0.0),
            Extremes(exact_softplus, argnum=1, others={0: 3.0}, domain=POSITIVE, scale=0.0),
        ],
        empty=lambda dtype: (torch.ones(0, 3, dtype=dtype), torch.ones(3, dtype=dtype)),
    ),
    FunctionCase(
        name="softplus-threshold",
        function=lambda x, beta: softplus(x, beta, threshold=20.0),
        Function=Softplus,
        inputs=lambda dtype, g: (normal((2, 3), dtype, g), uniform(0.5, 2, (3,), dtype, g)),
        formula=r"\tfrac{1}{\beta} \log(1 + e^{\beta x}) \text{ where } \beta x \le \theta, \text{ else } x",
        reference=lambda x, beta: torch.log(1 + torch.exp(beta * x)) / beta,
        saved_bytes=lambda x, beta: x.nbytes + beta.nbytes,
        saved="inputs",
        extremes=[
            Extremes(
                lambda x, beta: x if beta * x > 20 else exact_softplus(x, beta),
                others={1: 1.0},
                domain=((-INF, 20.0), (20.0, INF)),
                limits={20.0: (float(20 + mp.exp(-20)), float(logistic(20))), INF: (INF, 1, 0, 0)},
            ),
        ],
        empty=lambda dtype: (torch.ones(0, 3, dtype=dtype), torch.ones(3, dtype=dtype)),
    ),
]
