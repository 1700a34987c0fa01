"""Changes that turn a call into a special case that tests often omit.

Formulas fail at special arguments: zeros and ties, one of two broadcast arguments, views. A change returns the changed
sample, or None if it does not apply.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from hodiff.checks.mutations.sample import Layout, Sample

Change = Callable[[Sample, int, random.Random], Sample | None]


def value_change(change: Callable[[Tensor, random.Random], Tensor | None]) -> Change:
    """Return a change of one differentiated tensor's numbers."""

    def apply(sample: Sample, place: int, draw: random.Random) -> Sample | None:
        x = sample.leaves[place]
        if place not in sample.places or not x.numel():
            return None
        changed = change(x, draw)
        return None if changed is None else _with_leaf(sample, place, changed)

    return apply


def _with_leaf(sample: Sample, place: int, leaf: Any) -> Sample:
    leaves = list(sample.leaves)
    leaves[place] = leaf
    return replace(sample, leaves=tuple(leaves))


def _one_zero(x: Tensor, draw: random.Random) -> Tensor:
    return set_element(x, draw.randrange(x.numel()), 0.0)


def set_element(x: Tensor, index: int, value: float) -> Tensor:
    """Return a copy with another number at one index."""
    flat = x.flatten().clone()
    flat[index] = value
    return flat.view(x.shape)


def _zero_slice(x: Tensor, draw: random.Random) -> Tensor | None:
    if not x.ndim:
        return None
    changed, dim = x.clone(), draw.randrange(x.ndim)
    changed.select(dim, draw.randrange(x.shape[dim])).zero_()
    return changed


def _tie(x: Tensor, draw: random.Random) -> Tensor | None:
    if x.numel() < 2:
        return None
    source, target = draw.sample(range(x.numel()), 2)
    return set_element(x, target, float(x.flatten()[source]))


def _equal_slices(x: Tensor, draw: random.Random) -> Tensor | None:
    dims = [dim for dim in range(x.ndim) if x.shape[dim] > 1]
    if not dims:
        return None
    changed, dim = x.clone(), draw.choice(dims)
    source, target = draw.sample(range(x.shape[dim]), 2)
    changed.select(dim, target).copy_(x.select(dim, source))
    return changed


def _one_huge(x: Tensor, draw: random.Random) -> Tensor:
    index = draw.randrange(x.numel())
    return set_element(x, index, 1e6 * float(x.flatten()[index]))


def _has_spectrum(x: Tensor) -> bool:
    return x.ndim >= 2 and x.shape[-1] == x.shape[-2] > 1 and bool(x.isfinite().all())


def _near_singular(x: Tensor, _: random.Random) -> Tensor | None:
    if not _has_spectrum(x):
        return None
    U, S, Vh = torch.linalg.svd(x)
    S[..., -1] = 1e-3 * S[..., 0]
    return (U * S.unsqueeze(-2)) @ Vh


def _close_eigenvalues(x: Tensor, _: random.Random) -> Tensor | None:
    if not _has_spectrum(x):
        return None
    values, vectors = torch.linalg.eigh((x + x.mT) / 2)
    values[..., 1] = values[..., 0] + 1e-2 * (1 + values[..., 0].abs())
    return (vectors * values.unsqueeze(-2)) @ vectors.mT


def _repeated_index(sample: Sample, place: int, draw: random.Random) -> Sample | None:
    x = sample.leaves[place]
    if not _is_integer(x) or x.numel() < 2:
        return None
    source, target = draw.sample(range(x.numel()), 2)
    flat = x.flatten().clone()
    flat[target] = flat[source]
    return _with_leaf(sample, place, flat.view(x.shape))


def _is_integer(x: Any) -> bool:
    return isinstance(x, Tensor) and not x.is_floating_point() and not x.is_complex() and x.dtype != torch.bool


def _batched(sample: Sample, place: int, draw: random.Random) -> Sample | None:
    """Stack two copies of one argument; the second copy of a floating tensor is perturbed."""
    x = sample.leaves[place]
    if not isinstance(x, Tensor) or x.layout != torch.strided:
        return None
    if not x.is_floating_point():
        return _with_leaf(sample, place, torch.stack([x, x]))
    generator = torch.Generator().manual_seed(draw.randrange(2**31))
    return _with_leaf(sample, place, torch.stack([x, x * (1 + 0.2 * torch.rand(x.shape, generator=generator))]))


def _narrowed(size: int) -> Change:
    """Return a change that narrows one dimension of one argument to a size."""

    def apply(sample: Sample, place: int, draw: random.Random) -> Sample | None:
        x = sample.leaves[place]
        if not isinstance(x, Tensor) or x.layout != torch.strided:
            return None
        dims = [dim for dim in range(x.ndim) if x.shape[dim] > size]
        return _with_leaf(sample, place, x.narrow(draw.choice(dims), 0, size).clone()) if dims else None

    return apply


def _narrowed_everywhere(size: int) -> Change:
    """Return a change that narrows all dimensions of one size, in all arguments, to another size."""

    def apply(sample: Sample, place: int, draw: random.Random) -> Sample | None:
        x = sample.leaves[place]
        sizes = [n for n in x.shape if n > size] if isinstance(x, Tensor) else []
        return cut(sample, draw.choice(sizes), size) if sizes else None

    return apply


def cut(sample: Sample, old: int, new: int, *, last: bool = False) -> Sample:
    """Return the sample with all dimensions of one size cut to another size, which torch may refuse."""
    kept = slice(old - new, old) if last else slice(new)
    return replace(sample, leaves=tuple(_cut(leaf, old, kept) for leaf in sample.leaves))


def _cut(leaf: Any, old: int, kept: slice) -> Any:
    if not isinstance(leaf, Tensor) or leaf.layout != torch.strided:
        return leaf
    return leaf[tuple(kept if n == old else slice(None) for n in leaf.shape)].clone()


def _laid_out(layout: Callable[[Tensor], Layout | None]) -> Change:
    """Return a change of the memory layout of one differentiated tensor."""

    def apply(sample: Sample, place: int, _: random.Random) -> Sample | None:
        if place not in sample.places:
            return None
        found = layout(sample.leaves[place])
        return None if found is None else replace(sample, layouts={**sample.layouts, place: found})

    return apply


def _transposed(x: Tensor) -> Layout | None:
    return Layout(lambda x: x.mT.contiguous().mT, "{0}.mT.contiguous().mT") if x.ndim >= 2 else None


def _sliced(x: Tensor) -> Layout | None:
    return Layout(lambda x: torch.stack([x, x], -1)[..., 0], "torch.stack([{0}, {0}], -1)[..., 0]")


def _channels_last(x: Tensor) -> Layout | None:
    if x.ndim != 4:
        return None
    source = "{0}.contiguous(memory_format=torch.channels_last)"
    return Layout(lambda x: x.contiguous(memory_format=torch.channels_last), source)


def _expanded(sample: Sample, place: int, draw: random.Random) -> Sample | None:
    """Expand one row of a tensor along a dimension, without copies."""
    x = sample.leaves[place]
    dims = [dim for dim in range(x.ndim) if x.shape[dim] > 1] if place in sample.places else []
    if not dims:
        return None
    shape = tuple(x.shape)
    one = x.narrow(draw.choice(dims), 0, 1).clone()
    layout = Layout(lambda x: x.expand(shape), f"{{0}}.expand({shape})")
    return replace(_with_leaf(sample, place, one), layouts={**sample.layouts, place: layout})


def _number(sample: Sample, place: int, draw: random.Random) -> Sample | None:
    """Change a number or switch among the options."""
    leaf = sample.leaves[place]
    if isinstance(leaf, bool):
        return _with_leaf(sample, place, not leaf)
    if isinstance(leaf, float):
        return _with_leaf(sample, place, draw.choice((0.0, 0.5, 1.0, 2.0, 3.0, -1.0)))
    return _with_leaf(sample, place, draw.choice((0, 1, 2, 3, -1, -2))) if isinstance(leaf, int) else None


def _keywords(sample: Sample, place: int, _: random.Random) -> Sample | None:
    """Pass all arguments but the first by keyword."""
    if place or not sample.parameters:
        return None
    numbered = tree_unflatten(list(range(len(sample.leaves))), sample.structure)
    first, args, kwargs = numbered
    names = sample.parameters[1 : 1 + len(args)]
    if not args or len(names) < len(args) or set(names) & set(kwargs):
        return None
    order, structure = tree_flatten((first, (), {**dict(zip(names, args, strict=True)), **kwargs}))
    return replace(
        sample,
        leaves=tuple(sample.leaves[i] for i in order),
        structure=structure,
        places=tuple(sorted(order.index(i) for i in sample.places)),
        layouts={order.index(i): layout for i, layout in sample.layouts.items()},
    )


def _single(sample: Sample, place: int, _: random.Random) -> Sample | None:
    """Convert all float64 tensors to float32."""
    if place:
        return None
    return replace(sample, leaves=tuple(_to_single(leaf) for leaf in sample.leaves))


def _to_single(leaf: Any) -> Any:
    return leaf.float() if isinstance(leaf, Tensor) and leaf.dtype == torch.float64 else leaf


CHANGES: dict[str, Change] = {
    "as it is": lambda sample, place, _: None if place else sample,
    "batched": _batched,
    "size 1": _narrowed(1),
    "size 1 everywhere": _narrowed_everywhere(1),
    "empty": _narrowed(0),
    "empty everywhere": _narrowed_everywhere(0),
    "a zero": value_change(_one_zero),
    "zeros": value_change(lambda x, _: torch.zeros_like(x)),
    "a slice of zeros": value_change(_zero_slice),
    "a tie": value_change(_tie),
    "equal slices": value_change(_equal_slices),
    "constant": value_change(lambda x, _: torch.full_like(x, float(x.flatten()[0]))),
    "integers": value_change(lambda x, _: x.round()),
    "negative": value_change(lambda x, _: -x),
    "large": value_change(lambda x, _: 1e4 * x),
    "small": value_change(lambda x, _: 1e-4 * x),
    "one huge": value_change(_one_huge),
    "subnormal": value_change(lambda x, _: 1e-310 * x),
    "near singular": value_change(_near_singular),
    "close eigenvalues": value_change(_close_eigenvalues),
    "a repeated index": _repeated_index,
    "transposed": _laid_out(_transposed),
    "sliced": _laid_out(_sliced),
    "channels last": _laid_out(_channels_last),
    "expanded": _expanded,
    "another option": _number,
    "keywords": _keywords,
    "float32": _single,
}


def changed(sample: Sample, seed: int) -> Iterator[tuple[str, Sample]]:
    """Yield all changes that apply to a sample of the database, in random order, with their names."""
    draw = random.Random(seed)
    pairs = [(name, place) for name in CHANGES for place in range(len(sample.leaves))]
    for name, place in draw.sample(pairs, len(pairs)):
        found = CHANGES[name](sample, place, draw)
        if found is not None:
            yield name, found
