"""Logarithms of probabilities."""

import torch
from functions.case import Extremes, FunctionCase, elementwise, normal, uniform
from mpmath import mp

from hodiff.functions.logarithms import Log1mExp, Logit, LogSigmoid, XLogY, log1mexp, log_sigmoid, logit, xlogy

INF = float("inf")
NAN = float("nan")


def exact_log_sigmoid(x):
    return -mp.log1p(mp.exp(-x)) if x >= 0 else x - mp.log1p(mp.exp(x))


def exact_log1mexp(x):
    return mp.log(-mp.expm1(-x)) if x < 1 else mp.log1p(-mp.exp(-x))


CASES = [
    elementwise(
        name="log_sigmoid",
        function=log_sigmoid,
        Function=LogSigmoid,
        formula=r"-\log(1 + e^{-x})",
        reference=lambda x: -torch.log(1 + torch.exp(-x)),
        extremes=[Extremes(exact_log_sigmoid, limits={INF: (0, 0, 0, 0), -INF: (-INF, 1, 0, 0)})],
    ),
    elementwise(
        name="log1mexp",
        function=log1mexp,
        Function=Log1mExp,
        inputs=lambda dtype, g: (uniform(0.3, 2, (2, 3), dtype, g),),
        formula=r"\log(1 - e^{-x})",
        reference=lambda x: torch.log(1 - torch.exp(-x)),
        extremes=[
            Extremes(
                exact_log1mexp,
                domain=((0.0, INF),),
                limits={0.0: (-INF, INF, -INF, INF), INF: (0, 0, 0, 0), -1.0: (NAN,)},
                scale=0.0,
            )
        ],
    ),
    elementwise(
        name="logit",
        function=logit,
        Function=Logit,
        inputs=lambda dtype, g: (uniform(0.2, 0.8, (2, 3), dtype, g),),
        formula=r"\log\frac{x}{1 - x}",
        reference=lambda x: torch.log(x) - torch.log(1 - x),
        extremes=[
            Extremes(
                lambda x: mp.log(x / (1 - x)),
                domain=((0.0, 1.0),),
                limits={0.0: (-INF, INF, -INF, INF), 1.0: (INF, INF, INF, INF), -1.0: (NAN,), 2.0: (NAN,)},
                scale=0.0,
            )
        ],
    ),
    FunctionCase(
        name="xlogy",
        function=xlogy,
        Function=XLogY,
        inputs=lambda dtype, g: (normal((2, 3), dtype, g), uniform(0.5, 2, (3,), dtype, g)),
        formula=r"x \log y",
        reference=lambda x, y: x * torch.log(y),
        saved_bytes=lambda x, y: x.nbytes + y.nbytes,
        saved="inputs",
        extremes=[
            Extremes(lambda x, y: x * mp.log(y), others={1: 1e-300}, limits={0.0: (0,)}),
            Extremes(
                lambda x, y: x * mp.log(y),
                argnum=1,
                others={0: -3.0},
                domain=((0.0, INF),),
                limits={0.0: (INF, -INF, INF, -INF), -1.0: (NAN,)},
                scale=0.0,
            ),
            Extremes(
                lambda x, y: x * mp.log(y),
                argnum=1,
                others={0: 0.0},
                domain=((0.0, INF),),
                limits={0.0: (0, 0, 0, 0), -1.0: (0, 0, 0, 0), INF: (0, 0, 0, 0)},
                scale=0.0,
            ),
        ],
        empty=lambda dtype: (torch.ones(0, 3, dtype=dtype), torch.ones(3, dtype=dtype)),
    ),
]
