"""Kronecker-factored approximate curvature, K-FAC, as an operator."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from hodiff.common.chunks import resolve_chunk_size, spans
from hodiff.common.keyword_options import explains, shows, with_defaults
from hodiff.common.module_state import untouched
from hodiff.common.trees import PyTree, dense, describe, flatten_primals, recordable
from hodiff.derivatives.bound_function import bind, leave_inference_mode
from hodiff.derivatives.route_choice import refused
from hodiff.errors import InputError
from hodiff.operators.batches import Batch, Batches
from hodiff.operators.constants import require_constant
from hodiff.operators.conversion import Conversion, converted_data
from hodiff.operators.determinism import require_deterministic
from hodiff.operators.kfac import moments
from hodiff.operators.kfac.blocks import Block, KroneckerBlock
from hodiff.operators.kfac.columns import Loss
from hodiff.operators.kfac.factored import FactoredOperator
from hodiff.operators.kfac.layers import REMEDY, Source, sources_of
from hodiff.operators.kfac.options import EMPIRICAL, MONTE_CARLO, REDUCE, KroneckerOptions
from hodiff.operators.kfac.recording import Recorded
from hodiff.operators.kfac.vectors import gradients_of, inputs_of, tell_the_gradient
from hodiff.operators.likelihoods import counted_rows, divisor, likelihood_of
from hodiff.operators.model_loss import known_size, module_call, pair, require_declared_reduction, require_parameters
from hodiff.operators.point import Point
from hodiff.operators.spaces import Space

A = TypeVar("A", bound="KFACOperator")
# Gradients and inputs of one batch, by block.
Vectors = tuple[Tensor | None, Tensor]


@explains(KroneckerOptions)
class KFACOperator(FactoredOperator):
    r"""Kronecker-factored approximate curvature, K-FAC: Kronecker products for the layers' blocks of the Fisher.

    In example n a layer of weight W multiplies inputs $a_{nr}$, at R places r that share W, and $g_{nr}$ are gradients
    at its outputs: columns of $J^\top S$ with $S S^\top$ the Hessian of the loss in the model's outputs, or of a
    sampled or given loss. The block of W is approximated by

    $$ F = \sum_n \Big(\sum_r g_{nr} \otimes a_{nr}\Big) \Big(\sum_r g_{nr} \otimes a_{nr}\Big)^\top
         \approx B \otimes A $$

    $$ \text{"expand":}\quad A = \frac1{N R} \sum_{n, r} a_{nr} a_{nr}^\top, \quad B = \sum_{n, r} g_{nr} g_{nr}^\top
       \qquad \text{"reduce":}\quad A = \frac1N \sum_n \bar a_n \bar a_n^\top, \quad
       B = \sum_n \hat g_n \hat g_n^\top $$

    with $\bar a_n$ the mean and $\hat g_n$ the sum over r, where the Hessian has the divisor of the mean in it. It is
    the exact block for one example without sharing, and for all examples where the model is linear in its inputs and
    the loss squared.

    Layers: `Linear`; `Conv1d`, `Conv2d` and `Conv3d`, each group of channels with factors of its own; `Embedding`,
    whose A is diagonal and taken as for "expand"; `LayerNorm`, `RMSNorm`, `GroupNorm`, `BatchNorm` (in eval mode) and
    `InstanceNorm`, of which the exact block is taken, or its diagonal. A bias of its own has A = 1. Layers are hooked,
    so that the model has to be a module that calls them. Padded places count in A. The factors are computed on first
    use, and stay as they are when parameters change afterwards; `at` makes new ones.

    Args:
        model: An `nn.Module` of one argument, the inputs, that returns one tensor with examples along its first
            dimension.
        loss: Function `loss(outputs, targets)` that returns a tensor of shape (), a sum or mean over examples.
        x: The point: a dict of the model's parameters by name, or of some of them, each in a layer named above.
        *args: `inputs, targets`; or one batch of another form, which goes to both functions.
        **options: Those of both Kronecker-factored operators.

    Attributes:
        blocks: Each layer's block, with its factors `A` (groups, q, q) and `B` (groups, p, p), or diagonals.

    Raises:
        InputError: If an argument is not what it should be, a parameter belongs to no layer that is known, or, on first
            use, is used otherwise than by it.

    Example:
        >>> import torch, hodiff
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
        >>> x = dict(model.named_parameters())
        >>> inputs, targets = torch.randn(8, 3), torch.randint(2, (8,))
        >>> A = hodiff.KFACOperator(model, torch.nn.functional.cross_entropy, x, inputs, targets)
        >>> A.shape, (A @ x)["0.weight"].shape
        ((26, 26), torch.Size([4, 3]))
        >>> step = A.inverse(damping=1e-2) @ x
        >>> torch.allclose((A.damped(1e-2) @ step)["2.bias"], x["2.bias"], atol=1e-4)
        True

    Source: J. Martens & R. Grosse, "Optimizing neural networks with Kronecker-factored approximate curvature", ICML
    2015, section 3; R. Grosse & J. Martens, "A Kronecker-factored approximate Fisher matrix for convolution layers",
    ICML 2016, section 3; R. Eschenhagen, A. Immer, R. Turner, F. Schneider & P. Hennig, "Kronecker-factored approximate
    curvature for modern neural network architectures", NeurIPS 2023, section 3.
    """

    _blocks: tuple[Block, ...] | None

    @shows(KroneckerOptions)
    @leave_inference_mode
    def __init__(
        self,
        model: nn.Module,
        loss: Callable[..., Tensor],
        x: PyTree,
        *args: Any,
        **options: Unpack[KroneckerOptions],
    ):
        caller = type(self).__name__
        given = with_defaults(type(self), KroneckerOptions, options)
        data, reduction = given["data"], given["reduction"]
        if not isinstance(model, nn.Module):
            raise InputError(
                f"{caller}: model: expected an nn.Module, whose layers are hooked, got {describe(model)}; take "
                "GaussNewtonOperator for a function, or a module that calls it."
            )
        if not callable(loss):
            raise InputError(f"{caller}: loss: expected a function loss(outputs, targets), got {describe(loss)}.")
        if (data is not None) == bool(args) or len(args) > 2:
            raise InputError(
                f"{caller}: expected either data=, or the arguments (inputs, targets) or one batch after x, got "
                f"{len(args)} of them{' and data=' * (data is not None)}; pass {caller}(model, loss, x, inputs, "
                "targets)."
            )
        require_declared_reduction(caller, loss, reduction)
        require_parameters(caller, model, x)
        require_constant(caller, x, model, loss, args, data if isinstance(data, (list, tuple)) else None)
        leaves, _ = flatten_primals(x, caller, "x")
        super().__init__(Space.of(x))
        self.model, self.loss = model, loss
        self.fisher, self.sharing = given["fisher"], given["sharing"]
        self.chunk_size, self.check, self.correct = given["chunk_size"], given["check"], given["correct"]
        self._sources = sources_of(caller, model, list(x), given)
        self._loss = _loss_of(caller, loss, given)
        self.args = batch_of(args)
        self.batches = Batches(caller, data, reduction, given["batch_size"], given["progress"])
        self.batches.known_size = partial(known_size, counted_rows if self.fisher == EMPIRICAL else divisor, loss)
        self.relocate(leaves, self.domain)

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks, computed on first use."""
        if self._blocks is None:
            self._point.require_unchanged(type(self).__name__)
            self._blocks = self._compute()
        return self._blocks

    @property
    def x(self) -> PyTree:
        """The point."""
        return self.domain.tree_of(self._point.leaves)

    def at(self: A, x: PyTree) -> A:
        """The operator at another point.

        Args:
            x: The point, like the old one in structure, shapes, dtypes and devices.

        Returns:
            A new operator.

        Raises:
            InputError: If `x` has another form.
        """
        caller = f"{type(self).__name__}.at"
        require_constant(caller, x)
        leaves, _ = flatten_primals(x, caller, "x")
        if not self.domain.same(Space.of(x)):
            raise InputError(
                f"{caller}: x: expected the structure, shapes, dtypes and devices of the first point, "
                f"{self.domain.size} numbers, got {Space.of(x).size}; make a new operator for other parameters."
            )
        other = copy.copy(self)
        other.relocate(leaves, self.domain)
        return other

    def converted(self, conversion: Conversion) -> Any:
        """See `LinearOperator.to`."""
        other = copy.copy(self)
        other.model = conversion.module(self.model)
        other.args = conversion.tree(self.args)
        other.batches = self.batches.over(converted_data(self.batches.data, conversion))
        other.relocate(list(map(conversion, self._point.leaves)), conversion.space(self.domain))
        return other

    def relocate(self, leaves: Sequence[Tensor], space: Space) -> None:
        """Make a fresh copy one at another point."""
        self.domain = self.codomain = space
        self._point = Point([dense(recordable(leaf.detach())) for leaf in leaves])
        self._blocks = None

    @leave_inference_mode
    def _compute(self) -> tuple[Block, ...]:
        """The blocks of the factors."""
        with torch.no_grad(), refused(type(self).__name__):
            return self._factors()

    def _factors(self) -> tuple[KroneckerBlock, ...]:
        """The factors, by sums over batches, examples, places and columns."""
        sources = self._all_sources
        inputs: dict[Source, Tensor | None] = dict.fromkeys(sources)
        gradients = {source: self._zeros(source) for source in sources}
        counts = dict.fromkeys(sources, 0)
        weights = 0.0
        for batch, recorded in self._recorded():
            kept = {source: self._inputs(source, recorded) for source in sources}
            for source, a in kept.items():
                one, count = moments.of_inputs(source, a, self.sharing)
                if one is not None:
                    before = inputs[source]
                    inputs[source] = one.to(self.dtype) if before is None else before + one
                counts[source] += count
            for found in self._pulled(batch, recorded):
                for source, g in found.items():
                    gradients[source].add_(moments.of_gradients(source, g, self.sharing), alpha=batch.weight)
            weights += batch.weight
        scale = self._scale(weights)
        return tuple(
            KroneckerBlock(source.layout, moments.mean_of_inputs(source, inputs[source], counts[source], B), B * scale)
            for source, B in gradients.items()
        )

    @property
    def _all_sources(self) -> list[Source]:
        return [source for sources in self._sources.values() for source in sources]

    def _zeros(self, source: Source) -> Tensor:
        groups, p, _ = source.layout.shape
        shape = (groups, p) if source.diagonal else (groups, p, p)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def _scale(self, weights: float) -> float:
        """What a sum over batches is multiplied with."""
        if not weights:
            raise self.batches.empty()
        return 1 / weights if self.batches.reduction == "mean" else 1.0

    def _recorded(self) -> Iterator[tuple[Batch, Recorded]]:
        """Each batch with the model's evaluation on it."""
        caller, modules = type(self).__name__, list(self.model.modules())
        for batch in self.batches:
            inputs, targets = pair(self.args if self.batches.data is None else batch.content)
            arguments = (self.x, inputs)
            function = bind(caller, module_call(self.model), arguments, name="x", correct=self.correct)
            with untouched(modules):
                if self.check and batch.index == 0:
                    value = lambda: Recorded(function, self.model, ()).outputs  # noqa: E731, B023
                    require_deterministic(caller, value, self._point.leaves, modules)
                recorded = Recorded(function, self.model, self._sources)
            if self.check and batch.index == 0:
                self._require_all_uses(recorded)
            yield Batch(batch.index, (inputs, targets), batch.weight), recorded

    def _pulled(self, batch: Batch, recorded: Recorded) -> Iterator[dict[Source, Tensor]]:
        """Gradients g of all blocks, some columns at once."""
        columns = self._loss.columns(recorded.outputs, batch.content[1], batch.index)
        size = resolve_chunk_size(self.chunk_size, len(columns), recorded.bytes_each, self.device)
        for start, stop in spans(len(columns), size):
            yield self._gradients(recorded, columns.chunk(start, stop))

    def _gradients(self, recorded: Recorded, cotangents: Tensor) -> dict[Source, Tensor]:
        found = recorded.pull(cotangents)
        return {
            source: gradients_of(source, self._layer(source), recorded.calls[name], found[name], self.dtype)
            for name, sources in self._sources.items()
            for source in sources
        }

    def _inputs(self, source: Source, recorded: Recorded) -> Tensor | None:
        """Inputs a of a block, of all calls of its layer."""
        examples = len(recorded.outputs) if self._by_example(source) else None
        calls = recorded.calls[source.layer]
        return inputs_of(type(self).__name__, source, self._layer(source), calls, self.dtype, examples)

    def _layer(self, source: Source) -> nn.Module:
        return self.model.get_submodule(source.layer)

    def _by_example(self, source: Source) -> bool:
        """Whether it matters which places are of one example."""
        return source.per_example or self.sharing == REDUCE

    def _require_all_uses(self, recorded: Recorded) -> None:
        """Refuse parameters that have gradients from elsewhere than their layers' calls."""
        generator = torch.Generator().manual_seed(0)
        cotangent = torch.randn(recorded.outputs.shape, generator=generator).to(recorded.outputs)
        expected = [leaf.to(self.dtype) for leaf in recorded.parameter_gradients(cotangent)]
        eps = max(torch.finfo(leaf.dtype).eps for leaf in recorded.leaves)
        for source, g in self._gradients(recorded, cotangent[None]).items():
            a, true = self._inputs(source, recorded), source.layout.gather(expected, 1)
            if not tell_the_gradient(source, a, g, true, eps):
                raise InputError(
                    f"{type(self).__name__}: x: expected parameters that the model uses by calls of their layers "
                    f"alone, got those of {source.layer!r}, whose gradient is another one than its inputs and outputs "
                    f"tell; {REMEDY}."
                )


def batch_of(args: tuple[Any, ...]) -> Any:
    """The one batch that arguments make; None where there are none."""
    return args if len(args) == 2 else args[0] if args else None


def _loss_of(caller: str, loss: Callable[..., Tensor], given: dict[str, Any]) -> Loss:
    """The loss with its options, which must fit."""
    fisher, likelihood = given["fisher"], given["likelihood"]
    for name in ("samples", "likelihood"):
        if given[name] is not None and fisher != MONTE_CARLO:
            raise InputError(
                f"{caller}: {name}: expected None with fisher={fisher!r}, which draws nothing, got {given[name]!r}; "
                f"pass fisher={MONTE_CARLO!r}."
            )
    if fisher == MONTE_CARLO and likelihood is None:
        likelihood = likelihood_of(caller, loss)
    # One seed for all passes, which must draw the same targets.
    generator = given["generator"] or torch.Generator().manual_seed(0)
    seed = int(torch.randint(2**31, (), generator=generator, device=generator.device))
    mean = given["reduction"] == "mean"
    return Loss(caller, loss, mean, given["correct"], fisher, given["samples"] or 1, likelihood, seed)
