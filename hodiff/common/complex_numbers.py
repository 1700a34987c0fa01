"""Conversion of complex tensors to real and imaginary parts, by which real functions are differentiated.

The gradient of a real function f of z = a + ib is df/da + i df/db, as in `torch.autograd` (`jax.grad` returns its
conjugate). Hessian-vector products are computed in (a, b) and combined in the same way.
"""

from __future__ import annotations

import torch
from torch import Tensor


def as_real(tensor: Tensor) -> Tensor:
    """Return a complex tensor as a real one with a last dimension of 2; return a real tensor unchanged."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def as_complex(tensor: Tensor, joined: bool) -> Tensor:
    """Invert `as_real` if `joined`; return the tensor unchanged otherwise."""
    if not joined:
        return tensor
    tensor = tensor.contiguous()
    # A contiguous tensor may have any stride in a dimension of size 1.
    if any(stride % 2 for stride in tensor.stride()[:-1]) or tensor.storage_offset() % 2:
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    return torch.view_as_complex(tensor)


def equal_with_nan(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and elements, where NaN equals NaN."""
    a, b = as_real(a.detach()), as_real(b.detach())
    return a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
