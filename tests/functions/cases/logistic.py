"""The logistic function and the Functions in its derivatives."""

import torch
from functions.case import Extremes, FunctionCase, elementwise, normal, of_one_number, uniform
from functions.cases.activations import INF, logistic
from mpmath import mp

from hodiff.functions.logistic import (
    Bell,
    BernoulliEntropy,
    HalfTanh,
    Logistic,
    ScaledSigmoid,
    scaled_sigmoid,
)


def exact_entropy(z):
    return mp.log1p(mp.exp(-abs(z))) + abs(z) * logistic(-abs(z))


CASES = [
    elementwise(
        name="scaled_sigmoid",
        function=lambda x: scaled_sigmoid(x, 2.5),
        Function=ScaledSigmoid,
        formula=r"s\,\sigma(x)",
        reference=lambda x: 2.5 / (1 + torch.exp(-x)),
        saved="output",
        # For large x the output is close to the scale, and the error of the derivatives is relative to the scale.
        extremes=[
            Extremes(lambda x: mp.mpf(2.5) * logistic(x), domain=((-INF, 1.0),), limits={INF: (2.5, 0, 0, 0)}),
        ],
    ),
    FunctionCase(
        name="scaled_sigmoid-learned-scale",
        function=scaled_sigmoid,
        Function=ScaledSigmoid,
        inputs=lambda dtype, g: (normal((2, 3), dtype, g), uniform(0.5, 2, (3,), dtype, g)),
        formula=r"s\,\sigma(x)",
        reference=lambda x, scale: scale / (1 + torch.exp(-x)),
        saved_bytes=lambda x, scale: x.nbytes + scale.nbytes,
        saved="σ(x) and scale",
        extremes=[Extremes(lambda x, s: s * logistic(x), argnum=1, others={0: -3.0}, limits={0.0: (0,)})],
        empty=lambda dtype: (torch.ones(0, 3, dtype=dtype), torch.ones(3, dtype=dtype)),
    ),
    of_one_number(
        "logistic",
        Logistic,
        r"\sigma(z)",
        lambda z: 1 / (1 + torch.exp(-z)),
        logistic,
        limits={INF: (1, 0, 0, 0), -INF: (0, 0, 0, 0)},
    ),
    of_one_number(
        "bell",
        Bell,
        r"\sigma(z)\,\sigma(-z)",
        lambda z: torch.exp(-z) / (1 + torch.exp(-z)) ** 2,
        lambda z: logistic(z) * logistic(-z),
        limits={INF: (0, 0, 0, 0), -INF: (0, 0, 0, 0)},
    ),
    of_one_number(
        "half_tanh",
        HalfTanh,
        r"\tanh(z/2)",
        lambda z: (torch.exp(z) - 1) / (torch.exp(z) + 1),
        lambda z: mp.tanh(z / 2),
        limits={INF: (1, 0, 0, 0), -INF: (-1, 0, 0, 0)},
    ),
    of_one_number(
        "bernoulli_entropy",
        BernoulliEntropy,
        r"\log(1 + e^z) - z\,\sigma(z)",
        lambda z: torch.log(1 + torch.exp(z)) - z / (1 + torch.exp(-z)),
        exact_entropy,
        limits={INF: (0, 0, 0, 0), -INF: (0, 0, 0, 0)},
    ),
]
