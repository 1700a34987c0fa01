"""Elementary functions at points where they easily lose digits: near poles and zeros, in tails, at saturation."""

import mpmath as mp
import torch
from torch.nn import functional


def logistic(x):
    return 1 / (1 + mp.exp(-x))


def softplus(x):
    return mp.log1p(mp.exp(x))


# The torch function, the mpmath function, and points that float32 represents exactly.
HARD = {
    "exp": (torch.exp, mp.exp, (-80.0, -1.0, 2.0**-20, 1.0, 80.0)),
    "exp2": (torch.exp2, lambda x: mp.power(2, x), (-100.0, -1.0, 2.0**-20, 1.0, 100.0)),
    "expm1": (torch.expm1, mp.expm1, (-30.0, -1.0, -(2.0**-20), 2.0**-20, 20.0)),
    "log": (torch.log, mp.log, (2.0**-10, 0.5, 1 - 2.0**-20, 1 + 2.0**-20, 1000.0)),
    "log2": (torch.log2, lambda x: mp.log(x, 2), (2.0**-10, 0.5, 1 + 2.0**-20, 1000.0)),
    "log10": (torch.log10, mp.log10, (2.0**-10, 0.5, 1 + 2.0**-20, 1000.0)),
    "log1p": (torch.log1p, mp.log1p, (-1 + 2.0**-20, -0.5, 2.0**-20, 3.0, 1000.0)),
    "special.entr": (torch.special.entr, lambda x: -x * mp.log(x), (2.0**-10, 0.375, 1.0, 50.0)),
    "sqrt": (torch.sqrt, mp.sqrt, (2.0**-10, 0.3125, 2.0, 1000.0)),
    "rsqrt": (torch.rsqrt, lambda x: 1 / mp.sqrt(x), (2.0**-8, 0.3125, 2.0, 1000.0)),
    "square": (torch.square, lambda x: x * x, (-1000.0, 2.0**-10, 3.0)),
    "reciprocal": (torch.reciprocal, lambda x: 1 / x, (-1000.0, -(2.0**-8), 2.0**-8, 3.0)),
    "sin": (torch.sin, mp.sin, (-3.140625, 2.0**-20, 1.5, 3.140625, 100.0)),
    "cos": (torch.cos, mp.cos, (-1.5703125, 2.0**-20, 1.0, 1.5703125, 100.0)),
    "tan": (torch.tan, mp.tan, (-1.5, 2.0**-20, 0.75, 1.5625, 3.140625)),
    "asin": (torch.asin, mp.asin, (-1 + 2.0**-10, -0.5, 2.0**-20, 0.875, 1 - 2.0**-10)),
    "acos": (torch.acos, mp.acos, (-1 + 2.0**-10, -0.5, 2.0**-20, 0.875, 1 - 2.0**-10)),
    "atan": (torch.atan, mp.atan, (-50.0, -1.0, 2.0**-20, 0.5, 1000.0)),
    "sinh": (torch.sinh, mp.sinh, (-20.0, 2.0**-20, 0.5, 60.0)),
    "cosh": (torch.cosh, mp.cosh, (-20.0, 2.0**-20, 0.5, 60.0)),
    "tanh": (torch.tanh, mp.tanh, (-40.0, -8.0, 2.0**-20, 0.5, 20.0)),
    "asinh": (torch.asinh, mp.asinh, (-50.0, 2.0**-20, 0.5, 1000.0)),
    "acosh": (torch.acosh, mp.acosh, (1 + 2.0**-10, 1.25, 4.0, 1000.0)),
    "atanh": (torch.atanh, mp.atanh, (-1 + 2.0**-10, -0.5, 2.0**-20, 0.875, 1 - 2.0**-10)),
    "sigmoid": (torch.sigmoid, logistic, (-60.0, -1.0, 2.0**-20, 2.0, 40.0)),
    "logit": (torch.logit, lambda x: mp.log(x / (1 - x)), (2.0**-10, 0.25, 0.5, 0.875, 1 - 2.0**-10)),
    "logsigmoid": (functional.logsigmoid, lambda x: -mp.log1p(mp.exp(-x)), (-40.0, -1.0, 0.5, 40.0)),
    "softplus": (lambda x: functional.softplus(x, threshold=50.0), softplus, (-40.0, -1.0, 0.5, 40.0)),
    "erf": (torch.erf, mp.erf, (-4.0, 2.0**-20, 0.5, 2.0, 6.0)),
    "erfc": (torch.erfc, mp.erfc, (-4.0, 2.0**-20, 0.5, 2.0, 8.0)),
    "erfinv": (torch.erfinv, mp.erfinv, (-1 + 2.0**-10, -0.5, 2.0**-20, 0.875)),
    "special.ndtr": (torch.special.ndtr, mp.ncdf, (-9.0, -1.0, 2.0**-20, 3.0, 9.0)),
    "special.ndtri": (
        torch.special.ndtri,
        lambda x: mp.sqrt(2) * mp.erfinv(2 * x - 1),
        (2.0**-10, 0.25, 0.5, 0.875, 1 - 2.0**-10),
    ),
    "lgamma": (torch.lgamma, lambda x: mp.log(abs(mp.gamma(x))), (-2.5, -0.25, 2.0**-8, 1.25, 4.0, 50.0)),
    "digamma": (torch.digamma, mp.digamma, (-2.5, -0.25, 2.0**-8, 1.25, 4.0, 50.0)),
    "polygamma(2)": (lambda x: torch.polygamma(2, x), lambda x: mp.polygamma(2, x), (2.0**-6, 1.25, 4.0, 50.0)),
    "gelu": (functional.gelu, lambda x: x * mp.ncdf(x), (-9.0, -2.0, 2.0**-20, 1.0, 9.0)),
    "silu": (functional.silu, lambda x: x * logistic(x), (-40.0, -2.0, 2.0**-20, 1.0, 40.0)),
    "mish": (functional.mish, lambda x: x * mp.tanh(softplus(x)), (-40.0, -2.0, 2.0**-20, 1.0, 25.0)),
    "elu": (functional.elu, mp.expm1, (-40.0, -1.0, -(2.0**-20))),
    "softsign": (functional.softsign, lambda x: x / (1 + abs(x)), (-100.0, 2.0**-10, 1.0, 1000.0)),
    "tanhshrink": (functional.tanhshrink, lambda x: x - mp.tanh(x), (-8.0, 0.0625, 1.0, 20.0)),
    "x**2.5": (lambda x: x**2.5, lambda x: mp.power(x, 2.5), (2.0**-8, 0.5, 3.0, 1000.0)),
    "1.5**x": (lambda x: 1.5**x, lambda x: mp.power(1.5, x), (-40.0, 0.5, 40.0)),
}
