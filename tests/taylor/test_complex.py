"""Tests of complex values along real t, against interpolated values and formulas in real and imaginary parts."""

import pytest
import torch
from mpmath_series import D
from taylor.routes import assert_as_values, curves

GENERATOR = torch.Generator().manual_seed(5)
A, B = (torch.rand(3, 2, generator=GENERATOR, dtype=D) + 0.5 for _ in range(2))
MATRIX = torch.complex(torch.eye(2, dtype=D), torch.tensor([[0.3, -0.2], [0.1, 0.4]], dtype=D))


def complex_of(a, b):
    return torch.complex(a, b)


# Functions of z = a + ib, where both a and b move.
FUNCTIONS = {
    "exp": torch.exp,
    "log": torch.log,
    "log1p": torch.log1p,
    "expm1": torch.expm1,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "sin": torch.sin,
    "cosh": torch.cosh,
    "tan": torch.tan,
    "tanh": torch.tanh,
    "atan": torch.atan,
    "acosh": torch.acosh,
    "sigmoid": torch.sigmoid,
    "reciprocal": torch.reciprocal,
    "square": torch.square,
    "product": lambda z: z * z.flip(0),
    "product with a number": lambda z: (2 - 1j) * z + 1j,
    "quotient": lambda z: z / (3 + z.flip(0)),
    "of a number": lambda z: 1j / z,
    "power": lambda z: z**2.5,
    "complex power": lambda z: z ** (0.5 + 1j),
    "power of itself": lambda z: z**z,
    "power of a number": lambda z: (1 + 2j) ** z,
    "with a real one": lambda z: z * z.real + z.imag,
    "abs": torch.abs,
    "angle": torch.angle,
    "conj": lambda z: z.conj() * z,
    "conj_physical": torch.conj_physical,
    "sgn": torch.sgn,
    "view_as_real": torch.view_as_real,
    "real and imag": lambda z: (z * z).real * z.imag,
    "polar": lambda z: torch.polar(z.abs(), z.imag),
    "matmul": lambda z: z @ MATRIX,
    "matmul of two": lambda z: z.mH @ z,
    "mv": lambda z: z @ MATRIX[0],
    "vdot": lambda z: torch.vdot(z[:, 0], z[:, 1]),
    "einsum": lambda z: torch.einsum("ij,kj->ik", z, z.conj()),
    "fft": torch.fft.fft,
    "ifft": lambda z: torch.fft.ifft(z, dim=0),
    "irfft": lambda z: torch.fft.irfft(z * z, n=4, dim=0),
    "fft of reals": lambda z: torch.fft.rfft(z.real * z.imag, dim=0),
    "hfft": torch.fft.hfft,
    "spectrum": lambda z: torch.fft.fft2(z).abs().square(),
    "sum": lambda z: z.sum(0) * z.mean(),
    "cumsum": lambda z: z.cumsum(0) * z,
    "prod": lambda z: z.prod(0),
    "cat": lambda z: torch.cat((z, z * z)),
    "cat with reals": lambda z: torch.cat((z, z.real)),
    "norm": torch.linalg.vector_norm,
    "inv": lambda z: torch.linalg.inv(z[:2] + 2 * MATRIX),
    "solve": lambda z: torch.linalg.solve(z[:2] + 2 * MATRIX, z[1:]),
    "det": lambda z: torch.linalg.det(z[:2] + 2 * MATRIX),
    "logdet": lambda z: torch.linalg.slogdet(z[:2] + 2 * MATRIX)[1],
    "cholesky": lambda z: torch.linalg.cholesky(z[:2] @ z[:2].mH + 3 * torch.eye(2)),
    "index": lambda z: z[torch.tensor([0, 0, 2])] * z[1],
    "where": lambda z: torch.where(torch.tensor([[True], [False], [True]]), z, z.conj()),
    "where with a number": lambda z: torch.where(torch.tensor([[True], [False], [True]]), z.real, 0.5 + 1j),
    "silu": torch.nn.functional.silu,
    "std": lambda z: z.std(0),
    "to_real": lambda z: torch.view_as_complex(torch.stack((z.imag, z.real), -1)),
}


@pytest.mark.one_in(60)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_complex_values_match_interpolation(name):
    assert_as_values(curves(lambda a, b: FUNCTIONS[name](complex_of(a, b)), (A, B), 4, 3, size=0.15), 4, (2, 3))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["exp", "product", "matmul", "fft", "abs", "log"])
def test_complex_series_match_real_and_imaginary_parts(name):
    """Series of complex numbers are supported directly, not only by their parts."""
    f = FUNCTIONS[name]
    parts = curves(lambda a, b: f(complex_of(a, b)), (A, B), 3, 3, size=0.15)
    whole = curves(f, (complex_of(A, B),), 3, 3)
    whole = type(whole)(whole.function, whole.start, (complex_of(*parts.terms),))
    assert_as_values(whole, 3, (2, 3))
