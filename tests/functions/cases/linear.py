"""Linear layers."""

from functools import partial

import torch
from functions.case import FunctionCase, drawn, normal

from hodiff.functions.linear.fused_linear import (
    ClippedGradientLinear,
    FusedLinear,
    clipped_gradient_linear,
    fused_linear,
)

ACTIVATIONS = {
    "relu": torch.relu,
    "tanh": torch.tanh,
    "silu": lambda z: z / (1 + torch.exp(-z)),
    "gelu": lambda z: z * torch.special.ndtr(z),
}


def output_bytes(x, weight):
    return x.nbytes // x.shape[-1] * weight.shape[0]


def fused(activation, batch, with_bias=True):
    def draw(dtype, generator):
        shapes = [(*batch, 2), (3, 2), *([(3,)] if with_bias else [])]
        return tuple(normal(shape, dtype, generator) for shape in shapes)

    def saved_bytes(x, weight, bias=None):
        rest = {"relu": output_bytes(x, weight) // x.itemsize, "tanh": output_bytes(x, weight)}.get(
            activation, 0 if bias is None else bias.nbytes
        )
        return x.nbytes + weight.nbytes + rest

    def reference(x, weight, bias=0.0):
        return ACTIVATIONS[activation]((x.unsqueeze(-2) * weight).sum(-1) + bias)

    return FunctionCase(
        name=f"fused_linear-{activation}" + ("" if with_bias else "-without-bias"),
        function=partial(fused_linear, activation=activation) if with_bias else partial(_without_bias, activation),
        Function=FusedLinear,
        direct=lambda x, weight, bias=None: FusedLinear.call(x, weight, bias, activation),
        inputs=draw,
        formula=rf"\mathrm{{{activation}}}(x w^T + b)",
        reference=reference,
        saved_bytes=saved_bytes,
        saved="input, weight and " + {"relu": "1 byte an element", "tanh": "output"}.get(activation, "bias"),
        empty=lambda dtype: (torch.ones(0, 2, dtype=dtype), torch.ones(3, 2, dtype=dtype)),
    )


def _without_bias(activation, x, weight):
    return fused_linear(x, weight, activation=activation)


CASES = [
    fused("relu", (2,)),
    fused("tanh", (2, 1)),
    fused("silu", ()),
    fused("gelu", (3,)),
    fused("gelu", (2,), with_bias=False),
    FunctionCase(
        # The gradients are far below the bound, so every route is exact.
        name="clipped_gradient_linear",
        function=partial(clipped_gradient_linear, bound=1e6),
        Function=ClippedGradientLinear,
        inputs=drawn((2, 3), (2, 3)),
        formula=r"x w^T",
        reference=lambda x, weight: (x.unsqueeze(-2) * weight).sum(-1),
        saved_bytes=lambda x, weight: x.nbytes + weight.nbytes,
        saved="inputs",
        empty=lambda dtype: (torch.ones(0, 3, dtype=dtype), torch.ones(2, 3, dtype=dtype)),
    ),
]
