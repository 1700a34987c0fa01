"""Derivatives by compiled graphs, one for each form of the arguments and of the state that the function reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from hodiff.common.ordinary import ordinary
from hodiff.derivatives.capture.trace import drop_unused, take_conditions, trace
from hodiff.derivatives.compilation import Arguments, agree, compile_graph, warn_of_failure
from hodiff.derivatives.graphs_by_form import GraphsByForm
from hodiff.errors import HodiffError, InputError
from hodiff.recompute.dependencies import Dependencies
from hodiff.torch_internals.autograd.differentiation import only_reverse_mode


class CompiledCalls:
    """Computes results by a graph that is compiled for the form of the arguments, and compared with eager once.

    Args:
        caller: The public function, for messages.
        what: The name of the result, for warnings.
    """

    def __init__(self, caller: str, what: str):
        self._caller, self._what = caller, f"{caller}: {what}"
        self._graphs: GraphsByForm[_Graph] = GraphsByForm(f"{caller}: f")

    def require_plain(self, remedy: str) -> None:
        """Raise if the call is inside of a transform."""
        if not only_reverse_mode():
            raise InputError(
                f"{self._caller}: expected a call outside of torch.func transforms, forward mode and torch.compile, "
                f"which a compiled graph knows nothing of, got one inside; {remedy}."
            )

    def __call__(
        self, f: Callable[..., Any], compute: Callable[..., Sequence[Tensor]], args: tuple[Any, ...]
    ) -> Sequence[Tensor]:
        """Compute tensors without a graph.

        Args:
            f: The user's function, whose closures and globals are inspected.
            compute: The function of `args` to compile.
            args: Pytrees.

        Returns:
            The result of `compute`.
        """
        arguments = Arguments(args)

        def eager() -> Sequence[Tensor]:
            return compute(*args)

        def capture(dependencies: Dependencies, expected: Sequence[Tensor]) -> _Graph | None:
            count = len(arguments.tensors)

            def of_tensors(*tensors: Tensor) -> Sequence[Tensor]:
                with dependencies.filled(tensors[count:]):
                    return compute(*arguments.filled(tensors[:count]))

            return self._compiled(of_tensors, (*arguments.tensors, *dependencies.tensors), expected)

        with torch.no_grad():
            found = self._graphs.run((f,), arguments, eager, capture, _use)
            return ordinary(eager() if found is None else found, arguments.tensors)

    def _compiled(
        self, compute: Callable[..., Sequence[Tensor]], tensors: Sequence[Tensor], expected: Sequence[Tensor]
    ) -> _Graph | None:
        tensors = [each.detach() for each in tensors]
        try:
            graph = _Graph(trace(compute, tensors), tensors, self._caller)
            found = graph(tensors)
        except HodiffError:
            raise
        except Exception as error:
            # Eager autograd works whatever the compiler fails at.
            warn_of_failure(self._what, error)
            return None
        same, gap = agree(found, expected)
        if not same:
            warn_of_failure(self._what, gap)
            return None
        return graph


class _Graph:
    """A compiled computation, and the checks of the numbers that it branches on.

    Args:
        traced: The traced computation.
        tensors: Its inputs.
        caller: The public function, for messages.
    """

    def __init__(self, traced: fx.GraphModule, tensors: Sequence[Tensor], caller: str):
        self._conditions = take_conditions(traced)
        self._used = drop_unused(traced)
        self._run = compile_graph(traced, [tensors[i] for i in self._used], caller=caller)

    def __call__(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the results, or raise `OtherBranchError`."""
        if self._conditions is not None:
            self._conditions(*tensors)
        return self._run(*(tensors[i] for i in self._used))


def _use(graph: _Graph, inputs: tuple[Tensor, ...]) -> Sequence[Tensor]:
    return graph(tuple(each.detach() for each in inputs))
