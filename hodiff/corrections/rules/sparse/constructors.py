"""Rules for constructing sparse tensors and for reading their values."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hodiff.corrections.mechanism.declining import INVALID, UNNEEDED, unable
from hodiff.corrections.mechanism.registry import register
from hodiff.corrections.rules.sparse.stored_values import (
    SPARSE,
    FromValues,
    ToDense,
    Values,
    form_of,
    indices_of,
    is_one_matrix,
    made_of,
    values_at,
)
from hodiff.routes import ROUTES
from hodiff.torch_internals.autograd.differentiation import may_be_differentiated
from hodiff.torch_internals.autograd.wrapped_tensors import below_derivatives
from hodiff.torch_internals.operators import sparse_sum

_wrong = partial(register, routes=ROUTES[:1], reference="a gather, whose adjoint is the same constructor")


def _are_differentiated(values: Any, options: dict[str, Any]) -> bool:
    # A compiler leaves sparse tensors to eager torch.
    return (
        isinstance(values, Tensor)
        and (values.is_floating_point() or values.is_complex())
        and not options.get("requires_grad")
        and not torch.compiler.is_compiling()
        and may_be_differentiated((values,))
    )


@_wrong(torch.sparse_coo_tensor, reason="second derivatives treat the gradient of the values as a constant")
def _sparse_coo_tensor(indices: Any, values: Any = None, size: Any = None, **options: Any) -> Any:
    if not _are_differentiated(values, options):
        return UNNEEDED
    values = values.to(options.get("device") or values.device, options.pop("dtype", None) or values.dtype)
    if not isinstance(indices, Tensor):
        indices = torch.tensor(indices, device=values.device)
    if size is None:  # torch reads it off the indices, which it cannot do inside a transform
        reach = below_derivatives(indices.amax(1) + 1).tolist() if indices.numel() else [0] * len(indices)
        size = (*reach, *values.shape[1:])
    return FromValues.call(values, indices, size, options)


def _compressed(constructor: Callable[..., Tensor], *args: Any, **options: Any) -> Any:
    """Construct a compressed sparse tensor by way of a COO tensor."""
    values: Any = args[2] if len(args) > 2 else options.get("values")
    if not _are_differentiated(values, options):
        return UNNEEDED
    constants = [each.detach() if each is values else each for each in args]
    constant = constructor(*constants, **options | ({"values": values.detach()} if "values" in options else {}))
    if not is_one_matrix(constant):
        return unable("it is a batch of sparse matrices, or has dense dimensions")
    return made_of(values.to(constant.device, constant.dtype), indices_of(constant), form_of(constant))


for _constructor in (
    torch.sparse_compressed_tensor,
    torch.sparse_csr_tensor,
    torch.sparse_csc_tensor,
    torch.sparse_bsr_tensor,
    torch.sparse_bsc_tensor,
):
    _wrong(_constructor, reason="the second derivative raises, or is zero")(partial(_compressed, _constructor))


_missing = partial(
    register,
    kind="missing",
    routes=ROUTES[:1],
    reference="gathers of the values",
)


def _is_sparse(tensor: Any) -> bool:
    return (
        isinstance(tensor, Tensor)
        and tensor.layout in SPARSE
        and is_one_matrix(tensor)
        and not torch.compiler.is_compiling()
        and may_be_differentiated((tensor,))
    )


@_wrong(torch.Tensor.values, reason="second or third derivatives treat the gradient as a constant")
def _values(self: Tensor) -> Any:
    if not _is_sparse(self):
        return UNNEEDED
    return Values.call(self) if self.layout != torch.sparse_coo or self.is_coalesced() else INVALID


@_missing(torch.Tensor.to_dense, reason="the third derivative raises")
def _to_dense(self: Tensor, dtype: Any = None, *, masked_grad: bool | None = None) -> Any:
    if not _is_sparse(self) or masked_grad is False:
        return UNNEEDED
    dense: Tensor = ToDense.call(self.coalesce() if self.layout == torch.sparse_coo else self)
    return dense if dtype is None else dense.to(dtype)


@_missing(torch.Tensor.sparse_mask, reason="the second derivative raises")
def _sparse_mask(self: Tensor, mask: Tensor) -> Any:
    if not isinstance(mask, Tensor) or mask.layout not in SPARSE or self.shape != mask.shape:
        return INVALID
    if not may_be_differentiated((self,)) or torch.compiler.is_compiling():
        return UNNEEDED
    if not is_one_matrix(mask) or (self.layout in SPARSE and not is_one_matrix(self)):
        return unable("it is a batch of sparse matrices, or has dense dimensions")
    mask = mask.coalesce() if mask.layout == torch.sparse_coo else mask
    indices = indices_of(mask)
    return made_of(values_at(self, indices), indices, form_of(mask))


@_wrong(
    sparse_sum,
    name="torch.sparse.sum",
    reason="the third derivative is wrong; for sums along a dimension it raises an error",
)
def _sum(input: Any, *args: Any, **options: Any) -> Any:
    if args or options or not _is_sparse(input):
        return UNNEEDED
    return Values.call(input.coalesce() if input.layout == torch.sparse_coo else input).sum()
