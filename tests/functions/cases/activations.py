"""Activations."""

import torch
from functions.case import Extremes, FunctionCase, normal, uniform
from mpmath import mp

from hodiff.functions import Swish, swish

INF = float("inf")


def logistic(z):
    return 1 / (1 + mp.exp(-z)) if z >= 0 else mp.exp(z) / (1 + mp.exp(z))


CASES = [
    FunctionCase(
        name="swish",
        function=swish,
        Function=Swish,
        inputs=lambda dtype, g: (normal((2, 3), dtype, g), uniform(0.5, 2, (3,), dtype, g)),
        formula=r"x\,\sigma(\beta x)",
        reference=lambda x, beta: x * torch.sigmoid(beta * x),
        saved_bytes=lambda x, beta: x.nbytes + beta.nbytes,
        saved="inputs",
        extremes=[
            Extremes(lambda x, beta: x * logistic(beta * x), others={1: 1.0}),
            Extremes(lambda x, beta: x * logistic(beta * x), argnum=1, others={0: -3.0}),
        ],
        empty=lambda dtype: (torch.ones(0, 3, dtype=dtype), torch.ones(3, dtype=dtype)),
    ),
]
