"""A function's graph recorded by `torch.autograd`, and gradients with respect to the function's operands.

It has less overhead than `torch.func.vjp`, and supports what `torch.func` refuses: modules that update buffers in
place, saved-tensor hooks, Functions without `setup_context`. Use it where no `torch.func` transform is active.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import cached_property
from itertools import compress
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hodiff.common.module_state import untouched
from hodiff.common.randomness import RandomState
from hodiff.errors import InputError, RouteError
from hodiff.graphs import held_outside, inspect_graph
from hodiff.recompute.closed_over import is_constant
from hodiff.recompute.cut_graphs import Suspect, refusing_cuts
from hodiff.recompute.lost_slopes import is_due, refuse_lost_slopes, refuse_noted_slopes
from hodiff.recompute.reachable import draw_of, named_modules
from hodiff.torch_internals.autograd.grad_mode import gradients_of, in_forward_mode
from hodiff.torch_internals.autograd.transforms import in_transform, outside_transforms
from hodiff.torch_internals.autograd.wrapped_tensors import is_wrapped
from hodiff.torch_internals.wording import Wording, says

T = TypeVar("T")


class Recording(Generic[T]):
    """A recorded run of a function at a point.

    Args:
        f: The function, of a tuple of tensors.
        point: The operands.
        others: Further tensors with respect to which gradients may be differentiated.
        roots: The user's function, then its arguments. Further runs restore the modules and generators in them.

    Attributes:
        operands: The point as the function saw it: aliases, distinct from the same tensors that it closes over.
        result: The function's result.
        connected: Whether gradients carry a graph, because outside code may differentiate them.
        suspects: Functions that may treat values that depend on the point as constants.
        functions: The nodes of Functions that `inspect` found; None before the first call of it.
    """

    suspects: Sequence[Suspect] = ()
    _inspected: Sequence[Tensor] = ()
    functions: Sequence[Any] | None = None

    def __init__(
        self,
        f: Callable[[tuple[Tensor, ...]], T],
        point: Sequence[Tensor],
        others: Iterable[Tensor] = (),
        *,
        roots: Sequence[Any] = (),
    ):
        self._f, self._point, self._roots = f, point, roots or (f,)
        self._outside = torch.is_grad_enabled()
        self.connected = connected = self._outside and any(each.requires_grad for each in (*point, *others))
        dual = in_forward_mode()
        with torch.enable_grad():
            self.operands = tuple([
                (
                    each.view_as(each)
                    if (connected and each.requires_grad) or (dual and not is_constant(each))
                    else each.detach()
                ).requires_grad_()
                for each in point
            ])
            self.result = f(self.operands)
        for each in self.operands:
            if not each.requires_grad:
                raise switched_off("requires_grad_")

    def inspect(self, output: Tensor) -> str | None:
        """Return what in the graph has a constant gradient, or None; become connected if the graph has other leaves."""
        leaves, once, functions = inspect_graph(output, self.operands)
        self.functions = [*(self.functions or ()), *functions]
        self._inspected = [*self._inspected, output]
        if self._outside and not self.connected:
            own = set(map(id, self.operands))
            others = [leaf for leaf in leaves if id(leaf) not in own]
            leaves.clear()
            # If the function created a leaf and dropped it, no code can differentiate with respect to the leaf.
            self.connected = bool(others) and any(held_outside(others))
        return once

    def gradients(
        self,
        outputs: Sequence[Tensor],
        cotangents: Sequence[Tensor] | None = None,
        *,
        graph: bool | None = None,
        keep: bool = False,
        curved: bool | None = None,
    ) -> tuple[Tensor | None, ...]:
        """Pull cotangents (by default ones) back to the operands.

        Args:
            outputs: Tensors from the function's result.
            cotangents: A cotangent for each output.
            graph: Whether the gradients carry a graph; by default if connected.
            keep: Whether the graph is kept for further pullbacks.
            curved: Whether gradients are differentiated with respect to the point, not only the cotangents; by default
                if connected.

        Returns:
            The gradients; None for an operand that the outputs do not depend on.

        Raises:
            NotImplementedError: If a gradient with a graph would lose a part of it.
            InputError: If the function has freed the graph.
            RuntimeError: If torch cannot compute them for another reason.
        """
        try:
            live = [each.requires_grad for each in outputs]
            if not all(live):
                outputs = list(compress(outputs, live))
                cotangents = None if cotangents is None else list(compress(cotangents, live))
            if not outputs:
                return (None,) * len(self.operands)
            graph = self.connected if graph is None else graph
            if graph and self.functions is None:
                for output in outputs:
                    if (once := self.inspect(output)) is not None:
                        raise NotImplementedError(f"{once}, so its derivative is not recorded")
            if graph and self.functions:
                return self._watched_gradients(outputs, cotangents, self.connected if curved is None else curved)
            # Without grad mode, a subclass of Tensor is created through a view that cuts the graph.
            with torch.enable_grad() if graph and not torch.is_grad_enabled() else nullcontext():
                seeds = tuple(map(torch.ones_like, outputs)) if cotangents is None else cotangents
                return gradients_of(outputs, self.operands, seeds, keep=keep or graph, graph=graph)
        except RuntimeError as error:
            if self._roots == (None,) or not says(error, Wording.FREED_GRAPH):
                raise
            raise InputError(
                "torch.autograd.grad: expected a function that keeps the graph of its result, got one in which this "
                "call, or backward, freed it, as in models that compute forces themselves. Switch their forces off, or "
                "pass retain_graph=True there, or create_graph=True if the result depends on the gradient; detach "
                "tensors from outside of the function."
            ) from error

    def _watched_gradients(
        self, outputs: Sequence[Tensor], cotangents: Sequence[Tensor] | None, curved: bool
    ) -> tuple[Tensor | None, ...]:
        """Compute gradients with a graph; raise if a Function loses it."""
        cotangents = [torch.ones_like(each) for each in outputs] if cotangents is None else cotangents
        # A pullback may run inside of a `vmap` over its cotangents, where no leaf can be created.
        batched = in_transform() and not any(map(is_wrapped, outputs))
        with outside_transforms() if batched else nullcontext():
            given = map(torch.ones_like, outputs) if batched else cotangents
            # The graph of a recorded gradient leads to its cotangent, even if the function is linear, so cotangents
            # must require gradients.
            seeds = [each if each.requires_grad else each.detach().requires_grad_() for each in given]
            with refusing_cuts(self.functions or (), self.operands, curved=curved) as suspects, torch.enable_grad():
                gradients = torch.autograd.grad(outputs, self.operands, seeds, create_graph=True, allow_unused=True)
            self.suspects = suspects
            refusals: Sequence[Tensor] = ()
            if curved and suspects and is_due(self._roots[0], [each.node for each in suspects]):
                refusals = self.refuse_lost_slopes()
        with torch.enable_grad():
            if batched:
                gradients = torch.autograd.grad(
                    outputs, self.operands, cotangents, create_graph=True, allow_unused=True
                )
            for zero in refusals:
                # A factor, because it stays in derivatives of any order.
                gradients = tuple(each if each is None else each * (1 + zero) for each in gradients)
        return gradients

    def refuse_lost_slopes(self) -> Sequence[Tensor]:
        """Raise if a Function in the last gradients loses a part of its gradient's graph; see `lost_slopes`."""
        f, connected = self._roots[0], self.connected
        return refuse_lost_slopes(f, self._point, self.suspects, self._run_at, connected=connected)

    def _run_at(self, leaves: Sequence[Tensor]) -> Recording[T]:
        modules, draw = self._state
        with untouched(modules), draw.replayed():
            recording = Recording(self._f, leaves)
        places = {id(each): i for i, each in enumerate(pytree.tree_leaves(self.result))}
        results = pytree.tree_leaves(recording.result)
        for output in self._inspected:
            recording.inspect(results[places[id(output)]])
        return recording

    @cached_property
    def _state(self) -> tuple[list[nn.Module], RandomState]:
        """Modules and random states that further runs restore."""
        modules = [module for root in self._roots for module in named_modules(root)]
        return modules, draw_of(self._point, *self._roots)


class FoundRecording(Recording[T]):
    """A graph that other code recorded on leaves of autograd; it counts as not connected."""

    def __init__(self, leaves: Sequence[Tensor], result: T):
        self._outside = self.connected = False
        self._roots = (None,)
        self.operands, self.result = tuple(leaves), result

    def refuse_lost_slopes(self) -> Sequence[Tensor]:
        """Raise as in `Recording`, by the operands that `noting_operands` kept."""
        refuse_noted_slopes(self.suspects)
        return ()


def switched_off(name: str) -> RouteError:
    """Return the error for a function that turns a differentiated argument into a constant."""
    return RouteError(
        f"{name}: expected a function that leaves requires_grad of its arguments on, got one that switches it off for "
        "a differentiated argument, so the derivative would silently be 0; remove that line, or pass tensor.detach() "
        "to code that must not be differentiated."
    )
