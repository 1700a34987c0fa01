"""Operators under dispatch modes: complex kernels that are made of operators have the values that they have outside."""

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


A, B = numbers(3, 2), numbers(2, 3)


def test_torch_alone_is_wrong():
    """When it is not any more, `run_operator` may go."""
    with Bare():
        wrong = torch.linalg.pinv(A)
    assert (wrong - torch.linalg.pinv(A)).abs().max() > 0.1


@pytest.mark.parametrize("mode", [Mended, ByteCount])
def test_values_are_those_of_numpy(mode):
    with mode():
        found = torch.linalg.pinv(A)
    np.testing.assert_allclose(found.numpy(), np.linalg.pinv(A.numpy()), rtol=1e-12)


def test_keys_are_as_before_after_an_error():
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
def test_jacobians_of_complex_pseudoinverses(mode):
    def f(t):
        return torch.linalg.pinv(A + t * B.mT).abs().sum()

    t = torch.tensor(0.4, dtype=torch.float64)
    found = float(hodiff.jacobian(f, mode=mode)(t))
    h = 1e-5
    by_numpy = [np.abs(np.linalg.pinv((A + s * B.mT).numpy())).sum() for s in (0.4 - h, 0.4 + h)]
    assert found == pytest.approx((by_numpy[1] - by_numpy[0]) / (2 * h), rel=1e-7)
