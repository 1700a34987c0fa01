"""Smooth activations: GELU, SiLU, Swish and Mish."""

import torch
from functions.case import Extremes, FunctionCase, elementwise, normal, uniform
from mpmath import mp

from hodiff.functions.activations.gated import GELU, GELUTanh, Mish, SiLU, Swish, gelu, mish, silu, swish

INF = float("inf")

# Limits of the value and three derivatives of a gated activation at +inf and at -inf.
ENDS = {INF: (INF, 1, 0, 0), -INF: (0, 0, 0, 0)}

# e^z overflows beyond 709.78, so results below 710 times the smallest normal number are flushed to zero.


def logistic(z):
    return 1 / (1 + mp.exp(-z)) if z >= 0 else mp.exp(z) / (1 + mp.exp(z))


def gelu_tanh(x):
    return x * logistic(2 * mp.sqrt(2 / mp.pi) * (x + mp.mpf("0.044715") * x**3))


def exact_mish(x):
    e = mp.exp(x)
    return x * e * (e + 2) / (e * (e + 2) + 2)


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
            Extremes(lambda x, beta: x * logistic(beta * x), others={1: 1.0}, limits=ENDS),
            Extremes(lambda x, beta: x * logistic(beta * x), argnum=1, others={0: -3.0}, limits={-INF: (-3, 0, 0, 0)}),
        ],
        empty=lambda dtype: (torch.ones(0, 3, dtype=dtype), torch.ones(3, dtype=dtype)),
    ),
    elementwise(
        name="silu",
        function=silu,
        Function=SiLU,
        formula=r"x\,\sigma(x)",
        reference=lambda x: x * torch.sigmoid(x),
        extremes=[
            Extremes(lambda x: x * logistic(x), limits=ENDS),
        ],
    ),
    elementwise(
        name="gelu",
        function=gelu,
        Function=GELU,
        formula=r"x\,\Phi(x)",
        reference=lambda x: x * 0.5 * (1 + torch.erf(x / 2**0.5)),
        extremes=[Extremes(lambda x: x * mp.erfc(-x / mp.sqrt(2)) / 2, limits=ENDS)],
    ),
    elementwise(
        name="gelu-tanh",
        function=lambda x: gelu(x, approximate="tanh"),
        Function=GELUTanh,
        formula=r"\tfrac{x}{2} (1 + \tanh(\sqrt{2/\pi}\,(x + 0.044715\,x^3)))",
        reference=lambda x: 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))),
        extremes=[Extremes(gelu_tanh, limits=ENDS)],
    ),
    elementwise(
        name="mish",
        function=mish,
        Function=Mish,
        formula=r"x \tanh(\log(1 + e^x))",
        reference=lambda x: x * torch.tanh(torch.log(1 + torch.exp(x))),
        extremes=[
            Extremes(exact_mish, limits=ENDS),
        ],
    ),
]
