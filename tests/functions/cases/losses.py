"""Losses."""

import torch
from functions.case import Extremes, FunctionCase, normal, uniform
from mpmath import mp

from hodiff.functions.losses.cross_entropy import CrossEntropy, CrossEntropyGradient
from hodiff.functions.losses.losses import Hinge, Huber, cross_entropy, hinge, huber
from hodiff.functions.losses.soft_cross_entropy import SoftCrossEntropy, SoftCrossEntropyGradient
from hodiff.functions.softmax.logsumexp import LogSumExpProduct

INF = float("inf")
NAN = float("nan")


def log_probabilities(x, dim=1):
    """By primitives that every route differentiates rightly."""
    return x - torch.log(torch.exp(x).sum(dim, keepdim=True))


def curvature(x, scale, v):
    p = torch.exp(x) / torch.exp(x).sum(-1, keepdim=True)
    return scale * (p * v - p * (p * v).sum(-1, keepdim=True))


def classes(*indices):
    return torch.tensor(indices)


def exact_huber(x, t, delta):
    r = x - t
    return r**2 / 2 if abs(r) <= delta else delta * (abs(r) - delta / 2)


CASES = [
    FunctionCase(
        name="cross_entropy",
        function=cross_entropy,
        Function=CrossEntropy,
        inputs=lambda dtype, g: (normal((3, 4), dtype, g), classes(1, 0, 3)),
        formula=r"\log \sum_c e^{x_c} - x_t",
        reference=lambda x, t: -log_probabilities(x)[torch.arange(3), t].mean(),
        # The logits, the target and how many samples count.
        saved_bytes=lambda x, t: x.nbytes + t.nbytes + 8,
        saved="logits, target",
    ),
    FunctionCase(
        name="cross_entropy-smoothed",
        function=lambda x, t: cross_entropy(x, t, label_smoothing=0.2, ignore_index=2, chunk_size=1, reduction="none"),
        Function=CrossEntropy,
        inputs=lambda dtype, g: (normal((3, 3, 2), dtype, g), torch.tensor([[1, 0], [2, 2], [0, 1]])),
        reference=lambda x, t: torch.where(
            t == 2, 0, -0.8 * log_probabilities(x).gather(1, t[:, None])[:, 0] - 0.2 * log_probabilities(x).mean(1)
        ),
    ),
    FunctionCase(
        name="cross_entropy-weighted",
        function=lambda x, t, w: cross_entropy(x, t, weight=w, label_smoothing=0.1),
        Function=SoftCrossEntropy,
        inputs=lambda dtype, g: (normal((3, 4), dtype, g), classes(1, 0, 3), uniform(0.5, 2, (4,), dtype, g)),
        reference=lambda x, t, w: (
            (-0.9 * w[t] * log_probabilities(x)[torch.arange(3), t] - 0.1 / 4 * (w * log_probabilities(x)).sum(1)).sum()
            / w[t].sum()
        ),
    ),
    FunctionCase(
        name="cross_entropy-probabilities",
        function=lambda x, q: cross_entropy(x, q, reduction="sum", chunk_size=2),
        Function=SoftCrossEntropy,
        inputs=lambda dtype, g: (normal((3, 3), dtype, g), uniform(0, 1, (3, 3), dtype, g)),
        formula=r"\sum_c q_c (\log \sum_k e^{x_k} - x_c)",
        reference=lambda x, q: -(q * log_probabilities(x)).sum(),
        saved_bytes=lambda x, q: x.nbytes + q.nbytes,
        saved="logits, target",
        empty=lambda dtype: (torch.ones(0, 3, dtype=dtype), torch.ones(0, 3, dtype=dtype)),
    ),
    FunctionCase(
        name="cross_entropy-gradient",
        function=lambda x, g: CrossEntropyGradient.call(x, classes(1, -1, 3)[:, None], g, -1, 0.1, -1, 4),
        Function=CrossEntropyGradient,
        inputs=lambda dtype, g: (normal((3, 4), dtype, g), normal((3, 1), dtype, g)),
        reference=lambda x, g: (
            g * (torch.exp(log_probabilities(x)) - 0.9 * torch.eye(4, dtype=x.dtype)[classes(1, 0, 3)] - 0.1 / 4)
        ),
    ),
    FunctionCase(
        name="cross_entropy-soft-gradient",
        function=lambda x, q, g: SoftCrossEntropyGradient.call(x, q, g, -1, 3),
        Function=SoftCrossEntropyGradient,
        inputs=lambda dtype, g: (normal((2, 3), dtype, g), normal((2, 3), dtype, g), normal((2, 1), dtype, g)),
        reference=lambda x, q, g: g * (q.sum(-1, keepdim=True) * torch.exp(log_probabilities(x)) - q),
    ),
    FunctionCase(
        name="cross_entropy-product",
        function=lambda x, scale, v: LogSumExpProduct.call(x, scale, v, -1, False, 3),
        Function=LogSumExpProduct,
        inputs=lambda dtype, g: (normal((2, 3), dtype, g), normal((2, 1), dtype, g), normal((2, 3), dtype, g)),
        formula=r"s\,(p \circ v - p\,\langle p, v \rangle)",
        reference=curvature,
        saved_bytes=lambda x, scale, v: x.nbytes + scale.nbytes + v.nbytes,
        saved="inputs",
    ),
    FunctionCase(
        name="huber",
        function=lambda x, t, delta: huber(x, t, delta, reduction="none"),
        Function=Huber,
        inputs=lambda dtype, g: (
            torch.tensor([-2.1, -0.3, 0.4, 1.9], dtype=dtype),
            uniform(-0.1, 0.1, (4,), dtype, g),
            torch.tensor([0.9, 1.1, 1.2, 0.8], dtype=dtype),
        ),
        formula=r"c\,(r - c/2), c = \operatorname{clamp}(r, -\delta, \delta)",
        reference=lambda x, t, delta: torch.where(
            (x - t).abs() < delta, 0.5 * (x - t) ** 2, delta * ((x - t).abs() - 0.5 * delta)
        ),
        saved_bytes=lambda x, t, delta: x.nbytes + delta.nbytes,
        saved="residual, delta",
        extremes=[
            Extremes(
                exact_huber,
                others={1: 0.0, 2: 2.0},
                domain=((-INF, -2), (-2, 2), (2, INF)),
                limits={INF: (INF, 2, 0, 0), -INF: (INF, -2, 0, 0), 2.0: (2, 2, 1, 0), NAN: (NAN, NAN)},
            )
        ],
        empty=lambda dtype: (torch.ones(0, 3, dtype=dtype), torch.ones(0, 3, dtype=dtype), torch.ones(3, dtype=dtype)),
        # SciPy's differences stride over the kinks.
        check_options={"scipy": False},
    ),
    FunctionCase(
        name="hinge",
        function=lambda x, t, m: hinge(x, t, m, reduction="none"),
        Function=Hinge,
        inputs=lambda dtype, g: (
            torch.tensor([-2.0, 0.3, 1.9], dtype=dtype),
            torch.tensor([1.0, -1.0, 1.1], dtype=dtype),
            torch.tensor([1.0], dtype=dtype),
        ),
        formula=r"\max(m - t x, 0)",
        reference=lambda x, t, m: torch.relu(m - t * x),
        saved_bytes=lambda x, t, m: x.nbytes + t.nbytes + m.nbytes,
        saved="inputs",
        extremes=[
            Extremes(
                lambda x, t, m: max(m - t * x, mp.mpf(0)),
                others={1: 1.0, 2: 1.0},
                domain=((-INF, 1), (1, INF)),
                limits={INF: (0, 0, 0, 0), -INF: (INF, -1, 0, 0), 1.0: (0, 0, 0, 0), NAN: (NAN,)},
            )
        ],
        empty=lambda dtype: (torch.ones(0, dtype=dtype), torch.ones(0, dtype=dtype), torch.ones(1, dtype=dtype)),
    ),
]
