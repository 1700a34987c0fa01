"""Layers in the graph of a loss, and the sums from which the factors of their blocks are computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hodiff.common.chunks import resolve_chunk_size, spans
from hodiff.common.trees import describe
from hodiff.derivatives.recorded_gradient import pull_batch
from hodiff.distributed.linear_maps import gathered_in
from hodiff.errors import InputError
from hodiff.graphs import coarsest_eps, nodes_of
from hodiff.operators.kfac import moments
from hodiff.operators.kfac.columns import Columns
from hodiff.operators.kfac.coupled_rows import coupled_blocks
from hodiff.operators.kfac.kfac_options import DIAGONAL, EXACT
from hodiff.operators.kfac.layers import BIAS, WEIGHT, Source, source_of
from hodiff.operators.kfac.moments import gradients_of, inputs_of, require_rows, tell_the_gradient
from hodiff.operators.kfac.recorded_layers import Call, layers_on_chunks
from hodiff.operators.kfac.sources import KINDS, WITHOUT_OPTIONS, known_type
from hodiff.optim.kfac.layer_calls import calls_in
from hodiff.optim.optimizer_states import precise
from hodiff.optim.recorded_losses import FoundLoss
from hodiff.torch_internals.autograd.graph_nodes import sequence_number
from hodiff.torch_internals.wording import EAGER_STANCE

REMEDY = "give it to another optimizer"
_THEM = "give them to another optimizer"
# Name of the submodule with the parameters of parametrized weights.
_PARAMETRIZED = "parametrizations"
_PLACES = (
    "keep the positions of an example in separate dimensions also in the loss, as in "
    "cross_entropy(outputs.transpose(1, 2), labels), or pass fisher='monte-carlo'"
)


@dataclass(frozen=True, eq=False)
class Sums:
    """Sums of one block over the examples of one or several losses.

    Attributes:
        source: Block of the sums.
        inputs: Sum of $a a^T$; None if a is 1.
        count: Number of terms in `inputs`.
        gradients: Sum of $g g^T$.
        vectors: Pairs of a and g, if they are kept.
    """

    source: Source
    inputs: Tensor | None
    count: int
    gradients: Tensor
    vectors: tuple[tuple[Tensor | None, Tensor], ...] = ()

    def __add__(self, other: Sums) -> Sums:
        inputs = None if self.inputs is None or other.inputs is None else self.inputs + other.inputs
        gradients, vectors = self.gradients + other.gradients, self.vectors + other.vectors
        return Sums(self.source, inputs, self.count + other.count, gradients, vectors)

    def __mul__(self, factor: float | Tensor) -> Sums:
        root = factor**0.5
        vectors = tuple((a, g * root) for a, g in self.vectors)
        return replace(self, gradients=self.gradients * factor, vectors=vectors)


class SeenLayers:
    """Layers with some parameters, in the order of the blocks' indices, on which a loss depends.

    Args:
        caller: Name of the optimizer.
        loss: The loss.
        found: Loss of torch in its graph.
        parameters: The parameters.
        leaves: Leaf of the graph for each parameter: its shard, or the parameter itself.
    """

    def __init__(
        self, caller: str, loss: Tensor, found: FoundLoss, parameters: Sequence[Tensor], leaves: Sequence[Tensor]
    ):
        self._caller, self._found, self._parameters, self._leaves = caller, found, parameters, leaves
        self._eps = coarsest_eps(loss)
        # The statistics of a batch count as constants, although they couple examples.
        self._coupled = any("BatchNorm" in node.name() for node in nodes_of(loss))
        numbers = {id(p): i for i, p in enumerate(parameters) if p.requires_grad}
        self.calls: dict[nn.Module, list[Call]] = {}
        self.sources: list[tuple[Source, nn.Module]] = []
        # Name of the layer of a parameter, by the parameter's index.
        self._owned: dict[int, str] = {}
        seen = calls_in(loss)
        # Names of parameters below layers, such as the parameters of a parametrized weight.
        self._names = {id(p): f"{type(m).__name__}.{name}" for m in seen for name, p in m.named_parameters()}
        for module, calls in seen.items():
            own = {part: getattr(module, part, None) for part in (WEIGHT, BIAS)}
            held = {part: numbers[id(p)] for part, p in own.items() if id(p) in numbers}
            if held:
                self._add(module, calls, held)
        self._on_chunks = layers_on_chunks(self.calls, found.outputs, self._pull)
        for source, module in self.sources:
            require_rows(caller, source, module, self.calls[module], chunks=module in self._on_chunks, remedy=REMEDY)

    def require_all(self, leaves: Sequence[Tensor]) -> None:
        """Raise on parameters in the graph that belong to no layer."""
        numbers = {id(p): i for i, p in enumerate(self._parameters)}
        strange = [leaf for leaf in leaves if id(leaf) in numbers and numbers[id(leaf)] not in self._owned]
        if strange:
            known = ", ".join(each.__name__ for each in KINDS)
            names = [f"{self._names.get(id(each), '')} {describe(each)}".lstrip() for each in strange]
            instead = f"and if the layers run under torch.compile, run them within `{EAGER_STANCE}`"
            if any(f".{_PARAMETRIZED}." in each for each in names):
                instead = "or make the weight itself a parameter by torch.nn.utils.parametrize.remove_parametrizations"
            raise InputError(
                f"{self._caller}: params: expected weights and biases of layers that the loss uses by calls of "
                f"{known}, got {len(strange)} other parameters: {', '.join(names)}; {_THEM}, {instead}."
            )

    def sums(self, columns: Columns, fisher: str, sharing: str, keep_vectors: bool) -> Iterator[Sums]:
        """Compute the sums of each block."""
        inputs = {source: self._inputs(source, module, fisher) for source, module in self.sources}
        ignored = self._found.ignored
        reached: dict[Source, Tensor] = {}
        totals = {source: Sums(source, None, 1, torch.zeros((), device="cpu")) for source in inputs}
        flat = [call for calls in self.calls.values() for call in calls]
        size = sum(2 * call.shape.numel() for call in flat) * self._found.outputs.element_size()
        chunk = resolve_chunk_size("auto", len(columns), size, self._found.outputs.device)
        for start, stop in spans(len(columns), chunk):
            for source, g in self._pulled(columns.chunk(start, stop)):
                reached[source] = moments.reached_places(g, reached.get(source))
                before, one = totals[source], moments.of_gradients(source, g, sharing)
                vectors = (*before.vectors, (inputs[source], g)) if keep_vectors else ()
                totals[source] = replace(before, gradients=before.gradients.to(one) + one, vectors=vectors)
        last = reached[self._last]
        for source, a in inputs.items():
            used: Tensor | None = None
            if ignored is not None and bool(ignored.any()):
                used = moments.used_places(ignored, reached[source])
            elif bool(last.any()) and not bool(last.all()):
                # The loss uses only some outputs, for example outputs[mask].
                used = reached[source]
            A, count = moments.of_inputs(source, a, sharing, used)
            yield replace(totals[source], inputs=A, count=count)

    @property
    def _last(self) -> Source:
        """Block of the layer that was called last."""
        last = max(self.sources, key=lambda each: max(sequence_number(call.edge.node) for call in self.calls[each[1]]))
        return last[0]

    def uses(self, loss: Tensor) -> dict[int, Any]:
        """Return how a graph uses each parameter: its operators, and the number of calls of the layer."""
        consumers: dict[Any, list[Any]] = {}
        for node in nodes_of(loss):
            for parent, _ in node.next_functions:
                consumers.setdefault(parent, []).append(node)
        calls = dict.fromkeys(self._owned, 0)
        for source, module in self.sources:
            calls |= {piece.index: len(self.calls[module]) for piece in source.layout.pieces}
        leaves = {id(node.variable): node for node in consumers if hasattr(node, "variable")}
        return {
            id(p): (calls.get(i), _operators(leaves[id(leaf)], consumers))
            for i, (p, leaf) in enumerate(zip(self._parameters, self._leaves, strict=True))
            if id(leaf) in leaves
        }

    def require_all_uses(self, fisher: str, generator: torch.Generator, by_example: Callable[[Source], bool]) -> None:
        """Raise on parameters whose gradients do not come from their layers' calls alone, or that mix examples."""
        outputs = self._found.outputs
        cotangent = torch.randn(outputs.shape, generator=generator, device=generator.device).to(outputs)
        leaves = list(map(precise, self._true_gradients(cotangent)))
        modules, plain = dict(self.sources), dict(self._pulled(cotangent[None]))
        for source, g in plain.items():
            a = self._inputs(source, modules[source], fisher)
            expected = source.layout.gather(leaves, 1)
            if not tell_the_gradient(source, a, g, expected, self._eps):
                raise InputError(
                    f"{self._caller}: params: expected parameters that the loss uses only by calls of their layers, "
                    f"got those of {source.layer}, whose gradient does not match the layer's inputs and outputs; "
                    f"{REMEDY}."
                )
        some = {source: g for source, g in plain.items() if by_example(source)}
        if fisher != EXACT or self._coupled or not some:
            return
        for source in coupled_blocks(cotangent, some, lambda u: dict(self._pulled(u[None])), by_example, self._eps):
            raise InputError(
                f"{self._caller}: fisher='exact': expected independent examples, along the first dimension of every "
                f"layer's inputs, got {source.layer}, whose result for one row affects the outputs of other rows; keep "
                "positions in separate dimensions, or pass fisher='monte-carlo'."
            )

    def _true_gradients(self, cotangent: Tensor) -> list[Tensor]:
        """Compute the gradients of all parameters; of sharded ones, those of this rank's loss in the whole tensors."""
        places = {id(leaf): i for i, leaf in enumerate(self._leaves) if leaf.requires_grad}
        wanted: list[tuple[int, Any]] = [(i, self._leaves[i]) for i in places.values()]
        if any(p is not leaf for p, leaf in zip(self._parameters, self._leaves, strict=True)):
            wanted = [(places[id(leaf)], edge) for leaf, edge in gathered_in(self._found.edge) if id(leaf) in places]
        edges = [edge for _, edge in wanted]
        found = torch.autograd.grad([self._found.edge], edges, [cotangent], retain_graph=True, allow_unused=True)
        total = [torch.zeros(p.shape, dtype=p.dtype, device=p.device) for p in self._parameters]
        for (i, _), gradient in zip(wanted, found, strict=True):
            if gradient is not None:
                total[i] = total[i] + (gradient.to_dense() if gradient.is_sparse else gradient)
        return total

    def _add(self, module: nn.Module, calls: list[Call], held: dict[str, int]) -> None:
        known, name = known_type(module), str(module)
        assert known is not None
        refused = KINDS[known].refused(module)
        others = {self._owned[number] for number in held.values() if number in self._owned}
        if refused:
            raise InputError(
                f"{self._caller}: params: expected an embedding without an option that changes its gradient, got "
                f"{name} with {refused}; {WITHOUT_OPTIONS}, or {REMEDY}."
            )
        if others:
            raise InputError(
                f"{self._caller}: params: expected layers without shared parameters, got a parameter of two layers, "
                f"{others.pop()} and {name}; {REMEDY}."
            )
        self._owned |= dict.fromkeys(held.values(), name)
        self.calls[module] = calls
        self.sources.append((source_of(name, module, known, held, DIAGONAL), module))

    def _pulled(self, cotangents: Tensor) -> Iterator[tuple[Source, Tensor]]:
        """Compute the gradients g of all blocks."""
        pulled = self._pull(cotangents)
        for source, module in self.sources:
            calls, chunks = self.calls[module], module in self._on_chunks
            yield source, gradients_of(source, module, calls, pulled[module], self._dtype(source), chunks=chunks)

    def _pull(self, cotangents: Tensor) -> dict[nn.Module, list[Tensor]]:
        """Compute gradients with respect to the outputs of all calls, (c, *shape)."""
        edges = [call.edge for calls in self.calls.values() for call in calls]
        edge = self._found.edge

        def one(cotangent: Tensor) -> Sequence[Tensor | None]:
            return torch.autograd.grad([edge], edges, [cotangent], retain_graph=True, allow_unused=True)

        # A single cotangent needs no batching.
        if len(cotangents) == 1:
            pulled = iter([None if each is None else each[None] for each in one(cotangents[0])])
        else:
            pulled = iter(pull_batch(one, [cotangents]))
        return {
            module: [
                cotangents.new_zeros(len(cotangents), *call.shape) if each is None else each
                for call, each in ((call, next(pulled)) for call in calls)
            ]
            for module, calls in self.calls.items()
        }

    def _inputs(self, source: Source, module: nn.Module, fisher: str) -> Tensor | None:
        # A column of the exact Fisher matrix belongs to one place in every example; other columns do not.
        examples = len(self._found.outputs) if fisher == EXACT else None
        chunks = module in self._on_chunks
        words: dict[str, str] = {} if examples is None else {"argument": "fisher='exact'", "remedy": _PLACES}
        return inputs_of(
            self._caller, source, module, self.calls[module], self._dtype(source), examples, chunks=chunks, **words
        )

    def _dtype(self, source: Source) -> torch.dtype:
        return precise(self._parameters[source.layout.pieces[0].index]).dtype


def _operators(node: Any, consumers: dict[Any, list[Any]]) -> tuple[Any, ...]:
    """Return the operators that use a result, also through views and changes of dtype."""
    return tuple(
        (user.name(), _operators(user, consumers))
        if sum(each is not None for each, _ in user.next_functions) == 1
        # An operator with two operands computes something else, so its users do not count.
        else user.name()
        for user in consumers.get(node, ())
    )
