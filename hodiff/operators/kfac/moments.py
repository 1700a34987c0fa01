"""Sums over examples and places: Kronecker factors, and second moments of examples' gradients.

Shapes are as in `sources`: a (N, places, groups, q), or (N, places) of rows; g (c, N, places, groups, p).

The vectors a and g of a block, from all calls of its layer, and a comparison with the parameters' gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hodiff.common.chunks import resolve_chunk_size, spans
from hodiff.common.trees import describe
from hodiff.errors import InputError
from hodiff.operators.kfac.blocks import EigenBlock
from hodiff.operators.kfac.kfac_options import REDUCE
from hodiff.operators.kfac.layers import REMEDY, Source
from hodiff.operators.kfac.recorded_layers import Call
from hodiff.operators.kfac.sources import one_hot_counts


def of_inputs(source: Source, a: Tensor | None, sharing: str, used: Tensor | None = None) -> tuple[Tensor | None, int]:
    """Return the sum of $a a^T$ and its number of terms, over used places (N, places) or all; None if a is 1."""
    if a is None:
        return None, 1
    if source.one_hot:
        # The outer product of a unit vector is diagonal.
        rows = a.flatten() if used is None else a[used]
        return torch.bincount(rows[rows >= 0], minlength=source.layout.shape[2])[None], rows.numel()
    if sharing == REDUCE:
        rows = a.mean(1) if used is None else _mean_of_used(a, used)
    else:
        rows = a.flatten(0, 1) if used is None else a[used]
    rows = rows.movedim(1, 0)
    return rows.mT @ rows, rows.shape[1]


def reached_places(g: Tensor, before: Tensor | None = None) -> Tensor:
    """Return a mask (N, places) of nonzero gradients, combined with the mask `before`."""
    reached = (g != 0).flatten(3).any(3).any(0)
    return reached if before is None else reached | before


def ignored_places(counted: Tensor) -> Tensor:
    """Compute which places a loss ignores, (N, ...), from the outputs (N, ...) that count in it."""
    # A dimension along which all outputs count alike holds the numbers of a single place, such as classes.
    for dim in reversed(range(1, counted.dim())):
        if bool((counted == counted.narrow(dim, 0, 1)).all()):
            counted = counted.select(dim, 0)
    return ~counted


def used_places(ignored: Tensor, pulled: Tensor) -> Tensor | None:
    """Return the mask (N, places) of places that count in the loss; None if all or none count.

    Args:
        ignored: Which labels the loss ignores, of any shape.
        pulled: Mask of nonzero gradients g, (N, places).

    Returns:
        All places but those with ignored labels and zero gradients: in an earlier layer, other positions may depend on
        an ignored position.
    """
    n, places = pulled.shape
    if not n or ignored.numel() % n or not bool(ignored.any()):
        return None
    # Labels are in the order of examples, with or without a dimension for them.
    labels = ignored.reshape(n, -1)
    if labels.shape[1] == 0 or places % labels.shape[1]:
        labels = labels.all(1, keepdim=True)
    used = pulled | ~labels.repeat(1, places // labels.shape[1])
    return used if bool(used.any()) and not bool(used.all()) else None


def _mean_of_used(a: Tensor, used: Tensor) -> Tensor:
    """Average inputs over the used places of each example that has any."""
    some = used.any(1)
    weights = used[some].to(a.dtype)
    return torch.einsum("nr,nrgq->ngq", weights / weights.sum(1, keepdim=True), a[some])


def mean_of_inputs(source: Source, total: Tensor | None, count: int, like: Tensor) -> Tensor:
    """Compute the factor A, in the dtype and on the device of B; 1 if inputs are 1."""
    if total is not None:
        return total.to(like.dtype) / count
    groups, _, q = source.layout.shape
    return torch.ones((groups, q, q) if not source.diagonal else (groups, q), dtype=like.dtype, device=like.device)


def of_gradients(source: Source, g: Tensor, sharing: str) -> Tensor:
    """Compute the sum of $g g^T$, or its diagonal."""
    # An embedding's inputs are not averaged: the outer product of a mean of unit vectors has (rows)^2 numbers.
    if sharing == REDUCE and not source.one_hot:
        g = g.sum(2, keepdim=True)
    matrices = g.permute(0, 1, 3, 4, 2)
    if not source.diagonal and matrices.is_contiguous() and g.shape[2] >= g.shape[4]:
        # Gradients with channels before places, as of convolutions, need no copy.
        matrices = matrices.flatten(0, 1)
        return (matrices @ matrices.mT).sum(0)
    rows = g.flatten(0, 2)
    rows = rows.movedim(1, 0)
    return rows.square().sum(1) if source.diagonal else rows.mT @ rows


def summed_gradient(source: Source, a: Tensor | None, g: Tensor) -> Tensor:
    """Compute the gradient of all examples, (c, groups, p, q)."""
    if a is None:
        return g.sum((1, 2))[..., None]
    if source.one_hot:
        kept, places = a >= 0, a[a >= 0]
        return torch.stack([
            one_hot_counts(places, each[kept][:, 0], source.layout.shape[2]).mT[None] for each in g.unbind(0)
        ])
    if a.shape[1] < g.shape[-1]:
        return torch.einsum("cnrgp,nrgq->cgpq", g, a)
    # The gradients of the examples are no larger than their inputs, and need no copy of those.
    return torch.einsum("cnrgp,nrgq->cngpq", g, a).sum(1)


def of_examples(source: Source, basis: EigenBlock, a: Tensor | None, g: Tensor) -> Tensor:
    """Compute the sum of squares of the examples' gradients in a basis, (groups, p, q)."""
    if basis.left is not None:
        g = torch.einsum("cnrgp,gps->cnrgs", g, basis.left)
    if a is None:
        return g.sum(2).square().sum((0, 1))[..., None]
    if source.one_hot:
        return _of_rows(source, a, g)
    if basis.right is not None:
        a = torch.einsum("nrgq,gqs->nrgs", a, basis.right)
    if a.shape[1] == 1:
        return torch.einsum("ngp,ngq->gpq", g.square().sum((0, 2)), a.square().sum(1))
    total = a.new_zeros(source.layout.shape)
    # Blocks of a quarter of the budget: larger ones take new pages from the system each time.
    count = resolve_chunk_size("auto", len(a), 4 * len(g) * total.numel() * total.element_size(), a.device)
    for start, stop in spans(len(a), count):
        each = torch.einsum("cnrgp,nrgq->cngpq", g[:, start:stop], a[start:stop])
        total += each.square_().sum((0, 1))
    return total


def of_products(
    source: Source, a: Tensor | None, g: Tensor, left: Tensor | None, right: Tensor | None
) -> tuple[Tensor, Tensor]:
    r"""Compute $\sum G R G^\top$ and $\sum G^\top L G$ of the examples' gradients G; None is the identity."""
    if source.one_hot:
        assert a is not None
        return _products_of_rows(source, a, g, left, right)
    if a is None:
        # The gradients are vectors (c, N, groups, p), and R is a number for each group.
        g, number = g.sum(2), 1.0 if right is None else right
        squares = (_weighed(g, left) * g).sum((0, 1, 3))
        if source.diagonal:
            return g.square().sum((0, 1)) * number, squares[:, None]
        return _outer(g, g) * number, squares[:, None, None]
    if a.shape[1] == 1:
        a, g = a[:, 0], g[:, :, 0]
        of_a, of_g = (_weighed(a, right) * a).sum(-1, keepdim=True), (_weighed(g, left) * g).sum(-1, keepdim=True)
        return _outer(g * of_a, g), _outer((a * of_g.sum(0))[None], a[None])
    groups, p, q = source.layout.shape
    sums = a.new_zeros(groups, p, p), a.new_zeros(groups, q, q)
    count = resolve_chunk_size("auto", len(a), 8 * len(g) * groups * p * q * a.element_size(), a.device)
    for start, stop in spans(len(a), count):
        each = torch.einsum("cnrgp,nrgq->cnpgq", g[:, start:stop], a[start:stop])
        sums[0].add_(torch.einsum("cnpgq,cnsgq->gps", _weighed(each, right), each))
        each = each.transpose(2, 4)
        sums[1].add_(torch.einsum("cnqgp,cntgp->gqt", _weighed(each, left), each))
    return sums


def _weighed(vectors: Tensor, factor: Tensor | None) -> Tensor:
    """Multiply vectors (..., groups, n) by a factor."""
    if factor is None:
        return vectors
    return vectors * factor if factor.dim() == 2 else torch.einsum("...gp,gps->...gs", vectors, factor)


def _outer(a: Tensor, b: Tensor) -> Tensor:
    """Sum the outer products of vectors (c, N, groups, n)."""
    return torch.einsum("cngp,cngs->gps", a, b)


def _gradients_of_rows(a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients (c, N, places, p) of an embedding's rows, and how often each place repeats its own."""
    same = (a[:, :, None] == a[:, None, :]) & (a >= 0)[:, :, None]
    return torch.einsum("nrs,cnsp->cnrp", same.to(g.dtype), g[:, :, :, 0]), same.sum(2).clamp(min=1)


def _products_of_rows(
    source: Source, a: Tensor, g: Tensor, left: Tensor | None, right: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute `of_products` for an embedding, with the diagonal of the second sum."""
    rows, times = _gradients_of_rows(a, g)
    weights = (a >= 0).to(g.dtype) / times
    squares = (_weighed(rows[:, :, :, None], left)[:, :, :, 0] * rows).sum((0, 3)) * weights
    if right is not None:
        weights = weights * right[0][a.clamp(min=0)]
    kept = a >= 0
    found = one_hot_counts(a[kept], squares[kept][:, None], source.layout.shape[2])
    return torch.einsum("cnrp,nr,cnrs->ps", rows, weights, rows)[None], found.mT


def _of_rows(source: Source, a: Tensor, g: Tensor) -> Tensor:
    """Compute `of_examples` for an embedding, whose gradient has a row for each row that an example picked."""
    rows, times = _gradients_of_rows(a, g)
    # The gradient of a row is repeated at each place that picked the row.
    shared = rows.square().sum(0) / times[..., None]
    return one_hot_counts(a[a >= 0], shared[a >= 0], source.layout.shape[2]).mT[None]


def require_rows(
    caller: str, source: Source, module: nn.Module, calls: Sequence[Call], *, chunks: bool, remedy: str = REMEDY
) -> None:
    """Raise if a layer is called on an input without a dimension for examples, or on none of the examples."""
    for call in calls:
        if call.x.dim() < source.kind.rank(module) or not (call.shape[0] or chunks):
            raise InputError(
                f"{caller}: model: expected layers to take inputs with one or more examples along their first "
                f"dimension, got {describe(call.x)} for {source.layer!r}; call it on all examples together, or "
                f"{remedy}."
            )


def inputs_of(
    caller: str,
    source: Source,
    module: nn.Module,
    calls: Sequence[Call],
    dtype: torch.dtype,
    examples: int | None,
    *,
    chunks: bool = False,
    argument: str = "model",
    remedy: str = f"keep examples in the first dimension and positions in separate dimensions, or {REMEDY}",
) -> Tensor | None:
    """Return inputs a, or None if they are 1; raise if their number of examples differs from `examples`."""
    lengths = {call.shape[0] for call in calls}
    if chunks:
        calls = [call for call in calls if call.shape[0]]
        lengths = {sum(call.shape[0] for call in calls)}
    if (
        len(lengths) > 1
        or (examples is not None and lengths != {examples})
        or any(call.x.dim() < source.kind.rank(module) for call in calls)
    ):
        expected = "examples" if examples is None else f"the {examples} examples"
        raise InputError(
            f"{caller}: {argument}: expected layers to take inputs with {expected} along their first dimension, got "
            f"{describe(calls[0].x)} for {source.layer!r}; {remedy}."
        )
    found = [source.inputs(module, call.x) for call in calls]
    tensors = [each for each in found if each is not None]
    if not tensors:
        return None
    a = _joined(tensors, dim=0 if chunks else 1)
    return a.to(dtype) if a.is_floating_point() else a


def gradients_of(
    source: Source,
    module: nn.Module,
    calls: Sequence[Call],
    found: Sequence[Tensor],
    dtype: torch.dtype,
    *,
    chunks: bool = False,
) -> Tensor:
    """Return gradients g from gradients (c, *shape) of the calls' outputs."""
    pairs = [(call, g) for call, g in zip(calls, found, strict=True) if call.shape[0] or not chunks]
    tensors = [source.gradients(module, call.x, g).to(dtype) for call, g in pairs]
    return _joined(tensors, dim=1 if chunks else 2)


def is_multiple(scaled: Tensor, factors: Tensor, plain: Tensor, eps: float) -> bool:
    """Whether gradients equal other gradients times factors, up to rounding."""
    apart = torch.addcmul(scaled, factors, plain, value=-1)
    return bool(apart.norm() <= eps**0.5 * plain.norm())


def tell_the_gradient(
    source: Source, a: Tensor | None, g: Tensor, true: Tensor, eps: float, found: Tensor | None = None
) -> bool:
    """Whether the vectors add up to the gradient of the parameters, (1, groups, p, q); `found` is their sum."""
    found = summed_gradient(source, a, g) if found is None else found
    # Rounding is relative to the terms of the sum.
    terms = g.norm() * (1.0 if a is None or source.one_hot else a.norm())
    return bool((found - true).norm() <= eps**0.5 * true.norm() + min(100 * eps, 0.02) * terms)


def _joined(tensors: list[Tensor], dim: int) -> Tensor:
    """Join places, or examples, of several calls; a single call is not copied."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim)
