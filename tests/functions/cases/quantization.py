"""Straight-through quantizers."""

import torch
from functions.case import FunctionCase, drawn, normal, uniform

from hodiff.functions.gradients.quantization import (
    QuantizeSTE,
    floor_ste,
    quantize_ste,
    round_ste,
    sign_clipped_ste,
    sign_ste,
)
from hodiff.functions.gradients.straight_through import StraightThrough, straight_through


def clipped_bytes(x):
    """Count the bytes of the input, or (torch 2.14 and later) one byte per element for the mask of inliers."""
    return x.nbytes if torch.__version__ < "2.14" else x.numel()


def frozen(x):
    return x.detach() if isinstance(x, torch.Tensor) else x


def linear_on_the_grid(x, scale, offset, lowest, highest):
    """Quantize with a rounding error, in integers, that is constant around this point."""
    ratio = (x - offset) / scale
    error = (frozen(ratio).clamp(lowest, highest).round() - frozen(ratio)).detach()
    low, high = scale * lowest + offset, scale * highest + offset
    return torch.where(ratio < lowest, low, torch.where(ratio > highest, high, scale * (ratio + error) + offset))


def per_channel(x, scale, offset=0.0):
    return quantize_ste(x, 3, scale=scale, offset=offset, symmetric=False)


def of_range(x, low, high):
    return quantize_ste(x, 3, low=low, high=high, symmetric=False)


def of_range_values(x, low, high):
    """Quantize to integers with a zero point, like hardware."""
    scale = (high - low) / 7
    zero_point = -(low / scale).round()
    return ((x / scale + zero_point).round().clamp(0, 7) - zero_point) * scale


def of_range_surrogate(x, low, high):
    scale = (high - low) / 7
    shift = (frozen(low / scale).round() - frozen(low / scale)).detach()
    return linear_on_the_grid(x, scale, scale * (low / scale + shift), 0, 7)


def estimator(name, function, value, surrogate, formula):
    return FunctionCase(
        name=name,
        function=function,
        Function=StraightThrough,
        inputs=lambda dtype, g: (2 * normal((3, 4), dtype, g),),
        formula=formula,
        reference=value,
        surrogate=surrogate,
        saved_bytes=lambda x: clipped_bytes(x) if "clipped" in name else 0,
        saved="input" if "clipped" in name else "nothing",
        empty=lambda dtype: (torch.ones(0, 3, dtype=dtype),),
    )


CASES = [
    estimator("sign_ste", sign_ste, torch.sign, lambda x: x, r"\operatorname{sign}(x),\ \mathrm D x"),
    estimator(
        "sign_clipped_ste",
        sign_clipped_ste,
        torch.sign,
        lambda x: x.clamp(-1, 1),
        r"\operatorname{sign}(x),\ \mathrm D \operatorname{clamp}(x, -1, 1)",
    ),
    estimator("round_ste", round_ste, torch.round, lambda x: x, r"\operatorname{round}(x),\ \mathrm D x"),
    estimator("floor_ste", floor_ste, torch.floor, lambda x: x, r"\lfloor x \rfloor,\ \mathrm D x"),
    FunctionCase(
        name="straight_through",
        function=straight_through(lambda x, y: (x > y).to(x.dtype), lambda x, y: torch.sigmoid(x * y - y)),
        Function=StraightThrough,
        inputs=drawn((3, 4), (4,)),
        formula=r"f(x),\ \mathrm D s(x)",
        reference=lambda x, y: (x > y).to(x.dtype),
        surrogate=lambda x, y: torch.sigmoid(x * y - y),
        saved="what the surrogate saves",
    ),
    FunctionCase(
        name="quantize_ste",
        function=lambda x, scale: quantize_ste(x, 3, scale=scale),
        Function=QuantizeSTE,
        inputs=lambda dtype, g: (normal((4, 4), dtype, g), uniform(0.3, 0.5, (), dtype, g)),
        formula=r"s \operatorname{round}(\operatorname{clamp}((x - \beta) / s, q_-, q_+)) + \beta",
        reference=lambda x, s: s * torch.round(x / s).clamp(-4, 3),
        surrogate=lambda x, s: linear_on_the_grid(x, s, 0.0, -4, 3),
        saved_bytes=lambda x, scale: x.nbytes + scale.nbytes,
        saved="inputs",
        empty=lambda dtype: (torch.ones(0, 3, dtype=dtype), torch.ones((), dtype=dtype)),
    ),
    FunctionCase(
        name="quantize_ste-offset",
        function=per_channel,
        Function=QuantizeSTE,
        inputs=lambda dtype, g: (
            normal((4, 4), dtype, g),
            uniform(0.2, 0.3, (4,), dtype, g),
            uniform(-0.8, -0.6, (4, 1), dtype, g),
        ),
        formula=r"s \operatorname{round}(\operatorname{clamp}((x - \beta) / s, q_-, q_+)) + \beta",
        reference=lambda x, s, b: s * torch.round((x - b) / s).clamp(0, 7) + b,
        surrogate=lambda x, s, b: linear_on_the_grid(x, s, b, 0, 7),
        saved_bytes=lambda x, scale, offset: x.nbytes + scale.nbytes + offset.nbytes,
        saved="inputs",
    ),
    FunctionCase(
        name="quantize_ste-range",
        function=of_range,
        Function=QuantizeSTE,
        inputs=lambda dtype, g: (
            normal((4, 4), dtype, g),
            uniform(-0.8, -0.6, (), dtype, g),
            uniform(0.9, 1.1, (), dtype, g),
        ),
        formula=r"s \operatorname{round}(\operatorname{clamp}((x - \beta) / s, q_-, q_+)) + \beta",
        reference=of_range_values,
        surrogate=of_range_surrogate,
        saved="inputs",
    ),
]
