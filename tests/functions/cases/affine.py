"""Sums and scalings."""

import torch
from functions.case import Extremes, FunctionCase, drawn, normal, uniform

from hodiff.functions.linear.affine import (
    FusedAddReLU,
    ScaleShift,
    WeightedSum,
    fused_add_relu,
    scale_shift,
    weighted_sum,
)

INF = float("inf")

CASES = [
    FunctionCase(
        name="fused_add_relu",
        function=fused_add_relu,
        Function=FusedAddReLU,
        inputs=drawn((2, 3), (2, 1)),
        formula=r"\max(x + y, 0)",
        reference=lambda x, y: (x + y) * ((x + y) > 0),
        saved_bytes=lambda x, y: torch.broadcast_shapes(x.shape, y.shape).numel(),
        saved="1 byte an element",
        extremes=[
            Extremes(
                lambda x, y: max(x + y, 0),
                others={1: 0.0},
                domain=((-INF, 0), (0, INF)),
                limits={0.0: (0, 0, 0, 0), INF: (INF, 1, 0, 0), -INF: (0, 0, 0, 0)},
                scale=0.0,
            )
        ],
        empty=lambda dtype: (torch.ones(0, 3, dtype=dtype), torch.ones(3, dtype=dtype)),
    ),
    FunctionCase(
        name="weighted_sum",
        function=lambda ws, *xs: weighted_sum(xs, ws),
        Function=WeightedSum,
        inputs=drawn((3,), (2, 3), (2, 1), ()),
        formula=r"\sum_i w_i x_i",
        reference=lambda ws, *xs: sum(w * x for w, x in zip(ws.unbind(), xs, strict=True)),
        saved_bytes=lambda ws, *xs: ws.nbytes + sum(x.nbytes for x in xs),
        saved="weights, and terms if the weights need a gradient",
        empty=lambda dtype: (torch.ones(2, dtype=dtype), torch.ones(0, 3, dtype=dtype), torch.ones(3, dtype=dtype)),
    ),
    FunctionCase(
        name="scale_shift",
        function=scale_shift,
        Function=ScaleShift,
        inputs=lambda dtype, g: (normal((2, 3), dtype, g), uniform(0.5, 2, (3,), dtype, g), normal((2, 1), dtype, g)),
        formula=r"x w + b",
        reference=lambda x, weight, bias: torch.addcmul(bias, x, weight),
        saved_bytes=lambda x, weight, bias: x.nbytes + weight.nbytes,
        saved="input and scale",
        extremes=[Extremes(lambda x, weight, bias: x * weight + bias, others={1: 3.0, 2: 0.0}, scale=0.0)],
        empty=lambda dtype: (torch.ones(0, 3, dtype=dtype), torch.ones(3, dtype=dtype), torch.ones(3, dtype=dtype)),
    ),
]
