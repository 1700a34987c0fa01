"""Captured graphs of one function, by the form of its arguments and of the state that it reads."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from operator import is_
from typing import Any, Generic, TypeVar

from torch import Tensor

from hodiff.common.module_state import untouched_buffers
from hodiff.derivatives.capture.reads import OtherBranchError
from hodiff.derivatives.compilation import Arguments
from hodiff.errors import HodiffWarning
from hodiff.recompute.dependencies import Dependencies
from hodiff.recompute.surroundings import settings
from hodiff.torch_internals.threads import one_thread_at_a_time

E = TypeVar("E")
G = TypeVar("G")
R = TypeVar("R")

# Most graphs for arguments of one form: compilation does not pay if the state keeps changing.
MOST = 16
# Most graphs if the function branches on numbers of tensors, and if it reads a float, which rarely repeats.
MOST_BRANCHES = 8
MOST_FLOATS = 2


# Non-empty once something may be captured in this process.
_MADE: list[bool] = []


def while_nothing_is_captured() -> AbstractContextManager[object]:
    """Return a context that waits for captures in other threads, which leave placeholders in closures."""
    return one_thread_at_a_time() if _MADE else nullcontext()


@dataclass
class _Branches(Generic[G]):
    """The graphs of one form by branch, the last used first; `closed` stops further captures."""

    graphs: list[G] = field(default_factory=list)
    closed: bool = False


class GraphsByForm(Generic[G]):
    """Finds the captured graph for given arguments, or captures it.

    Args:
        caller: The name of the compiled function, for warnings.
    """

    def __init__(self, caller: str):
        if not _MADE:
            _MADE.append(True)
        self.caller = caller
        self._graphs: dict[Any, _Branches[G]] = {}
        self._made: Counter[Any] = Counter()
        self._roots: tuple[Any, ...] = ()
        self._last: Dependencies | None = None
        self._numbers: dict[Any, int] = {}

    def run(
        self,
        roots: tuple[Any, ...],
        arguments: Arguments,
        eager: Callable[[], E],
        capture: Callable[[Dependencies, E], G | None],
        use: Callable[[G, tuple[Tensor, ...]], R],
    ) -> R | None:
        """Run the graph for the arguments, capturing it if needed; return None if there is no graph.

        Args:
            roots: The functions that the graph is captured from.
            arguments: Their arguments.
            eager: Computes the expected result without a graph.
            capture: Makes the graph from the tensors of the arguments and those that the functions close over.
            use: Runs a graph on its inputs: tensors of the arguments, then those closed over. It raises
                `OtherBranchError` if the graph is for another branch.

        Returns:
            The result of `use`.
        """
        tried: list[G] = []
        other: OtherBranchError | None = None
        while True:
            # During a capture, other threads would find its placeholders in the closures of the functions.
            with one_thread_at_a_time():
                branches, inputs = self._find(roots, arguments)
                left = _without(branches.graphs, tried)
                if not left and not branches.closed:
                    branches, inputs = self._make(roots, arguments, eager, capture, other)
                    left = _without(branches.graphs, tried)
            if not left:
                return None
            for graph in left:
                try:
                    result = use(graph, inputs)
                except OtherBranchError as error:
                    tried.append(graph)
                    other = error
                    continue
                if tried:
                    with one_thread_at_a_time():
                        branches.graphs.sort(key=lambda each: each is not graph)
                return result

    def _find(self, roots: tuple[Any, ...], arguments: Arguments) -> tuple[_Branches[G], tuple[Tensor, ...]]:
        dependencies = self._current(roots)
        form = arguments.form, self._number, settings(arguments.tensors)
        return self._graphs.setdefault(form, _Branches()), (*arguments.tensors, *dependencies.tensors)

    def _current(self, roots: tuple[Any, ...]) -> Dependencies:
        if self._last is None or not all(map(is_, self._roots, roots)) or not self._last.hold():
            self._last, self._roots = Dependencies(*roots), roots
            # Forms are long, so they are compared only here, and known by a number elsewhere.
            self._number = self._numbers.setdefault(self._last.form, len(self._numbers))
        return self._last

    def _make(
        self,
        roots: tuple[Any, ...],
        arguments: Arguments,
        eager: Callable[[], E],
        capture: Callable[[Dependencies, E], G | None],
        other: OtherBranchError | None,
    ) -> tuple[_Branches[G], tuple[Tensor, ...]]:
        branches, inputs = self._find(roots, arguments)
        if not (self._may_make(arguments) if other is None else self._may_branch(len(branches.graphs), other)):
            branches.closed = True
            return branches, inputs
        with untouched_buffers(self._current(roots).modules):
            # A first run may create state that later runs find.
            expected = eager()
            settled, _ = self._find(roots, arguments)
            if settled is branches or not (settled.graphs or settled.closed):
                graph = self._capture(roots, arguments, expected, capture)
                if graph is None:
                    settled.closed = True
                else:
                    settled.graphs.insert(0, graph)
        return self._find(roots, arguments)

    def _may_make(self, arguments: Arguments) -> bool:
        self._made[arguments.form] += 1
        if self._made[arguments.form] == MOST + 1:
            self._stays_eager(
                f"closes over what has changed {MOST} times, each with its own graph",
                "Pass what changes as an argument.",
            )
        return self._made[arguments.form] <= MOST

    def _may_branch(self, made: int, other: OtherBranchError) -> bool:
        most = MOST_FLOATS if isinstance(other.known, (float, complex)) else MOST_BRANCHES
        if made < most:
            return True
        self._stays_eager(
            f"has taken {made} branches, each with its own graph, because it reads numbers of tensors at "
            f"{other.where}, where {other.known!r} became {other.found!r}",
            "Other branches run eagerly. Keep the number in a tensor, such as by torch.where, or compare tensors "
            "instead of floats, which differ in every call.",
        )
        return False

    def _capture(
        self, roots: tuple[Any, ...], arguments: Arguments, expected: E, capture: Callable[[Dependencies, E], G | None]
    ) -> G | None:
        dependencies = self._current(roots)
        graph = capture(dependencies, expected)
        if not dependencies.changed and self._current(roots).form == dependencies.form:
            return graph
        if graph is not None:
            self._stays_eager(
                "changes what it reads, as a counter or a cache, which a graph would not",
                "Pass what changes as an argument.",
            )
        self._made[arguments.form] = MOST + 1
        return None

    def _stays_eager(self, why: str, remedy: str) -> None:
        warnings.warn(
            f"{self.caller} {why}; it runs eagerly, which is slower but right. {remedy}", HodiffWarning, stacklevel=2
        )


def _without(graphs: list[G], tried: list[G]) -> list[G]:
    return [each for each in graphs if not any(each is one for one in tried)]
