"""Tests of the accuracy of elementary functions at hard points, in units in the last place, and of its page."""

import mpmath as mp
import pytest
import torch
from taylor.accuracy import errors, exact_coefficients, truths
from taylor.hard_points import HARD
from taylor.write_accuracy import PAGE
from torch.utils._python_dispatch import TorchDispatchMode

import hodiff
from hodiff.taylor import jet
from hodiff.taylor.rules.elementary import ELEMENTARY

# Up to twice the measured errors; the fifth coefficient of mish nearly vanishes at 0 by cancellation.
ULPS = 15.0
MORE = {"mish": 120.0}


def test_every_elementary_function_has_hard_points():
    piecewise = {"abs", "relu", "frac", "deg2rad", "rad2deg"}
    assert set(ELEMENTARY) - piecewise <= set(HARD)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", HARD)
def test_errors_are_a_few_ulps(name, dtype):
    # The value comes from torch.
    assert max(errors(name, dtype)[1:]) < MORE.get(name, ULPS)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("point", [-(1e6) - 0.25, -1000.3, -1 - 1e-6, -0.9, -1e-5, -1e-10, 1e-10])
def test_gamma_derivatives_below_zero_match_mpmath(point, dtype):
    r"""Derivatives of $\log|\Gamma|$ by the reflection formula take no more time than above zero."""
    x = torch.tensor(point, dtype=dtype)
    one, zero = torch.ones_like(x), torch.zeros_like(x)
    _, found = jet(torch.lgamma, (x,), ([one, zero, zero],), normalized=True)
    with mp.workdps(150):
        exact = mp.taylor(lambda t: mp.log(abs(mp.pi / mp.sin(mp.pi * t))) - mp.loggamma(1 - t), mp.mpf(x.item()), 3)
        for got, coefficient in zip(found, exact[1:], strict=True):
            assert abs(got.item() - coefficient) < ULPS * torch.finfo(dtype).eps * abs(coefficient)


class Arguments(TorchDispatchMode):
    """Record the arguments of torch's zeta and polygamma functions."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.special_zeta, torch.ops.aten.polygamma):
            self.found.append(args[1])
        return func(*args, **(kwargs or {}))


def test_gamma_derivatives_far_below_zero_are_fast():
    """torch's kernels climb from a negative argument to zero in steps of one, which takes seconds from -1e8."""
    x = torch.tensor([-1e8 + 0.25] * 4, dtype=torch.float64)
    with Arguments() as arguments:
        hodiff.laplacian(lambda x: torch.lgamma(x).sum())(x)
    assert arguments.found
    assert all(bool((each > 0).all()) for each in arguments.found)


@pytest.mark.parametrize("size", [1e-300, 1e-120, 1e-30, 1e-9, 1e-4])
def test_ndtri_in_the_tail_matches_mpmath(size):
    for dtype in (torch.float64, torch.float32):
        p = torch.tensor(size, dtype=dtype)
        if size > torch.finfo(dtype).tiny:
            (first,) = jet(torch.special.ndtri, (p,), ([torch.ones_like(p)],))[1]
            with mp.workdps(50):
                v = mp.findroot(lambda t: mp.log(mp.ncdf(t)) - mp.log(mp.mpf(p.item())), torch.special.ndtri(p).item())
                assert abs(first.item() * mp.npdf(v) - 1) < ULPS * torch.finfo(dtype).eps


def test_ndtri_by_nested_laplacians_matches():
    x = torch.tensor([0.2, 0.5, 0.7], dtype=torch.float64)
    f = lambda x: torch.special.ndtri(x).sum()  # noqa: E731
    torch.testing.assert_close(hodiff.laplacian(hodiff.laplacian(f))(x), hodiff.bilaplacian(f)(x))


@pytest.mark.parametrize("size", [1e-300, 1e-160, 1e-30, 1e-9, 1e-4])
def test_atanh_near_zero_matches_mpmath(size):
    for dtype in (torch.float64, torch.float32):
        if size > torch.finfo(dtype).tiny:
            x = torch.tensor(-size, dtype=dtype)
            _, (first, second, third) = jet(torch.atanh, (x,), ([x**0, 0 * x, 0 * x],), normalized=True)
            u = mp.mpf(x.item())
            exact = (1 / (1 - u**2), u / (1 - u**2) ** 2, (1 + 3 * u**2) / (3 * (1 - u**2) ** 3))
            for got, coefficient in zip((first, second, third), exact, strict=True):
                assert abs(got.item() / coefficient - 1) < 4 * torch.finfo(dtype).eps


@pytest.mark.slow
@pytest.mark.parametrize("name", HARD)
def test_saved_answers_match_mpmath(name):
    assert truths()[name] == exact_coefficients(name)


def test_page_shows_every_function_in_two_dtypes():
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    for name in HARD:
        rows = [line for line in lines if line.startswith(f"| `{name}` |")]
        assert len(rows) == 2
        for row in rows:
            cells = [float(cell) for cell in row.split("|")[3:-1]]
            assert len(cells) == 10
            assert max(cells) < MORE.get(name, ULPS)
