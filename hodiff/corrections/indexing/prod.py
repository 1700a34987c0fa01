"""Rules for products of all elements and for powers in a row, where torch's rules count zeros or divide by them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from hodiff.corrections.declining import INVALID, UNNEEDED
from hodiff.corrections.indexing.cumulative import scan_of_products
from hodiff.corrections.linalg.factored import DTYPES
from hodiff.corrections.registry import register
from hodiff.routes import FORWARD_INSIDE, ROUTES
from hodiff.torch_internals.wrapped_tensors import below_transforms


@register(
    torch.prod,
    Tensor.prod,
    name="torch.prod",
    routes=ROUTES[1:],
    reason="the rules for two and more zeros have no right third derivative",
    reference="a tree of products",
)
def _prod(input: Tensor, dim: int | None = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    x = input if dtype is None else input.to(dtype)
    if not (x.is_floating_point() or x.is_complex()) or not _may_have_zeros(x):
        return UNNEEDED
    # Kernels for 16 bits accumulate in more.
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    product = _tree(wide.flatten() if dim is None else wide.movedim(dim, -1)).to(x.dtype)
    return product.unsqueeze(dim) if dim is not None and keepdim else product


def _may_have_zeros(x: Tensor) -> bool:
    """Whether a factor is 0, as far as the numbers can be looked at: without zeros torch is right."""
    if torch.compiler.is_compiling():
        return True
    plain = below_transforms(x)
    return type(plain) not in (Tensor, Parameter) or plain.is_meta or not plain.detach().all()


def _tree(x: Tensor) -> Tensor:
    """The product of the last dimension, half with half."""
    if x.shape[-1] < 2:  # what is changed in place afterwards must not be the input
        return x.sum(-1) if x.shape[-1] else x.new_ones(x.shape[:-1])
    while (n := x.shape[-1]) > 1:
        half = n // 2
        product = x[..., :half] * x[..., half : 2 * half]
        x = torch.cat([product, x[..., 2 * half :]], -1) if n % 2 else product
    return x.squeeze(-1)


_SOURCE = "torch.cumprod"


@register(
    torch.linalg.vander,
    routes=FORWARD_INSIDE,
    reason="it is a cumulative product, whose forward rule divides by the factors",
    reference=_SOURCE,
)
def _linalg_vander(x: Tensor, *, N: int | None = None) -> Any:
    if x.dtype not in DTYPES:
        return UNNEEDED
    columns = x.shape[-1] if N is None and x.dim() else N
    if columns is None or columns < 2:
        return INVALID
    return _powers(x, columns)


@register(
    torch.vander,
    routes=ROUTES,
    reason="it is a cumulative product written into its factors, which backward then misses",
    reference=_SOURCE,
)
def _vander(x: Tensor, N: int | None = None, increasing: bool = False) -> Any:
    if x.dim() != 1 or (N is not None and N < 0):
        return INVALID
    if x.dtype not in DTYPES:
        return UNNEEDED
    powers = _powers(x, len(x) if N is None else N)
    return powers if increasing else powers.flip(-1)


def _powers(x: Tensor, columns: int) -> Tensor:
    """The powers 0, 1, ... of each number."""
    x = x.unsqueeze(-1)
    powers = torch.ones_like(x)
    if columns > 1:
        powers = torch.cat([powers, scan_of_products(x.expand(*x.shape[:-1], columns - 1))], -1)
    return powers[..., :columns]
