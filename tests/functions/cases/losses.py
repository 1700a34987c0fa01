"""Losses."""

import torch
from functions.case import Extremes, FunctionCase, drawn, normal, uniform
from mpmath import mp

from hodiff.functions.losses.cross_entropy import CrossEntropy, CrossEntropyGradient
from hodiff.functions.losses.linear_cross_entropy import linear_cross_entropy
from hodiff.functions.losses.linear_terms.term_formulas import Options
from hodiff.functions.losses.linear_terms.terms import LinearCrossEntropy, LinearCrossEntropyGradient
from hodiff.functions.losses.losses import Hinge, Huber, cross_entropy, hinge, huber
from hodiff.functions.losses.soft_cross_entropy import SoftCrossEntropy, SoftCrossEntropyGradient
from hodiff.functions.softmax.logsumexp import LogSumExpProduct

INF = float("inf")
NAN = float("nan")


def log_probabilities(x, dim=1):
    """Compute log-probabilities by primitives that every route differentiates correctly."""
    return x - torch.log(torch.exp(x).sum(dim, keepdim=True))


def curvature(x, scale, v):
    p = torch.exp(x) / torch.exp(x).sum(-1, keepdim=True)
    return scale * (p * v - p * (p * v).sum(-1, keepdim=True))


def classes(*indices):
    return torch.tensor(indices)


def linear_reference(x, w, target, bias, weight=None, smoothing=0.0, z_loss=0.0, softcap=None, ignore_index=-100):
    """Compute the losses of the samples, shape (N, E), from all logits by primitives."""
    z = x @ w.mT + bias
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    lse = torch.log(torch.exp(z).sum(-1))
    counted = target != ignore_index
    at = torch.where(counted, target, 0)
    weight = torch.ones(len(w), dtype=z.dtype) if weight is None else weight
    each = torch.where(counted, weight[at], 0.0)
    hit = (z * torch.eye(len(w), dtype=z.dtype)[at]).sum(-1)
    uniform_part = (weight * (lse[:, None] - z)).sum(-1) / len(w)
    losses = (1 - smoothing) * each * (lse - hit) + smoothing * uniform_part + z_loss * each * lse**2
    return torch.where(counted, losses, 0.0), each


def linear_gradient_reference(x, w, bias, g):
    """Compute gradients by x, weight and bias, where the second sample is ignored."""
    p = torch.exp(log_probabilities(x @ w.mT + bias.mT))
    mean = torch.full_like(p, 1.0)
    s_bar = (g[:, :1] * p + g[:, 1:2] * torch.eye(3, dtype=x.dtype)[classes(2, 0)] + g[:, 2:] * mean)[:1]
    by_x = torch.cat((s_bar @ w, torch.zeros_like(x[:1])))
    # The ignored sample is a zero vector. It has gradients by the bias but not by the weight, since its factor is zero.
    q = torch.exp(log_probabilities(bias.mT))
    by_bias = s_bar.mT + (g[1:, :1] * q + g[1:, 2:]).mT
    return by_x, s_bar.mT @ x[:1], by_bias


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
        # The logits, the target and the number of counted samples.
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
        inputs=drawn((3, 4), (3, 1)),
        reference=lambda x, g: (
            g * (torch.exp(log_probabilities(x)) - 0.9 * torch.eye(4, dtype=x.dtype)[classes(1, 0, 3)] - 0.1 / 4)
        ),
    ),
    FunctionCase(
        name="cross_entropy-soft-gradient",
        function=lambda x, q, g: SoftCrossEntropyGradient.call(x, q, g, -1, 3),
        Function=SoftCrossEntropyGradient,
        inputs=drawn((2, 3), (2, 3), (2, 1)),
        reference=lambda x, q, g: g * (q.sum(-1, keepdim=True) * torch.exp(log_probabilities(x)) - q),
    ),
    FunctionCase(
        name="cross_entropy-product",
        function=lambda x, scale, v: LogSumExpProduct.call(x, scale, v, -1, False, 3),
        Function=LogSumExpProduct,
        inputs=drawn((2, 3), (2, 1), (2, 3)),
        formula=r"s\,(p \circ v - p\,\langle p, v \rangle)",
        reference=curvature,
        saved_bytes=lambda x, scale, v: x.nbytes + scale.nbytes + v.nbytes,
        saved="inputs",
    ),
    FunctionCase(
        name="linear_cross_entropy",
        function=linear_cross_entropy,
        Function=LinearCrossEntropy,
        inputs=lambda dtype, g: (normal((2, 2), dtype, g), normal((4, 2), dtype, g), classes(1, 3)),
        formula=r"\log \sum_c e^{z_c} - z_t, z = W x + b",
        reference=lambda x, w, t: linear_reference(x, w, t, torch.zeros(4, dtype=x.dtype))[0].mean(),
        # The inputs, and for each sample two terms and whether it counts; and the number of counted samples.
        saved_bytes=lambda x, w, t: x.nbytes + w.nbytes + t.nbytes + len(x) * (2 * x.element_size() + 1) + 8,
        saved="input, weight, bias, target, 2 numbers a sample (3 with smoothing)",
    ),
    FunctionCase(
        name="linear_cross_entropy-options",
        function=lambda x, w, b, t: linear_cross_entropy(
            x, w, t, linear_bias=b, label_smoothing=0.2, z_loss=0.1, softcap=1.5, ignore_index=2, reduction="none"
        ),
        Function=LinearCrossEntropy,
        inputs=lambda dtype, g: (
            normal((3, 2), dtype, g),
            normal((4, 2), dtype, g),
            normal((4,), dtype, g),
            classes(1, 2, 3),
        ),
        reference=lambda x, w, b, t: linear_reference(
            x, w, t, b, smoothing=0.2, z_loss=0.1, softcap=1.5, ignore_index=2
        )[0],
        nan_propagates=False,  # not from an ignored sample
    ),
    FunctionCase(
        name="linear_cross_entropy-gradient",
        function=lambda x, w, b, g: LinearCrossEntropyGradient.call(
            x, w, b, None, classes(2, -1)[:, None], None, g, Options(-1, None, True), (True, True, True)
        ),
        Function=LinearCrossEntropyGradient,
        inputs=drawn((2, 2), (3, 2), (3, 1), (2, 3)),
        formula=r"\nabla_{x,W,b} \langle g, (\log \sum_c e^{z_c}, z_t, \sum_c z_c) \rangle",
        reference=linear_gradient_reference,
        # The target and the gradient by x are saved, too.
        saved_bytes=lambda x, w, b, g: 2 * x.nbytes + w.nbytes + b.nbytes + g.nbytes + 16,
        saved="inputs, gradient by x",
        nan_propagates=False,  # not from an ignored sample
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
        # SciPy's finite differences step across the kinks.
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
