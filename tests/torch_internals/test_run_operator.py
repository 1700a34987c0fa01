"""Operators on complex numbers and on zeros without storage give the same values under dispatch modes as outside."""

import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import hodiff
from hodiff.common.chunks import ByteCount
from hodiff.torch_internals.interception import run_operator


def numbers(*shape):
    return torch.randn(shape, dtype=torch.complex128, generator=torch.Generator().manual_seed(3))


class Bare(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Mended(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return run_operator(func, args, kwargs)


TESTS = Path(__file__).parents[1]
A, B = numbers(3, 2), numbers(2, 3)


def test_torch_alone_is_wrong():
    """Remove `run_operator` when this test fails: torch is then correct."""
    with Bare():
        wrong = torch.linalg.pinv(A)
    assert (wrong - torch.linalg.pinv(A)).abs().max() > 0.1


@pytest.mark.parametrize("mode", [Mended, ByteCount])
def test_pinv_values_match_numpy(mode):
    with mode():
        found = torch.linalg.pinv(A)
    np.testing.assert_allclose(found.numpy(), np.linalg.pinv(A.numpy()), rtol=1e-12)


DERIVATIVE = """
import torch
from torch.func import grad, jvp
from torch_internals.test_run_operator import Bare, Mended

x = torch.tensor([1.0, 2.0], requires_grad=True)
_, curvature = jvp(grad(lambda y: (y**4).sum()), (x,), (torch.ones(2),))
with {mode}():
    print(torch.autograd.grad(curvature.sum(), x)[0].tolist())
"""


def _of_a_process(mode):
    script = DERIVATIVE.format(mode=mode)
    return subprocess.run([sys.executable, "-c", script], cwd=TESTS, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_torch_alone_crashes_on_zeros_without_storage():
    assert _of_a_process("Bare").returncode == -signal.SIGSEGV


@pytest.mark.slow
def test_forward_mode_derivatives_match():
    done = _of_a_process("Mended")
    assert (done.returncode, done.stdout) == (0, "[24.0, 48.0]\n")


def test_zeros_without_storage_are_accepted():
    with Mended():
        found = torch.ops.aten.mul.Scalar(torch._efficientzerotensor((3,)), 4.0)
    assert (1 + found).tolist() == [1.0, 1.0, 1.0]


def test_dispatch_keys_are_restored_after_an_error():
    excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
    seen = []

    class Looking(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            key = torch._C.DispatchKey.Conjugate
            seen.append(excluded(key))
            try:
                return run_operator(func, args, kwargs)
            finally:
                seen.append(excluded(key))

    with Looking(), pytest.raises(RuntimeError, match="shapes"):
        torch.mm(A, A)
    assert seen == [True, True]


@pytest.mark.parametrize("mode", ["forward", "reverse"])
def test_jacobians_of_complex_pinv_match_differences(mode):
    def f(t):
        return torch.linalg.pinv(A + t * B.mT).abs().sum()

    t = torch.tensor(0.4, dtype=torch.float64)
    found = float(hodiff.jacobian(f, mode=mode)(t))
    h = 1e-5
    by_numpy = [np.abs(np.linalg.pinv((A + s * B.mT).numpy())).sum() for s in (0.4 - h, 0.4 + h)]
    assert found == pytest.approx((by_numpy[1] - by_numpy[0]) / (2 * h), rel=1e-7)
