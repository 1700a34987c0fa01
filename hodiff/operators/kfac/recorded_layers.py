"""A recorded evaluation of a model, with the inputs and outputs of its layers.

Calls of layers, and a test whether the calls of one layer process separate chunks of examples.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from hodiff.common.chunks import MEMORY_BUDGET, resolve_chunk_size
from hodiff.common.trees import describe, strided
from hodiff.derivatives.bound_function import BoundFunction
from hodiff.derivatives.gradient_comparison import is_comparing
from hodiff.derivatives.recorded_gradient import pull_batch
from hodiff.distributed.linear_maps import gathered_in
from hodiff.errors import InputError
from hodiff.graphs import cotangent_bytes, nodes_of
from hodiff.operators.kfac.layers import REMEDY
from hodiff.recompute.checkpoint import stored_instead
from hodiff.torch_internals.autograd.graph_nodes import results_of
from hodiff.torch_internals.autograd.wrapped_tensors import is_wrapped
from hodiff.torch_internals.tensors import stands_for_tensor
from hodiff.torch_internals.threads import one_thread_at_a_time

L = TypeVar("L")

# Bytes of a layer's gradient above which a CPU takes no longer for one gradient after another than for a batch of them.
LARGE = 2**19


class OutputFormError(InputError):
    """A model's outputs are not one real tensor with examples along its first dimension."""


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a layer.

    Attributes:
        x: Its input, detached.
        shape: Shape of its output.
        edge: Graph edge of the output, which remains if the tensor is changed in place.
    """

    x: Tensor
    shape: torch.Size
    edge: GradientEdge


def layers_on_chunks(
    calls: Mapping[L, Sequence[Call]], outputs: Tensor, pull: Callable[[Tensor], Mapping[L, Sequence[Tensor]]]
) -> frozenset[L]:
    """Return the layers whose calls process separate, successive chunks of examples, not the same examples.

    Args:
        calls: Calls by layer.
        outputs: The model's outputs, (N, ...) or a multiple of N rows, in the order of the examples.
        pull: Gradients of the calls' outputs, each (c, *shape), for cotangents (c, *outputs).

    Returns:
        Layers whose gradients scale in each chunk by the same factor as the cotangents of that chunk.
    """
    lengths = {layer: tuple(call.shape[0] for call in each) for layer, each in calls.items() if len(each) > 1}
    candidates = {layer: sizes for layer, sizes in lengths.items() if sum(sizes) and not len(outputs) % sum(sizes)}
    found: set[L] = set()
    generator = torch.Generator().manual_seed(0)
    for sizes in dict.fromkeys(candidates.values()):
        factors = 1 + torch.rand(len(sizes), generator=generator, device=generator.device)
        repeats = torch.tensor(sizes, device="cpu") * (len(outputs) // sum(sizes))
        scales = factors.repeat_interleave(repeats).reshape(-1, *[1] * (outputs.dim() - 1)).to(outputs)
        cotangent = torch.randn(outputs.shape, generator=generator, device=generator.device).to(outputs)
        pulled = pull(torch.stack([cotangent, scales * cotangent]))
        for layer in [layer for layer, its in candidates.items() if its == sizes]:
            apart = True
            for (plain, scaled), factor in zip(pulled[layer], factors.tolist(), strict=True):
                tolerance = torch.finfo(plain.dtype).eps ** 0.5
                apart &= bool((scaled - factor * plain).norm() <= tolerance * plain.norm())
            if apart:
                found.add(layer)
    return frozenset(found)


class Recorded:
    """The outputs of a model, and their gradients with respect to the outputs of its layers.

    Attributes:
        outputs: The model's output tensor.
        leaves: The parameters in its graph.
        calls: Calls by layer.

    Args:
        function: The model, bound at its point.
        model: The module with the layers.
        layers: Names of layers to record.
        every: Whether to raise for layers that the model does not call, or calls without recording; if false, they
            have no calls.
    """

    def __init__(self, function: BoundFunction, model: nn.Module, layers: Iterable[str], *, every: bool = True):
        self._caller, self._sharded = function.caller, function.sharded
        self._every = every
        self.calls: dict[str, list[Call]] = {name: [] for name in layers}
        self.leaves = [leaf.detach().requires_grad_() for leaf in function.leaves]
        # Hooks are called from all threads.
        # A checkpoint would hide the graph of its layers.
        stored = stored_instead() if every and self.calls else nullcontext()
        with one_thread_at_a_time(), self._hooked(model), stored, torch.enable_grad():
            outputs, _ = function.recorded(lambda: function(self.leaves))
        # A detach in the hooks would count as one of the model.
        self.calls = {name: [replace(each, x=each.x.detach()) for each in calls] for name, calls in self.calls.items()}
        real = isinstance(outputs, Tensor) and not stands_for_tensor(outputs) and outputs.is_floating_point()
        if not real or outputs.dim() == 0:
            raise OutputFormError(
                f"{self._caller}: model: expected one real tensor with examples along its first dimension, got "
                f"{describe(outputs)}; return the tensor that the loss needs."
            )
        if not outputs.requires_grad:
            raise function.independent()
        self._graph = outputs
        self._inputs: dict[Hashable, Tensor] = {}
        self.outputs = outputs.detach()
        unused = [name for name, calls in self.calls.items() if not calls]
        if unused and every:
            raise InputError(
                f"{self._caller}: x: expected parameters of layers that the model calls, got those of "
                f"{', '.join(map(repr, unused))}, which it does not call, or whose weight it passes to a function; "
                f"{REMEDY}."
            )
        self.keep(self.calls)

    def inputs_once(self, key: Hashable, compute: Callable[[], Tensor | None]) -> Tensor | None:
        """Return the inputs of a block, and keep them for the next call, within the memory of a chunk."""
        if key in self._inputs:
            return self._inputs[key]
        found = compute()
        kept = sum(each.nbytes for each in self._inputs.values())
        if (
            found is not None
            and kept + found.nbytes <= MEMORY_BUDGET["cpu" if found.device.type == "cpu" else "accelerator"]
        ):
            self._inputs[key] = found
        return found

    def keep(self, layers: Iterable[str]) -> None:
        """Drop the calls of other layers."""
        self.calls = {name: self.calls[name] for name in layers}
        self._flat = [call for calls in self.calls.values() for call in calls]

    @cached_property
    def on_chunks(self) -> frozenset[str]:
        """The layers whose calls process separate chunks of examples, one after another."""
        return layers_on_chunks(self.calls, self.outputs, self.pull)

    @property
    def bytes_each(self) -> int:
        """Bytes of one more gradient."""
        return 2 * self.outputs.element_size() * sum(call.shape.numel() for call in self._flat)

    def chunk_of(self, chunk_size: int | str | None, columns: int) -> int:
        """Return how many of the columns to pull back together."""
        large = self.bytes_each > LARGE * len(self._flat) and self.outputs.device.type == "cpu"
        return (
            1
            if large and chunk_size == "auto"
            else resolve_chunk_size(chunk_size, columns, self.bytes_each, self.outputs.device)
        )

    @cached_property
    def graph_bytes(self) -> int:
        """Bytes of one more gradient of all parameters, without the parameters' own."""
        return 2 * cotangent_bytes(self._graph)

    @cached_property
    def rounding(self) -> float:
        """The relative rounding of the coarsest dtype in the graph, as autocast computes within float32."""
        results = (each for node in nodes_of(self._graph) for each in results_of(node))
        dtypes = {each.dtype for each in results if each.dtype.is_floating_point}
        return max(torch.finfo(dtype).eps for dtype in dtypes | {each.dtype for each in self.leaves})

    def pull(self, cotangents: Tensor) -> dict[str, list[Tensor]]:
        """Compute gradients of all calls' outputs, each (c, *shape), for cotangents (c, *outputs)."""
        edges = [call.edge for call in self._flat]

        def one(cotangent: Tensor) -> Sequence[Tensor | None]:
            return torch.autograd.grad(self._graph, edges, cotangent, retain_graph=True, allow_unused=True)

        found = iter(pull_batch(one, [cotangents]))
        return {name: [_filled(next(found), call, cotangents) for call in calls] for name, calls in self.calls.items()}

    def pull_both(self, cotangent: Tensor) -> tuple[dict[str, list[Tensor]], list[Tensor]]:
        """Compute `pull` for one cotangent, and the gradients of all parameters, together unless they are sharded."""
        if self._sharded is not None:
            return self.pull(cotangent[None]), self._gradients_of_shards(cotangent)
        found, gradients = self.pull_all(cotangent, range(len(self.leaves)))
        return found, [each[0] for each in gradients]

    def _gradients_of_shards(self, cotangent: Tensor) -> list[Tensor]:
        assert self._sharded is not None
        # Gradients of whole parameters are those of this rank; gradients of shards are sums over ranks.
        places = {id(leaf): i for i, leaf in enumerate(self.leaves)}
        shapes = [each.shape for each in self._sharded.layouts if each is not None]
        wanted = [(places[id(leaf)], edge) for leaf, edge in gathered_in(self._graph) if id(leaf) in places]
        edges = [edge for _, edge in wanted]
        found = torch.autograd.grad(self._graph, edges, cotangent, retain_graph=True, allow_unused=True)
        total = [leaf.new_zeros(shape) for leaf, shape in zip(self.leaves, shapes, strict=True)]
        for (i, _), gradient in zip(wanted, found, strict=True):
            if gradient is not None:
                total[i] = total[i] + (gradient.to_dense() if gradient.is_sparse else gradient)
        return total

    def pull_leaves(self, cotangents: Tensor, indices: Sequence[int]) -> list[Tensor]:
        """Compute gradients (c, *shape) of some parameters for cotangents (c, *outputs)."""
        leaves = [self.leaves[i] for i in indices]

        def one(cotangent: Tensor) -> Sequence[Tensor | None]:
            return torch.autograd.grad(self._graph, leaves, cotangent, retain_graph=True, allow_unused=True)

        return [
            leaf.new_zeros(len(cotangents), *leaf.shape) if each is None else strided(each)
            for each, leaf in zip(pull_batch(one, [cotangents]), leaves, strict=True)
        ]

    def pull_all(self, cotangent: Tensor, indices: Sequence[int]) -> tuple[dict[str, list[Tensor]], list[Tensor]]:
        """Compute `pull` and `pull_leaves` for one cotangent, in one pass."""
        edges, leaves = [call.edge for call in self._flat], [self.leaves[i] for i in indices]
        inputs: Any = [*edges, *leaves]
        found = [
            None if each is None else strided(each)[None]
            for each in torch.autograd.grad(self._graph, inputs, cotangent, retain_graph=True, allow_unused=True)
        ]
        rows, rest = iter(found[: len(edges)]), found[len(edges) :]
        calls = {
            name: [_filled(next(rows), call, cotangent[None]) for call in calls] for name, calls in self.calls.items()
        }
        gradients = [leaf.new_zeros(1, *leaf.shape) if g is None else g for g, leaf in zip(rest, leaves, strict=True)]
        return calls, gradients

    @contextmanager
    def _hooked(self, model: nn.Module) -> Iterator[None]:
        with ExitStack() as stack:
            for name in self.calls:
                handle = model.get_submodule(name).register_forward_hook(self._keeper(name), with_kwargs=True)
                stack.callback(handle.remove)
            yield

    def _keeper(self, name: str) -> Any:
        def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            # These calls are of other parameters.
            if is_comparing():
                return
            x = args[0] if args else next(iter(kwargs.values()))
            # The tensors within a transform of torch.func are not those of the graph.
            if not isinstance(output, Tensor) or not output.requires_grad or is_wrapped(output):
                if not self._every:
                    return
                raise InputError(
                    f"{self._caller}: model: expected layers that autograd records, got {name!r}, called without "
                    "recording; call it outside of torch.no_grad(), of a checkpoint, and of transforms of torch.func."
                )
            self.calls[name].append(Call(x, output.shape, get_gradient_edge(output)))

        return keep


def _filled(gradient: Tensor | None, call: Call, like: Tensor) -> Tensor:
    return like.new_zeros(len(like), *call.shape) if gradient is None else strided(gradient)
