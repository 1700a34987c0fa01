"""NumPy and SciPy code."""

import numpy as np
import scipy.special
import torch
from functions.case import FunctionCase, elementwise, normal, uniform

from hodiff.functions.numpy.nodes import External
from hodiff.functions.numpy.numpy_function import numpy_function

bessel = numpy_function(
    scipy.special.j0,
    elementwise=True,
    derivatives=[lambda x, k=k: scipy.special.jvp(0, x, k) for k in (1, 2, 3, 4)],
)


def bessel_by_integral(x):
    """Compute the mean of cos(x sin t) over a period; a sum over equidistant points is exact up to rounding."""
    t = 2 * torch.pi * torch.arange(64, dtype=x.dtype) / 64
    return torch.cos(x[..., None] * torch.sin(t)).mean(-1)


def solve_vjp(cotangent, A, b):
    dual = solve(A.mT, cotangent)
    return -torch.outer(dual, solve(A, b)), dual


def solve_jvp(tangents, A, b):
    return solve(A, tangents[1] - tangents[0] @ solve(A, b))


solve = numpy_function(np.linalg.solve, vjp=solve_vjp, jvp=solve_jvp, rules="torch")


def well_conditioned(dtype, generator):
    A = 3 * torch.eye(2) + 0.5 * normal((2, 2), torch.float64, generator)
    return A.to(dtype), normal((2,), dtype, generator)


CASES = [
    elementwise(
        name="numpy_function-elementwise",
        function=bessel,
        Function=External,
        inputs=lambda dtype, g: (uniform(0.5, 6, (2, 3), dtype, g),),
        formula=r"J_0(x)",
        reference=bessel_by_integral,
        saved="inputs",
        compile=False,  # NumPy code causes a graph break
    ),
    FunctionCase(
        name="numpy_function-rules",
        function=solve,
        Function=External,
        inputs=well_conditioned,
        formula=r"A^{-1} b",
        reference=lambda A, b: torch.linalg.inv(A) @ b,
        saved_bytes=lambda A, b: A.nbytes + b.nbytes,
        saved="inputs",
        compile=False,
    ),
]
