"""Gradient control functions that have a Jacobian."""

import torch
from functions.case import FunctionCase, drawn, elementwise

from hodiff.functions.gradients.control import (
    LogGradient,
    ScaleGradient,
    log_gradient,
    reverse_gradient,
    scale_gradient,
)

FACTORS = torch.tensor([0.5, -2.0, 3.0], dtype=torch.float64)


def control_case(name, function, Function, surrogate, formula, **more):
    return elementwise(
        name=name,
        function=function,
        Function=Function,
        formula=formula,
        reference=lambda x: x,
        surrogate=surrogate,
        saved_bytes=lambda x: 0,
        saved="nothing",
        **more,
    )


CASES = [
    control_case(
        "scale_gradient", lambda x: scale_gradient(x, 0.3), ScaleGradient, lambda x: 0.3 * x, r"x,\ \mathrm D c x"
    ),
    FunctionCase(
        name="scale_gradient-tensor",
        function=lambda x: scale_gradient(x, FACTORS.to(x.dtype)),
        Function=ScaleGradient,
        inputs=drawn((2, 3)),
        formula=r"x,\ \mathrm D c x",
        reference=lambda x: x,
        surrogate=lambda x: FACTORS.to(x.dtype) * x,
        saved_bytes=lambda x: FACTORS.nbytes,
        saved="the factor",
    ),
    control_case(
        "reverse_gradient",
        lambda x: reverse_gradient(x, 0.3),
        ScaleGradient,
        lambda x: -0.3 * x,
        r"x,\ \mathrm D (-\lambda x)",
    ),
    control_case(
        "log_gradient", lambda x: log_gradient(x, lambda gradient: None), LogGradient, None, "x", compile=False
    ),
]
