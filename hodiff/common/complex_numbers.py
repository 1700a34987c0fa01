"""Complex numbers by their real and imaginary parts, which are what a real function is differentiated by.

The gradient of a real function f of z = a + ib is df/da + i df/db, as `torch.autograd` has it (`jax.grad` has its
conjugate); products with a Hessian are those in (a, b), put together in the same way.
"""

from __future__ import annotations

import torch
from torch import Tensor


def as_real(tensor: Tensor) -> Tensor:
    """A complex tensor as one of pairs, its last dimension of two; any other as it is."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def as_complex(tensor: Tensor, joined: bool) -> Tensor:
    """The inverse, where the pairs are to be joined."""
    if not joined:
        return tensor
    tensor = tensor.contiguous()
    # Of a dimension of one, a contiguous tensor may have any stride.
    if any(stride % 2 for stride in tensor.stride()[:-1]) or tensor.storage_offset() % 2:
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    return torch.view_as_complex(tensor)


def equal_with_nan(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same numbers, NaN equal to itself."""
    return torch.equal(as_real(a.detach()).nan_to_num(), as_real(b.detach()).nan_to_num())
