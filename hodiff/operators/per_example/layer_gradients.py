"""Gradients of the examples by the formulas of layers, from the layers' inputs and the gradients of their outputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from hodiff.common.chunks import resolve_chunk_size, spans
from hodiff.errors import InputError
from hodiff.operators.kfac import moments
from hodiff.operators.kfac.blocks import EigenBlock
from hodiff.operators.kfac.columns import Columns, example_factors
from hodiff.operators.kfac.layers import Source
from hodiff.operators.kfac.recorded_layers import Recorded


class LayerGradients:
    r"""Gradients $G_n = \sum_r g_{nr} a_{nr}^\top$ of layers' parameters, with a layer's inputs a and places r.

    `verify` keeps the parameters whose formula holds on this batch: the formula must give the parameter's gradient, and
    the gradients of one example must depend on the cotangent of no other example.

    Args:
        recorded: The model's evaluation, with the calls of the layers.
        model: The module that owns the layers.
        layers: The blocks of `layer_blocks`.
        dtype: Dtype of the results.
        keep_rows: Whether to keep the examples' gradients of the verification for `gradients`.
    """

    def __init__(
        self,
        recorded: Recorded,
        model: nn.Module,
        layers: Mapping[str, list[Source]],
        dtype: torch.dtype,
        *,
        keep_rows: bool = False,
    ):
        self._recorded, self._model, self._dtype = recorded, model, dtype
        self._count = len(recorded.outputs)
        recorded.keep(name for name, calls in recorded.calls.items() if calls and self._count)
        self._sources = {name: layers[name] for name in recorded.calls}
        # A cotangent, and the gradients of the calls' outputs for it.
        self._pulled: tuple[Tensor, dict[str, list[Tensor]]] | None = None
        # The examples' gradients for that cotangent.
        self._rows: dict[Source, Tensor] | None = {} if keep_rows else None

    @property
    def leaves(self) -> list[int]:
        """Indices of the parameters that the formulas cover."""
        return [index_of(source) for sources in self._sources.values() for source in sources]

    def add_squares(
        self, columns: Columns, chunk_size: int | str | None, totals: list[Tensor], *, progress: bool = False
    ) -> None:
        """Add the sum of squared gradients, over examples and columns, to the totals of these leaves."""
        if not self._sources:
            return
        size = self._recorded.chunk_of(chunk_size, len(columns))
        for start, stop in tqdm(list(spans(len(columns), size)), unit=" chunks", disable=not progress):
            found = self._pull(columns.chunk(start, stop))
            rows: list[Tensor | None] = [None] * len(totals)
            for source, a, g in self._vectors(found):
                standard = EigenBlock(source.layout, None, None, g.new_empty(0))
                source.layout.scatter(moments.of_examples(source, standard, a, g)[None], rows)
            for total, row in zip(totals, rows, strict=True):
                if row is not None:
                    total += row.reshape(total.shape)

    def squared_norms(self, cotangent: Tensor) -> Tensor:
        """Compute the squared norms (N,) of the examples' gradients with respect to these leaves."""
        total = torch.zeros(self._count, dtype=self._dtype, device=cotangent.device)
        for source, a, g in self._vectors(self._pull(cotangent[None])):
            total += squared_norms(source, a, g[0])
        return total

    def gradients(self, cotangent: Tensor) -> dict[int, Tensor]:
        """Compute the examples' gradients (N, numbers) with respect to these leaves."""
        rows: list[Tensor | None] = [None] * (1 + max(self.leaves, default=-1))
        if self._rows is not None and self._is_verified(cotangent):
            for source in (each for sources in self._sources.values() for each in sources):
                source.layout.scatter(self._rows[source], rows)
            self._rows = None  # the caller may write into them
        else:
            for source, a, g in self._vectors(self._pull(cotangent[None])):
                source.layout.scatter(_each(source, a, g[0]), rows)
        return {i: row for i, row in enumerate(rows) if row is not None}

    def _pull(self, cotangents: Tensor) -> dict[str, list[Tensor]]:
        """Compute the gradients of the calls' outputs, or return those of the verification."""
        if self._pulled is not None and len(cotangents) == 1 and self._is_verified(cotangents[0]):
            return self._pulled[1]
        return self._recorded.pull(cotangents) if self._sources else {}

    def _is_verified(self, cotangent: Tensor) -> bool:
        """Whether a cotangent is that of the verification."""
        return self._pulled is not None and torch.equal(self._pulled[0], cotangent)

    def _vectors(self, found: Mapping[str, Sequence[Tensor]]) -> Iterator[tuple[Source, Tensor | None, Tensor]]:
        """Yield the vectors a and g of each block, one block after another, because patches of images are large."""
        for sources in self._sources.values():
            for source in sources:
                yield source, *self._vectors_of(source, found[source.layer])

    def _vectors_of(self, source: Source, found: Sequence[Tensor]) -> tuple[Tensor | None, Tensor]:
        module, calls = self._model.get_submodule(source.layer), self._recorded.calls[source.layer]
        chunks = source.layer in self._recorded.on_chunks
        inputs = partial(moments.inputs_of, "", source, module, calls, self._dtype, self._count, chunks=chunks)
        return self._recorded.inputs_once(source, inputs), self._gradients_of(source, found)

    def _gradients_of(self, source: Source, found: Sequence[Tensor]) -> Tensor:
        module, calls = self._model.get_submodule(source.layer), self._recorded.calls[source.layer]
        chunks = source.layer in self._recorded.on_chunks
        return moments.gradients_of(source, module, calls, found, self._dtype, chunks=chunks)

    def verify(self, cotangent: Tensor) -> None:
        """Drop the parameters whose formula does not hold for a cotangent."""
        if not self._sources:
            return
        outputs = self._recorded.outputs
        factors = example_factors(outputs)
        found, pulled = self._recorded.pull_all(cotangent, self.leaves)
        other = self._recorded.pull((factors * cotangent)[None])
        true = dict(zip(self.leaves, pulled, strict=True))
        eps = self._recorded.rounding
        verified: dict[str, list[Source]] = {}
        for name, sources in self._sources.items():
            apart: bool | None = None
            for source in sources:
                try:
                    a, g = self._vectors_of(source, found[name])
                    # Weight and bias have the same vectors g, except for norms.
                    if apart is None or source.per_example:
                        apart = self._keeps_apart(g[0], self._gradients_of(source, other[name])[0], factors, eps)
                except InputError:  # the calls do not have the examples along their first dimension
                    break
                if apart and self._tells(source, a, g, true, eps):
                    verified.setdefault(name, []).append(source)
        self._sources = verified
        self._recorded.keep(verified)
        self._pulled = cotangent, {name: found[name] for name in verified}

    def _keeps_apart(self, plain: Tensor, scaled: Tensor, factors: Tensor, eps: float) -> bool:
        """Whether gradients of one example scale with the cotangent of that example alone."""
        factors = factors.to(plain).reshape(-1, 1, 1, 1)
        return len(plain) == self._count and moments.is_multiple(scaled, factors, plain, eps)

    def _tells(self, source: Source, a: Tensor | None, g: Tensor, true: Mapping[int, Tensor], eps: float) -> bool:
        """Whether the formula gives the gradient of a parameter."""
        index = index_of(source)
        gradient = source.layout.gather([true[index].to(self._dtype)] * (index + 1), 1)
        if self._rows is None:
            return moments.tell_the_gradient(source, a, g, gradient, eps)
        rows = self._rows[source] = _each(source, a, g[0])
        return moments.tell_the_gradient(source, a, g, gradient, eps, rows.sum(0)[None])


def random_cotangent(outputs: Tensor) -> Tensor:
    """Return a random cotangent of the outputs, the same in each call."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(outputs.shape, generator=generator, device=generator.device).to(outputs)


def index_of(source: Source) -> int:
    """Return the leaf of a block with one parameter."""
    return source.layout.pieces[0].index


def squared_norms(source: Source, a: Tensor | None, g: Tensor) -> Tensor:
    r"""Compute $\|\sum_r g_{nr} a_{nr}^\top\|^2 = \sum_{r,s} (g_{nr} \cdot g_{ns}) (a_{nr} \cdot a_{ns})$, (N,).

    Args:
        source: The block.
        a: Inputs, (N, places, groups, q), or row indices (N, places); None if they are 1.
        g: Gradients of outputs, (N, places, groups, p).

    Returns:
        The squared norms, by inner products of places or by the gradients, whichever takes fewer multiplications.
    """
    if a is None:
        return g.sum(1).square().sum((1, 2))
    if source.one_hot:
        same = (a[:, :, None] == a[:, None, :]) & (a >= 0)[:, :, None]
        return torch.einsum("nrs,nrgp,nsgp->n", same.to(g.dtype), g, g)
    places, (_, p, q) = a.shape[1], source.layout.shape
    if places == 1:
        return (g.square().sum(3) * a.square().sum(3)).sum((1, 2))
    by_places = places * (p + q) < p * q
    numbers = a.shape[2] * (places * places if by_places else p * q)
    size = resolve_chunk_size("auto", len(a), 2 * numbers * a.element_size(), a.device)
    parts = []
    for start, stop in spans(len(a), size):
        some, its = a[start:stop], g[start:stop]
        if by_places:
            products = torch.einsum("nrgq,nsgq->ngrs", some, some) * torch.einsum("nrgp,nsgp->ngrs", its, its)
            parts.append(products.sum((1, 2, 3)))
        else:
            parts.append(torch.einsum("nrgp,nrgq->ngpq", its, some).square().sum((1, 2, 3)))
    return torch.cat(parts)


def _each(source: Source, a: Tensor | None, g: Tensor) -> Tensor:
    """Compute the gradients of the examples, (N, groups, p, q)."""
    if a is None:
        return g.sum(1)[..., None]
    if source.one_hot:
        one = [moments.summed_gradient(source, a[n : n + 1], g[None, n : n + 1])[0] for n in range(len(a))]
        return torch.stack(one)
    return torch.einsum("nrgp,nrgq->ngpq", g, a)
