"""Elementwise functions and losses with mpmath references, at points that easily lose digits: tails, poles, zeros."""

import json
import math
from functools import cache
from pathlib import Path

import mpmath as mp
import torch
import torch.nn.functional as F
from taylor.hard_points import HARD, logistic, softplus

# The first sizes are for float32 and float64, the other sizes for float64 only.
SIZES = (
    *(
        2.0**-100,
        2.0**-20,
        2.0**-7,
        0.3125,
        0.75,
        1.0,
        1.5,
        3.0,
        4.875,
        5.5,
        5.875,
        8.0,
        9.5,
        12.0,
        17.0,
        20.0,
        23.0,
        30.0,
    ),
    *(40.0, 60.0, 89.0, 100.0, 710.0, 2.0**14, 2.0**66, 2.0**120, 2.0**-1000, 2.0**500),
)
EVERYWHERE = (-mp.inf, mp.inf)
POSITIVE, UNIT, OPEN = (0.0, mp.inf), (0.0, 1.0), (-1.0, 1.0)
# Domains in which the functions of `hard_points` are defined and mpmath is accurate; the default is everywhere.
DOMAINS = {
    **dict.fromkeys(("log", "log2", "log10", "special.entr", "sqrt", "rsqrt", "x**2.5"), POSITIVE),
    **dict.fromkeys(("asin", "acos", "atanh", "erfinv"), OPEN),
    **dict.fromkeys(("logit", "special.ndtri"), UNIT),
    "log1p": (-1.0, mp.inf),
    "acosh": (1.0, mp.inf),
    "elu": (-mp.inf, 0.0),
    "polygamma(2)": POSITIVE,
    "lgamma": POSITIVE,
    "digamma": POSITIVE,
    # Beyond 50 torch's softplus is the identity.
    "softplus": (-mp.inf, 50.0),
    **dict.fromkeys(("erf", "erfc", "special.ndtr", "gelu"), (-35.0, 35.0)),
}


def pair(x):
    """Logits x and 0."""
    return torch.stack([x, torch.zeros_like(x)], -1)


def gelu_tanh(x):
    return x * logistic(2 * mp.sqrt(2 / mp.pi) * (x + mp.mpf("0.044715") * x**3))


def like(number):
    return lambda x: torch.full_like(x, number)


SELU = 1.0507009873554804934193349852946, 1.6732632423543772848170429916717
QUARTER = like(0.25)

MORE = {
    "gelu(tanh)": (lambda x: F.gelu(x, approximate="tanh"), gelu_tanh, EVERYWHERE),
    "softplus(beta=2)": (lambda x: F.softplus(x, 2.0, 1000.0), lambda x: softplus(2 * x) / 2, EVERYWHERE),
    "selu": (F.selu, lambda x: mp.mpf(SELU[0]) * mp.mpf(SELU[1]) * mp.expm1(x), (-mp.inf, 0.0)),
    "celu(alpha=2)": (lambda x: F.celu(x, 2.0), lambda x: 2 * mp.expm1(x / 2), (-mp.inf, 0.0)),
    "celu(alpha=0.4)": (
        lambda x: F.celu(x, 0.4),
        lambda x: mp.mpf(0.4) * mp.expm1(x / mp.mpf(0.4)),
        (-mp.inf, 0.0),
    ),
    "glu": (lambda x: F.glu(torch.stack([torch.ones_like(x), x], -1), -1)[..., 0], logistic, EVERYWHERE),
    "softmax": (lambda x: pair(x).softmax(-1)[..., 0], logistic, EVERYWHERE),
    "log_softmax": (lambda x: pair(x).log_softmax(-1)[..., 0], lambda x: -softplus(-x), EVERYWHERE),
    "logsumexp": (lambda x: pair(x).logsumexp(-1), softplus, EVERYWHERE),
    "logaddexp": (lambda x: torch.logaddexp(x, torch.zeros_like(x)), softplus, EVERYWHERE),
    "logaddexp2": (
        lambda x: torch.logaddexp2(x, torch.zeros_like(x)),
        lambda x: softplus(x * mp.log(2)) / mp.log(2),
        EVERYWHERE,
    ),
    "xlogy": (lambda x: torch.xlogy(x, x), lambda x: x * mp.log(x), POSITIVE),
    "xlog1py": (lambda x: torch.special.xlog1py(x, x), lambda x: x * mp.log1p(x), (-1.0, mp.inf)),
    "hypot": (lambda x: torch.hypot(x, torch.ones_like(x)), lambda x: mp.sqrt(x * x + 1), EVERYWHERE),
    "atan2(x, 1)": (lambda x: torch.atan2(x, torch.ones_like(x)), mp.atan, EVERYWHERE),
    "atan2(1, x)": (lambda x: torch.atan2(torch.ones_like(x), x), lambda x: mp.pi / 2 - mp.atan(x), EVERYWHERE),
    "1 / (1 + x²)": (lambda x: 1 / (1 + x * x), lambda x: 1 / (1 + x * x), EVERYWHERE),
    "special.erfcx": (torch.special.erfcx, lambda x: mp.exp(x * x) * mp.erfc(x), (-20.0, 100.0)),
    "special.log_ndtr": (torch.special.log_ndtr, lambda x: mp.log(mp.ncdf(x)), (-100.0, 9.0)),
    "binary_cross_entropy": (
        lambda x: F.binary_cross_entropy(x, QUARTER(x), reduction="none"),
        lambda x: -(mp.log(x) / 4 + 3 * mp.log1p(-x) / 4),
        UNIT,
    ),
    "binary_cross_entropy_with_logits": (
        lambda x: F.binary_cross_entropy_with_logits(x, QUARTER(x), reduction="none"),
        lambda x: softplus(x) - x / 4,
        EVERYWHERE,
    ),
    "binary_cross_entropy_with_logits of 0": (
        lambda x: F.binary_cross_entropy_with_logits(x, torch.zeros_like(x), reduction="none"),
        softplus,
        EVERYWHERE,
    ),
    "binary_cross_entropy_with_logits of 1": (
        lambda x: F.binary_cross_entropy_with_logits(x, torch.ones_like(x), reduction="none"),
        lambda x: softplus(-x),
        EVERYWHERE,
    ),
    "cross_entropy": (
        lambda x: F.cross_entropy(
            pair(x).reshape(-1, 2), x.new_zeros(x.numel(), dtype=torch.long), reduction="none"
        ).reshape(x.shape),
        lambda x: softplus(-x),
        EVERYWHERE,
    ),
    "soft_margin_loss": (
        lambda x: F.soft_margin_loss(x, torch.ones_like(x), reduction="none"),
        lambda x: softplus(-x),
        EVERYWHERE,
    ),
    "multilabel_soft_margin_loss": (
        lambda x: F.multilabel_soft_margin_loss(x[..., None], torch.ones_like(x)[..., None], reduction="none"),
        lambda x: softplus(-x),
        EVERYWHERE,
    ),
    "poisson_nll_loss": (
        lambda x: F.poisson_nll_loss(x, QUARTER(x), reduction="none"),
        lambda x: mp.exp(x) - x / 4,
        EVERYWHERE,
    ),
    "poisson_nll_loss of rates": (
        lambda x: F.poisson_nll_loss(x, QUARTER(x), log_input=False, eps=0.0, reduction="none"),
        lambda x: x - mp.log(x) / 4,
        POSITIVE,
    ),
    "gaussian_nll_loss": (
        lambda x: F.gaussian_nll_loss(torch.ones_like(x), torch.zeros_like(x), x, eps=0.0, reduction="none"),
        lambda x: (mp.log(x) + 1 / x) / 2,
        POSITIVE,
    ),
    "kl_div of a log target": (
        lambda x: F.kl_div(torch.zeros_like(x), x, log_target=True, reduction="none"),
        lambda x: mp.exp(x) * x,
        EVERYWHERE,
    ),
}
# Name: the torch function, mpmath's function, and the domain
TAILS = {name: (f, exact, DOMAINS.get(name, EVERYWHERE)) for name, (f, exact, _) in HARD.items()} | MORE


# Beyond these numbers torch's zeta is zero.
LARGEST = {"lgamma": 2.0**200, "digamma": 2.0**200}


def points(name):
    """Points at which the function is tested."""
    low, high = TAILS[name][2]
    high = min(high, LARGEST.get(name, high))
    # The smallest sizes matter only where 0 is a pole or a root.
    sizes = SIZES if low == 0.0 else [size for size in SIZES if size > 1e-200]
    return [p for size in sizes for p in (size, -size) if low < p < high]


TRUTHS = Path(__file__).with_name("tails_truths.json")
ORDERS = (1, 2, 3)


def exact(name, point):
    """Derivatives of orders 0 to 4 by differences with hundreds of digits, as text with 20 digits."""
    f = TAILS[name][1]
    found = []
    for order in range(5):
        with mp.workdps(60 * (order + 2) + 500):
            x, h = mp.mpf(point), min(abs(mp.mpf(point)), mp.mpf(10) ** 30) * mp.mpf(10) ** -60
            shifts = [(-1) ** k * mp.binomial(order, k) * f(x + (mp.mpf(order) / 2 - k) * h) for k in range(order + 1)]
            found.append(mp.nstr(mp.re(mp.fsum(shifts) / h**order), 20))
    return found


@cache
def truths():
    """Derivatives by function and point, as saved by `python tests/corrections/write_tails.py`."""
    return json.loads(TRUTHS.read_text(encoding="utf-8"))


def of_middling_size(name, point):
    """Whether products of the point and several of its derivatives are in the range of float32."""
    return abs(point) < 1e30 and all(abs(mp.mpf(each)) < 1e30 for each in truths()[name][repr(point)])


def ulps(name, point, order, got, dtype):
    """Error in units of rounding the derivative, or of rounding its argument if that changes it more."""
    values = [mp.mpf(each) for each in truths()[name][repr(point)]]
    info = torch.finfo(dtype)
    true, change = values[order], values[order + 1]
    # A result that overflows may be infinite or NaN.
    if abs(true) > info.max:
        return math.inf if abs(got) <= info.max / 4 else 0.0
    if not math.isfinite(got):
        return math.inf
    scale = 0.0 if TAILS[name][2][0] == 0.0 else 1.0
    unit = info.eps * max(abs(true), max(abs(point), scale) * abs(change))
    return float(abs(got - true) / max(unit, info.tiny * max(1.0, min(abs(point), 100.0))))
