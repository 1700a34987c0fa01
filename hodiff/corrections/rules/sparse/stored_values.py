"""Conversion of values to a sparse tensor and back: linear maps, adjoint to each other."""

from __future__ import annotations

from itertools import accumulate
from operator import mul
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from hodiff.rules.any_order import AnyOrderFunction

SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


class _WithoutForwardMode(AnyOrderFunction):
    """Base of functions of sparse tensors, for which torch has no forward rules."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        raise NotImplementedError("torch has no forward mode for sparse tensors")


class FromValues(_WithoutForwardMode):
    """A sparse tensor with given values at given indices, where repeated indices add up: linear in the values."""

    @staticmethod
    def forward(values: Tensor, indices: Tensor, size: Any, options: dict[str, Any]) -> Tensor:
        """Construct the tensor by torch's constructor."""
        return torch.sparse_coo_tensor(indices, values, size, **options)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keep the indices."""
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor | None) -> Any:
        """Read the cotangent at the indices."""
        (indices,) = ctx.saved_tensors
        return None if cotangent is None else values_at(cotangent, indices), None, None, None


class _ValuesAt(_WithoutForwardMode):
    """Values of a sparse tensor at indices of any order; zero where it has none."""

    @staticmethod
    def forward(sparse: Tensor, indices: Tensor) -> Tensor:
        if sparse.layout != torch.sparse_coo:
            sparse = sparse.to_sparse()
        sparse = sparse.coalesce()
        held, values = sparse.indices(), sparse.values()
        if not held.shape[1]:
            return values.new_zeros((indices.shape[1], *values.shape[1:]))
        keys = _numbers(held, sparse.shape)
        wanted = _numbers(indices, sparse.shape)
        places = torch.searchsorted(keys, wanted).clamp_(max=len(keys) - 1)
        found = keys[places] == wanted
        return torch.where(found.view(-1, *(1,) * (values.dim() - 1)), values[places], 0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        sparse, indices = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(indices)
        ctx.form = form_of(sparse)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor | None) -> Any:
        """Return a tensor of the same form, with the cotangent as values."""
        (indices,) = ctx.saved_tensors
        return None if cotangent is None else made_of(cotangent, indices, ctx.form), None


class _Linear(_WithoutForwardMode):
    """Base of functions that read the values of one sparse tensor: the gradient has values in the same places."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        (sparse,) = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(indices_of(sparse))
        ctx.form = form_of(sparse)


class Values(_Linear):
    """The values of a sparse tensor, in their order."""

    @staticmethod
    def forward(sparse: Tensor) -> Tensor:
        """Return the values, which share the memory of the tensor, as torch's do."""
        return sparse.values()

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor | None) -> Any:
        """Return a tensor of the same form, with the cotangent as values."""
        (indices,) = ctx.saved_tensors
        return None if cotangent is None else made_of(cotangent, indices, ctx.form)


class ToDense(_Linear):
    """Conversion of a sparse tensor to a dense one."""

    @staticmethod
    def forward(sparse: Tensor) -> Tensor:
        """Convert by torch's method."""
        return sparse.to_dense()

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor | None) -> Any:
        """Return the cotangent at the places of the values, as a sparse tensor."""
        (indices,) = ctx.saved_tensors
        return None if cotangent is None else made_of(values_at(cotangent, indices), indices, ctx.form)


class Form(NamedTuple):
    """Size, layout and block size of a sparse tensor."""

    size: torch.Size
    layout: torch.layout
    blocksize: tuple[int, ...] | None


def form_of(sparse: Tensor) -> Form:
    """Return the form of a sparse tensor."""
    blocks = sparse.layout in (torch.sparse_bsr, torch.sparse_bsc)
    return Form(sparse.shape, sparse.layout, tuple(sparse.values().shape[1:3]) if blocks else None)


def is_one_matrix(sparse: Tensor) -> bool:
    """Whether the rules support a sparse tensor: COO, or one compressed matrix of numbers or blocks."""
    if sparse.layout == torch.sparse_coo:
        return True
    blocks = sparse.layout in (torch.sparse_bsr, torch.sparse_bsc)
    return sparse.dim() == 2 and sparse.values().dim() == (3 if blocks else 1)


def made_of(values: Tensor, indices: Tensor, form: Form, **options: Any) -> Tensor:
    """Construct a sparse tensor of a form from values, one for each index."""
    if form.blocksize is not None:
        values = values.flatten()
    coo: Tensor = FromValues.call(values, indices, form.size, options)
    return coo if form.layout == torch.sparse_coo else coo.to_sparse(layout=form.layout, blocksize=form.blocksize)


def values_at(tensor: Tensor, indices: Tensor) -> Tensor:
    """Return the elements of a dense or a sparse tensor at indices (d, k)."""
    if tensor.layout == torch.strided:
        return tensor[tuple(indices)]
    values: Tensor = _ValuesAt.call(tensor, indices)
    return values


def indices_of(sparse: Tensor) -> Tensor:
    """Return the indices (d, k) of a sparse tensor's values, in their order; of all elements of its blocks."""
    if sparse.layout == torch.sparse_coo:
        return sparse.indices()
    by_rows = sparse.layout in (torch.sparse_csr, torch.sparse_bsr)
    ends, plain = (
        (sparse.crow_indices(), sparse.col_indices()) if by_rows else (sparse.ccol_indices(), sparse.row_indices())
    )
    compressed = torch.repeat_interleave(ends.diff().long())
    indices = torch.stack((compressed, plain) if by_rows else (plain, compressed))
    if (blocksize := form_of(sparse).blocksize) is None:
        return indices
    height, width = blocksize
    down = torch.arange(height, device=ends.device).repeat_interleave(width)
    across = torch.arange(width, device=ends.device).repeat(height)
    corners = indices * torch.tensor([[height], [width]], device=ends.device)
    return (corners[:, :, None] + torch.stack((down, across))[:, None]).flatten(1)


def _numbers(indices: Tensor, size: torch.Size) -> Tensor:
    """Convert indices (d, k) to row-major numbers."""
    sizes = size[1 : indices.shape[0]]
    steps = [*accumulate(reversed(sizes), initial=1, func=mul)][::-1]
    return (indices * torch.tensor(steps, device=indices.device)[:, None]).sum(0)
