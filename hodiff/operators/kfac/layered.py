"""Operators of a model's layers: their point, their blocks, and their passes over the data."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hodiff.common.chunks import spans
from hodiff.common.module_state import untouched
from hodiff.common.randomness import RandomState
from hodiff.common.trees import PyTree, dense, flatten_primals, recordable
from hodiff.derivatives.bound_function import BoundFunction, bind
from hodiff.errors import InputError
from hodiff.operators.data.batches import Batch, Batches, Size
from hodiff.operators.data.determinism import Checked, require_deterministic
from hodiff.operators.data.watched_point import Point
from hodiff.operators.kfac.blocks import Block
from hodiff.operators.kfac.columns import Loss
from hodiff.operators.kfac.coupled_rows import coupled_blocks
from hodiff.operators.kfac.factored import FactoredOperator
from hodiff.operators.kfac.kfac_options import REDUCE
from hodiff.operators.kfac.layers import REMEDY, Source
from hodiff.operators.kfac.moments import gradients_of, inputs_of, require_rows, tell_the_gradient
from hodiff.operators.kfac.recorded_layers import Recorded
from hodiff.operators.kfac.sharded_blocks import JointFactors
from hodiff.operators.linear.constant_points import require_constant
from hodiff.operators.linear.conversion import Conversion, converted_data, require_no_group
from hodiff.operators.linear.spaces import Space
from hodiff.operators.linearized.model_loss import module_call, pair
from hodiff.torch_internals.threads import one_thread_at_a_time

A = TypeVar("A", bound="LayeredOperator")


class LayeredOperator(FactoredOperator):
    """A factored operator whose blocks are computed, on first use, from layers' inputs and output gradients."""

    model: nn.Module
    loss: Callable[..., Tensor]
    args: Any
    batches: Batches
    sharing: str
    chunk_size: int | str | None
    check: bool
    correct: bool
    _joint: JointFactors
    _loss: Loss
    _sources: dict[str, list[Source]]
    _blocks: tuple[Block, ...] | None
    # Whether the blocks come from one evaluation of each batch, so that a model may be known as deterministic.
    evaluates_once = False

    @abstractmethod
    def _compute(self) -> tuple[Block, ...]:
        """Compute the blocks."""

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks, computed on first use."""
        self._require_unchanged()
        # Hooks of the model record its layers for one thread at a time.
        with one_thread_at_a_time():
            if self._blocks is None:
                self._blocks = self._compute()
            return self._blocks

    def _require_portable(self) -> None:
        self.domain.require_whole("copy", "a new operator")
        require_no_group(type(self).__name__, self._joint.group)
        super()._require_portable()

    @property
    def x(self) -> PyTree:
        """The point of the operator."""
        return self.domain.tree_of(self.point.leaves)

    def at(self: A, x: PyTree) -> A:
        """Return the operator at another point.

        Args:
            x: The point, with the structure, shapes, dtypes and devices of the old point.

        Returns:
            A new operator.

        Raises:
            InputError: If `x` has another form.
        """
        caller = f"{type(self).__name__}.at"
        require_constant(caller, x)
        leaves, _ = flatten_primals(x, caller, "x")
        space = Space.of(x, sharded_too=True)
        if not self.domain.same(space):
            raise InputError(
                f"{caller}: x: expected the structure, shapes, dtypes and devices of the first point, "
                f"{self.domain.size} numbers, got {space.size}; create a new operator for other parameters."
            )
        other = copy.copy(self)
        other.relocate(leaves, self.domain)
        return other

    def converted(self, conversion: Conversion) -> Any:
        """See `LinearOperator.to`."""
        self._require_portable()
        other = copy.copy(self)
        other.model = conversion.module(self.model)
        other.args = conversion.tree(self.args)
        other.batches = self.batches.over(converted_data(self.batches.data, conversion))
        other.relocate(list(map(conversion, self.point.leaves)), conversion.space(self.domain))
        return other

    def relocate(self, leaves: Sequence[Tensor], space: Space) -> None:
        """Move this operator, a fresh copy, to another point."""
        self.domain = self.codomain = space
        leaves = space.local_leaves([leaf.detach() for leaf in leaves])
        self.point = Point([dense(recordable(leaf)) for leaf in leaves])
        self._blocks = None

    @property
    def _all_sources(self) -> list[Source]:
        return [source for sources in self._sources.values() for source in sources]

    def _zeros(self, source: Source) -> Tensor:
        groups, p, _ = source.layout.shape
        shape = (groups, p) if source.diagonal else (groups, p, p)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def _scale(self, sizes: Size) -> float:
        """Return the factor of a sum over batches."""
        if not sizes.divisor:
            raise self.batches.empty()
        return 1 / sizes.weight if self.batches.reduction == "mean" else 1.0

    def _recorded_batches(self) -> Iterator[tuple[Batch, Recorded]]:
        """Yield each batch with the model's evaluation on it."""
        caller, modules = type(self).__name__, list(self.model.modules())
        for batch in self._joint.in_step(self.batches):
            inputs, targets = pair(self.args if self.batches.data is None else batch.content)
            arguments = (self.x, inputs)
            function = bind(
                caller, module_call(self.model), arguments, name="x", correct=self.correct, sharded_too=True
            )
            first = self.check and batch.index == 0
            known = Checked(caller, (self.model,), modules)
            # Ranks must agree on the number of evaluations.
            must = first and not (self.evaluates_once and self._joint.group is None and known.before)
            value = partial(self._outputs, function)
            with untouched(modules):
                if must and require_deterministic(caller, value, self.point.leaves, modules) and self.evaluates_once:
                    known.remember()
                draw = RandomState(self.point.leaves) if first and not must else None
                recorded = Recorded(function, self.model, self._sources)
                # A model that was deterministic before may draw random numbers now.
                if draw is not None and draw.advanced:
                    require_deterministic(caller, value, self.point.leaves, modules)
            for name, (source, *_) in self._sources.items():
                chunks = name in recorded.on_chunks
                require_rows(caller, source, self._layer(source), recorded.calls[name], chunks=chunks)
            if first:
                self._require_all_uses(recorded)
            factors = self._loss.factors(recorded.outputs, targets, told=self.batches.told)
            size = self.batches.with_factors(batch.size, factors)
            yield Batch(batch.index, (inputs, targets), size), recorded

    def _pulled(self, batch: Batch, recorded: Recorded) -> Iterator[tuple[Tensor, dict[Source, Tensor]]]:
        """Yield chunks of columns, with their gradients g for all blocks."""
        # Ranks draw other targets.
        columns = self._loss.columns(recorded.outputs, batch.content[1], self._joint.number_of(batch))
        for start, stop in spans(len(columns), recorded.chunk_of(self.chunk_size, len(columns))):
            chunk = columns.chunk(start, stop)
            yield chunk, self._gradients(recorded, chunk)

    def _gradients(self, recorded: Recorded, cotangents: Tensor) -> dict[Source, Tensor]:
        return self._gradients_of(recorded, recorded.pull(cotangents))

    def _gradients_for(self, recorded: Recorded, cotangent: Tensor) -> dict[Source, Tensor]:
        return self._gradients(recorded, cotangent[None])

    def _gradients_of(self, recorded: Recorded, found: Mapping[str, Sequence[Tensor]]) -> dict[Source, Tensor]:
        return {
            source: gradients_of(
                source,
                self._layer(source),
                recorded.calls[name],
                found[name],
                self.dtype,
                chunks=name in recorded.on_chunks,
            )
            for name, sources in self._sources.items()
            for source in sources
        }

    def _inputs(self, source: Source, recorded: Recorded) -> Tensor | None:
        """Return the inputs a of a block, from all calls of its layer."""
        examples = len(recorded.outputs) if self._by_example(source) else None
        calls, chunks = recorded.calls[source.layer], source.layer in recorded.on_chunks
        caller, layer = type(self).__name__, self._layer(source)
        inputs = partial(inputs_of, caller, source, layer, calls, self.dtype, examples, chunks=chunks)
        return recorded.inputs_once(source, inputs)

    def _layer(self, source: Source) -> nn.Module:
        return self.model.get_submodule(source.layer)

    def _by_example(self, source: Source) -> bool:
        """Whether the block needs to know which places belong to the same example."""
        return source.per_example or self.sharing == REDUCE

    def _outputs(self, function: BoundFunction) -> Tensor:
        return Recorded(function, self.model, ()).outputs

    def _require_all_uses(self, recorded: Recorded) -> None:
        """Raise if parameters have gradients from outside their layers' calls, or if examples mix."""
        generator = torch.Generator().manual_seed(0)
        cotangent = torch.randn(recorded.outputs.shape, generator=generator, device=generator.device).to(
            recorded.outputs
        )
        found, gradients = recorded.pull_both(cotangent)
        expected = [leaf.to(self.dtype) for leaf in gradients]
        eps = max(torch.finfo(leaf.dtype).eps for leaf in recorded.leaves)
        plain = self._gradients_of(recorded, found)
        coupled = coupled_blocks(cotangent, plain, partial(self._gradients_for, recorded), self._by_example, eps)
        for source, g in plain.items():
            a, true = self._inputs(source, recorded), source.layout.gather(expected, 1)
            if not tell_the_gradient(source, a, g, true, eps):
                raise InputError(
                    f"{type(self).__name__}: x: expected parameters that the model uses only by calls of their "
                    f"layers, got those of {source.layer!r}, whose gradient does not match the layer's inputs and "
                    f"outputs; {REMEDY}."
                )
            if source in coupled:
                raise InputError(
                    f"{type(self).__name__}: model: expected independent rows of the outputs, got a model in which "
                    f"the result of {source.layer!r} for one row affects the outputs of other rows; keep examples in "
                    "the first dimension of layers, return the tokens of a sequence in a separate dimension, (N, C, T) "
                    "for cross_entropy, expand inputs that all examples share, such as positions, to the batch, or use "
                    "GaussNewtonOperator if examples depend on each other."
                )
