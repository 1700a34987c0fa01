"""Functions of symmetric matrices."""

import torch
from functions.case import FunctionCase, normal

from hodiff.functions.spectral import SpectralDerivative, spectral_function


def symmetric(dtype, g):
    """Draw a 2 × 2 matrix: third derivatives by differences call the function a hundred times."""
    x = normal((2, 2), torch.float64, g)
    return ((x + x.mT).to(dtype),)


CASES = [
    FunctionCase(
        name="spectral_function",
        function=lambda A: spectral_function(A, torch.exp),
        Function=SpectralDerivative,
        direct=lambda A: SpectralDerivative.apply((A + A.mT) / 2, torch.exp),
        inputs=symmetric,
        formula=r"V f(\Lambda) V^H,\ A = V \Lambda V^H",
        reference=lambda A: torch.linalg.matrix_exp((A + A.mT) / 2),
        saved="input",
        nan_propagates=False,
        compile=False,
        order=2,
    ),
]
