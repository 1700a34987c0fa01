"""Captured graphs of one function, each for a form of its arguments and of all else that the function reads."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from operator import is_
from typing import Any, Generic, TypeVar

from torch import Tensor, fx

from hodiff.common.module_state import untouched_buffers
from hodiff.derivatives.compilation import Arguments
from hodiff.errors import HodiffWarning
from hodiff.recompute.dependencies import Dependencies
from hodiff.recompute.surroundings import settings
from hodiff.torch_internals.threads import one_thread_at_a_time

E = TypeVar("E")
G = TypeVar("G")

# How many graphs are made for arguments of one form: state that takes ever new values is not worth compiling for.
MOST = 16


class HiddenTensorError(Exception):
    """A graph reads a tensor that is no input of it."""


class GraphsByForm(Generic[G]):
    """Finds the graph for arguments, or has it made.

    Args:
        caller: What is compiled, for warnings.
    """

    def __init__(self, caller: str):
        self.caller = caller
        self._graphs: dict[Any, G | None] = {}
        self._made: Counter[Any] = Counter()
        self._roots: tuple[Any, ...] = ()
        self._last: Dependencies | None = None
        self._numbers: dict[Any, int] = {}

    def find(
        self,
        roots: tuple[Any, ...],
        arguments: Arguments,
        eager: Callable[[], E],
        capture: Callable[[Dependencies, E], G | None],
    ) -> tuple[G | None, tuple[Tensor, ...]]:
        """The graph, or None where there is none, and its inputs: tensors of the arguments, then those closed over.

        Args:
            roots: The functions that the graph is made of.
            arguments: Their arguments.
            eager: Computes without a graph what the graph is compared with.
            capture: Makes the graph of the tensors of the arguments and of those that the functions close over.

        Returns:
            The graph and its inputs.
        """
        # While a graph is captured, others would find its placeholders in what the functions close over.
        with one_thread_at_a_time():
            dependencies = self._current(roots)
            form = self._form(arguments)
            if form not in self._graphs and self._may_make(arguments):
                with untouched_buffers(dependencies.modules):
                    # A first run may set up what later ones find.
                    expected = eager()
                    self._current(roots)
                    settled = self._form(arguments)
                    if settled not in self._graphs:
                        self._graphs[settled] = self._capture(roots, arguments, expected, capture)
                dependencies = self._current(roots)
                form = self._form(arguments)
            return self._graphs.get(form), (*arguments.tensors, *dependencies.tensors)

    def _current(self, roots: tuple[Any, ...]) -> Dependencies:
        if self._last is None or not all(map(is_, self._roots, roots)) or not self._last.hold():
            self._last, self._roots = Dependencies(*roots), roots
            # Long forms are compared here alone.
            self._number = self._numbers.setdefault(self._last.form, len(self._numbers))
        return self._last

    def _form(self, arguments: Arguments) -> Any:
        return arguments.form, self._number, settings(arguments.tensors)

    def _may_make(self, arguments: Arguments) -> bool:
        self._made[arguments.form] += 1
        if self._made[arguments.form] == MOST + 1:
            self._stays_eager(f"closes over what has changed {MOST} times, each of which takes another graph")
        return self._made[arguments.form] <= MOST

    def _capture(
        self, roots: tuple[Any, ...], arguments: Arguments, expected: E, capture: Callable[[Dependencies, E], G | None]
    ) -> G | None:
        dependencies = self._current(roots)
        graph = capture(dependencies, expected)
        if not dependencies.changed and self._current(roots).form == dependencies.form:
            return graph
        if graph is not None:
            self._stays_eager("changes what it reads, as a counter or a cache, which a graph would not")
        self._made[arguments.form] = MOST + 1
        return None

    def _stays_eager(self, why: str) -> None:
        warnings.warn(
            f"{self.caller} {why}; it stays eager, slower and right. Pass what changes as an argument.",
            HodiffWarning,
            stacklevel=2,
        )


def refuse_hidden(graph: fx.GraphModule) -> None:
    """Refuse a graph with a tensor that came from somewhere else than its inputs and its own constants."""
    for node in graph.graph.nodes:
        if node.op == "get_attr" and not all("lift_fresh" in str(user.target) for user in node.users):
            value = getattr(graph, node.target, None)
            if isinstance(value, Tensor):
                raise HiddenTensorError(
                    f"it reads a tensor of shape {tuple(value.shape)} that is neither an argument nor found in what it "
                    "closes over, so that a change would go unseen; pass it as an argument"
                )


def drop_unused(graph: fx.GraphModule) -> list[int]:
    """Take the inputs that nothing is made of out of a graph, and say which are left."""
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    for node in inputs:
        if not node.users:
            graph.graph.erase_node(node)
    graph.recompile()
    return [i for i, node in enumerate(inputs) if node.users]
