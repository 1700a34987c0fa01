"""Expected answers to all exercises: names to define and references to compare with. `judge.py` reads this table."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from judge import Same
from particular_judges import (
    MATRIX,
    SQUARE,
    Judge,
    X,
    Y,
    batches_the_operator,
    checkpoints,
    draws_inside,
    exports_rows,
    is_in_place,
    keeps,
    numbers,
    quantizes_rows,
    refuses,
    reverses_by_a_constant,
    several,
    slope_keeps_its_digits,
    survives_infinities,
    tells_transposes,
    wastes_nothing,
    wave,
    with_derivatives_of,
)
from torch import Tensor


def masked(Q: Tensor, K: Tensor, V: Tensor) -> Tensor:
    """Compute causal attention by torch's operators."""
    scores = Q @ K.mT / Q.shape[-1] ** 0.5
    later = torch.ones_like(scores).triu(1).bool()
    return torch.softmax(scores.masked_fill(later, -1e9), -1) @ V


def tanh_clamped(x: Tensor) -> Tensor:
    """Return the nearest of -1, 0 and 1."""
    return x.round().clamp(-1, 1)


def soft(logits: Tensor, noise: Tensor, temperature: float) -> Tensor:
    """Return the soft sample."""
    return torch.softmax((logits + noise) / temperature, -1)


def hard(logits: Tensor, noise: Tensor, temperature: float) -> Tensor:
    """Return the one-hot vector of the largest entry."""
    del temperature
    return F.one_hot((logits + noise).argmax(-1), logits.shape[-1]).to(logits)


def airy_series(x: Tensor, order: int) -> Tensor:
    """Compute A(x) or A'(x) by its Taylor series at 0, with torch's operators."""
    a, b = 0.355028053887817239, -0.258819403792806799
    coefficients = [a, b, 0.0]
    for k in range(60):
        coefficients.append(coefficients[k] / ((k + 3) * (k + 2)))
    if order:
        coefficients = [k * each for k, each in enumerate(coefficients)][1:]
    y = torch.zeros_like(x)
    for each in reversed(coefficients):
        y = y * x + each
    return y


def leaky(x: Tensor) -> Tensor:
    """Compute the leaky rectifier."""
    return torch.where(x > 0, x, 0.1 * x)


def log1p_exp(x: Tensor) -> Tensor:
    """Compute softplus at moderate numbers."""
    return torch.log1p(x.exp())


def convolution(x: Tensor, w: Tensor, stride: int, padding: int, dilation: int) -> Tensor:
    """Compute torch's convolution, which is right at every order."""
    return F.conv1d(x, w, stride=stride, padding=padding, dilation=dilation)


class Copied:
    """Wrapper of an in-place Function, which leaves its argument unchanged."""

    def __init__(self, function: type[torch.autograd.Function]):
        self._function = function

    def f(self, x: Tensor) -> Tensor:
        """Apply the Function to a copy."""
        return self._function.apply(x.clone())


# Inputs that detect rules that fit only the first inputs
TENSORS = ((wave(4),), (wave(2, 3, 2),))
PAIRS = (
    (MATRIX, MATRIX.flip(0)),
    (X[0], MATRIX),
    (MATRIX, Y),
    (wave(3, 1, 2), wave(2, start=7)),
)

EXPECTED: dict[str, Judge] = {
    "01_square": Same("Sine", torch.sin, (X,)),
    "02_cube": Same("Quartic", lambda x: x**4, (X,)),
    "03_exp": Same("Exp2", torch.exp2, (X,), also=keeps(lambda module: module.Exp2.apply, 0)),
    "04_sinh": Same("root_of_one_plus_square", lambda x: (1 + x * x).sqrt(), (X,), by_function=True),
    "05_two_outputs": Same("Cartesian", lambda r, angle: (r * angle.cos(), r * angle.sin()), (X, Y)),
    "06_sigmoid": Same(
        "Softplus", log1p_exp, (X,), also=slope_keeps_its_digits("Softplus", -40.0, 1 / (1 + math.exp(40.0)))
    ),
    "07_tanh": Same("Tanh", torch.tanh, (X,), also=slope_keeps_its_digits("Tanh", 20.0, 1 / math.cosh(20.0) ** 2)),
    "08_relu": Same("LeakyRelu", leaky, (X,), also=keeps(lambda module: module.LeakyRelu.apply, 0)),
    "09_matmul": Same("QuadraticForm", lambda x, A: x @ A @ x, (X, SQUARE), ((wave(2), wave(2, 2, start=3)),)),
    "10_bias_add": Same(
        "ChannelBias",
        lambda x, b: x + b[:, None],
        (torch.stack([MATRIX, -MATRIX]), Y[:2]),
        ((wave(1, 3, 4), Y), (wave(3, 1, 2), Y[:1])),
    ),
    "11_broadcasting": Same("Divide", torch.div, (MATRIX[:, :1], Y), PAIRS),
    "12_linear": Same(
        "Bilinear",
        lambda x, W, y: x @ W @ y,
        (X[:2], MATRIX, Y),
        ((wave(4), wave(4, 2, start=5), wave(2)),),
        also=wastes_nothing,
    ),
    "13_sum": Same("CumulativeSum", lambda x: x.cumsum(-1), (MATRIX,), TENSORS),
    "14_mean": Same("Variance", lambda x: x.var(-1, correction=0), (MATRIX,), TENSORS),
    "15_max": Same("Sort", lambda x: tuple(x.sort(-1)), (MATRIX,), TENSORS),
    "16_conv1d": Same(
        "TransposedConv1d",
        F.conv_transpose1d,
        (MATRIX[None], numbers([[0.4, -0.9]], [[1.3, 0.2]])),
        ((wave(2, 1, 4), wave(1, 3, 3, start=9)),),
    ),
    "17_non_tensor_arguments": Same(
        "Polynomial",
        lambda x, c: sum(each * x**k for k, each in enumerate(c)),
        (numbers(0.5, 0.0), (0.3, -1.0, 2.0, 0.7)),
    ),
    "18_optional_bias": several(
        Same("scale", lambda x, w, b: w * x + b, (X, Y, X + 1)),
        Same("scale", lambda x, w, b: w * x, (X, Y, None)),
        Same("scale", lambda x, w, b: x + b, (X, None, Y)),
        Same("scale", lambda x, w, b: x + 0, (X, None, None)),
    ),
    "19_attention": Same("CausalAttention", masked, (SQUARE, SQUARE.flip(0), SQUARE.T)),
    "20_triton": Same("Decay", lambda x: (-x).exp(), (X,)),
    "21_once_differentiable": refuses,
    "22_constant_slope": Same("square", torch.square, (X,), by_function=True),
    "23_doubled_tangent": tells_transposes,
    "24_wrong_batching": Same("Mean", lambda x: x.mean(-1), (MATRIX,), TENSORS),
    "25_numpy_backward": Same("Sine", torch.sin, (X,)),
    "26_elementwise": Same("ScaledExp", lambda x, y: x * y.exp(), (MATRIX[:, :1], Y), PAIRS),
    "27_legacy_functions": Same("LogOfOnePlusSquare", lambda x: (1 + x * x).log(), (X,)),
    "28_straight_through": Same("Ternary", with_derivatives_of(torch.tanh, tanh_clamped), (X,)),
    "29_gumbel_softmax": Same("hard_sample", with_derivatives_of(soft, hard), (X, Y, 0.7), also=draws_inside),
    "30_checkpoint": checkpoints,
    "31_masks_and_memory": Same(
        "packed_leaky_relu", leaky, (X,), also=keeps(lambda module: module.packed_leaky_relu, 1 / 8)
    ),
    "32_logsumexp": Same(
        "LogAddExp", lambda a, b: (a.exp() + b.exp()).log(), (MATRIX[:, :1], Y), PAIRS, also=survives_infinities
    ),
    "33_swish": several(
        Same("Softplus", log1p_exp, (X,), also=keeps(lambda module: module.Softplus.apply, 0)),
        slope_keeps_its_digits("Softplus", -40.0, 1 / (1 + math.exp(40.0))),
    ),
    "34_gradient_control": Same(
        "scheduled",
        with_derivatives_of(lambda x, strength: -strength.detach() * x, lambda x, strength: x),
        (X, numbers(0.3)[0]),
        also=reverses_by_a_constant,
    ),
    "35_external_code": several(Same("Airy", airy_series, (X, 0)), Same("Airy", airy_series, (X, 1))),
    "36_in_place": several(
        lambda module: Same("f", torch.neg, (X,))(Copied(module.InPlaceNegation)),
        is_in_place,
    ),
    "37_dim_and_keepdim": several(
        Same(
            "variance",
            lambda x, dim: x.var(dim, correction=0),
            (MATRIX[None], (0, -1)),
            ((wave(3, 2, 2), (0, -1)),),
            by_function=True,
        ),
        Same("variance", lambda x, dim, keepdim: x.var(dim, correction=0, keepdim=keepdim), (MATRIX, 0, True)),
    ),
    "38_stride_and_padding": several(
        *(
            Same(
                "Conv1d",
                convolution,
                (numbers([[0.5, -1.2, 2.0, 0.3, -0.7, 1.1, 0.9]]), numbers([[0.4, -0.9, 1.3]]), *options),
            )
            for options in ((1, 0, 1), (2, 1, 1), (2, 2, 2), (3, 1, 2))
        )
    ),
    "39_cpp_operator": batches_the_operator,
    "40_quantization_aware_training": quantizes_rows,
    "41_export": exports_rows,
}
