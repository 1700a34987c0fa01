"""Functions that compute derivatives of other Functions."""

import math

import torch
from functions.case import FunctionCase, drawn, of_one_number, total_bytes, uniform
from functions.cases.convolution import sum_of_shifts
from mpmath import mp

from hodiff.functions.activations.gated_derivatives import GELUSlope, GELUTanhSlope, MishSlope, NormalDensity, SiLUSlope
from hodiff.functions.attention.attention_function import AttentionGradient, AttentionTangent
from hodiff.functions.convolution.maps import ConvolutionInputGradient, ConvolutionWeightGradient, Geometry
from hodiff.functions.logarithms import LogitSlope, Occupation
from hodiff.functions.normalization.normalization_function import NormalizationGradient
from hodiff.functions.normalization.standardization import StatisticsLayout
from hodiff.functions.softmax.logsumexp import LogSumExpGradient
from hodiff.kernels.attention.options import Options

INF = float("inf")

# Limits of the first four derivatives of a gated activation at +inf and at -inf.
ENDS = {INF: (1, 0, 0, 0), -INF: (0, 0, 0, 0)}


def exact_logistic(x):
    return 1 / (1 + mp.exp(-x)) if x >= 0 else mp.exp(x) / (1 + mp.exp(x))


def exact_density(x):
    return mp.exp(-x * x / 2) / mp.sqrt(2 * mp.pi)


def density(x):
    return torch.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def gelu_tanh_slope(x):
    c, d = math.sqrt(2 / math.pi), 0.044715
    t = torch.tanh(c * (x + d * x**3))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t**2) * c * (1 + 3 * d * x**2)


def mish_slope(x):
    t = torch.tanh(torch.log(1 + torch.exp(x)))
    return t + x * (1 - t**2) * torch.sigmoid(x)


def shares(x):
    e = torch.exp(x)
    return e / e.sum(-1, keepdim=True)


SIZE, KERNEL = 5, 2
GEOMETRY = Geometry(stride=(1,), padding=(0,), dilation=(1,), groups=1, size=(SIZE,), kernel=(KERNEL,))


def input_gradient(g, weight):
    """Convolve the padded cotangent with the flipped kernel."""
    return sum_of_shifts(g, weight.flip(-1).transpose(0, 1), padding=KERNEL - 1)


def weight_and_bias_gradient(x, g):
    """Convolve the input with the cotangent, with samples and channels exchanged."""
    return sum_of_shifts(x.transpose(0, 1), g.transpose(0, 1)).transpose(0, 1), g.sum((0, 2))


ATTENTION = Options(scale=0.5, low=None, high=None, softcap=None, dropout_p=0.0, batch=())


def attention_gradient(q, k, v, g):
    p = shares(0.5 * q @ k.mT)
    by_p = g @ v.mT
    by_scores = p * (by_p - (p * by_p).sum(-1, keepdim=True))
    return 0.5 * by_scores @ k, 0.5 * by_scores.mT @ q, p.mT @ g


def attention_tangent(q, k, v, q_t, k_t, v_t):
    p = shares(0.5 * q @ k.mT)
    s_t = 0.5 * (q_t @ k.mT + q @ k_t.mT)
    return p * (s_t - (p * s_t).sum(-1, keepdim=True)) @ v + p @ v_t


EPS = 1e-3


def layout(dtype):
    return StatisticsLayout("trailing", 1, 2, EPS, centered=True, parameter_dtype=dtype)


def normalization_gradient(g, x, weight):
    centered = x - x.mean(-1, keepdim=True)
    r = 1 / torch.sqrt((centered**2).mean(-1, keepdim=True) + EPS)
    standardized, scaled = centered * r, g * weight
    mean, slope = scaled.mean(-1, keepdim=True), (scaled * standardized).mean(-1, keepdim=True)
    return r * (scaled - mean - standardized * slope), (g * standardized).sum(0), g.sum(0)


CASES = [
    of_one_number(
        "SiLUSlope",
        SiLUSlope,
        r"\sigma(x) (1 + x\,\sigma(-x))",
        lambda x: torch.sigmoid(x) * (1 + x * torch.sigmoid(-x)),
        lambda x: exact_logistic(x) * (1 + x * exact_logistic(-x)),
        limits=ENDS,
    ),
    of_one_number(
        "GELUSlope",
        GELUSlope,
        r"\Phi(x) + x\,\varphi(x)",
        lambda x: 0.5 * (1 + torch.erf(x / 2**0.5)) + x * density(x),
        lambda x: mp.erfc(-x / mp.sqrt(2)) / 2 + x * exact_density(x),
        limits=ENDS,
    ),
    of_one_number(
        "GELUTanhSlope",
        GELUTanhSlope,
        r"\tfrac{d}{dx}\, \tfrac{x}{2} (1 + \tanh(\sqrt{2/\pi}\,(x + 0.044715\,x^3)))",
        gelu_tanh_slope,
    ),
    of_one_number("MishSlope", MishSlope, r"\tfrac{d}{dx}\, x \tanh(\log(1 + e^x))", mish_slope),
    of_one_number(
        "NormalDensity",
        NormalDensity,
        r"\varphi(x) = e^{-x^2/2} / \sqrt{2\pi}",
        density,
        exact_density,
        limits={INF: (0,), -INF: (0,)},
    ),
    of_one_number(
        "LogitSlope",
        LogitSlope,
        r"\frac{1}{x (1 - x)}",
        lambda x: 1 / x + 1 / (1 - x),
        lambda x: 1 / (x * (1 - x)),
        inputs=lambda dtype, g: (uniform(0.2, 0.8, (2, 3), dtype, g),),
        domain=((0.0, 1.0),),
        scale=0.0,
    ),
    of_one_number(
        "Occupation",
        Occupation,
        r"\frac{1}{e^x - 1}",
        lambda x: 1 / (torch.exp(x) - 1),
        lambda x: 1 / mp.expm1(x),
        inputs=lambda dtype, g: (uniform(0.3, 2, (2, 3), dtype, g),),
        domain=((0.0, INF),),
        scale=0.0,
    ),
    FunctionCase(
        name="LogSumExpGradient",
        function=lambda x, scale: LogSumExpGradient.call(x, scale, -1, False),
        Function=LogSumExpGradient,
        inputs=drawn((3, 4), (3, 1)),
        formula=r"s\, e^{x_c} / \sum_k e^{x_k}",
        reference=lambda x, scale: shares(x) * scale,
        saved_bytes=total_bytes,
        saved="inputs",
    ),
    FunctionCase(
        name="ConvolutionInputGradient",
        function=lambda g, weight: ConvolutionInputGradient.call(g, weight, GEOMETRY),
        Function=ConvolutionInputGradient,
        inputs=drawn((1, 2, SIZE - KERNEL + 1), (2, 2, KERNEL)),
        formula=r"\sum_{o,k} w_{o,i,k}\, g_{n,o,t-k}",
        reference=input_gradient,
        saved_bytes=total_bytes,
        saved="inputs",
    ),
    FunctionCase(
        name="ConvolutionWeightGradient",
        function=lambda x, g: ConvolutionWeightGradient.call(x, g, GEOMETRY, True),
        Function=ConvolutionWeightGradient,
        compile=False,  # dynamo raises on the gradient of a tangent; the gradient of conv1d compiles
        inputs=drawn((2, 1, SIZE), (2, 2, SIZE - KERNEL + 1)),
        formula=r"\sum_{n,t} g_{n,o,t}\, x_{n,i,t+k} \text{ and } \sum_{n,t} g_{n,o,t}",
        reference=weight_and_bias_gradient,
        saved_bytes=total_bytes,
        saved="inputs",
    ),
    FunctionCase(
        name="AttentionGradient",
        function=lambda q, k, v, g: AttentionGradient.call(
            q, k, v, None, None, g, ATTENTION, (True, True, True, False)
        ),
        Function=AttentionGradient,
        inputs=drawn((2, 2), (3, 2), (3, 1), (2, 1)),
        formula=r"\nabla_{Q,K,V} \langle G,\, \operatorname{softmax}(s\, Q K^\top)\, V \rangle",
        reference=attention_gradient,
        saved_bytes=total_bytes,
        saved="inputs",
    ),
    FunctionCase(
        name="AttentionTangent",
        function=lambda q, k, v, *tangents: AttentionTangent.call(q, k, v, None, None, *tangents, None, ATTENTION),
        Function=AttentionTangent,
        inputs=drawn((2, 2), (3, 2), (3, 1), (2, 2), (3, 2), (3, 1)),
        formula=r"\tfrac{d}{dt} \operatorname{softmax}(s\, Q_t K_t^\top)\, V_t",
        reference=attention_tangent,
        saved_bytes=total_bytes,
        saved="inputs",
    ),
    FunctionCase(
        name="NormalizationGradient",
        function=lambda g, x, weight: NormalizationGradient.call(g, x, weight, layout(x.dtype), (True, True, True)),
        Function=NormalizationGradient,
        inputs=drawn((2, 3), (2, 3), (3,)),
        formula=r"\nabla_{x,w,b} \langle g,\, \hat x w + b \rangle",
        reference=normalization_gradient,
        saved_bytes=total_bytes,
        saved="inputs",
    ),
]
