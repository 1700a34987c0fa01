"""Derivatives by compiled graphs, one for each form of the arguments and of the state that the function reads.

Gradients as compiled graphs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from hodiff.common.options import require_bools, require_callable
from hodiff.common.ordinary import ordinary
from hodiff.common.trees import PyTree
from hodiff.derivatives.bound_function import at_the_boundary, bind
from hodiff.derivatives.capture.graph_trace import drop_unused, take_conditions, trace
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
                f"which compiled graphs do not support, got one inside; {remedy}."
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


def compile_gradient(f: Callable[..., Any], *, value: bool = False, correct: bool = True) -> Callable[..., PyTree]:
    r"""Build a function that computes the gradient of a scalar function by one compiled graph.

    $$ x \mapsto \nabla_x f(x, \cdot) $$

    The gradient is traced through autograd, so that forward and backward are fused, and matrix products run on
    the faster of torch's CPU libraries on this processor. A graph is compiled for each form of the arguments
    (shapes, dtypes, values that are not tensors), which takes seconds. Its first result is compared with the eager
    gradient. If they disagree, or the function cannot be traced, hodiff warns and runs that form eagerly. The result
    carries no graph.

    Numbers of tensors that the function reads, as in `if x.sum() > 0` or `x[mask]`, are compared in each call before
    the graph runs; another branch gets its own graph. There are at most 8 branches, or 2 if a float was read; further
    branches run eagerly, with a warning.

    Other state that `f` reads (closures, globals, attributes of objects and modules, containers) is
    compared in each call: tensors are inputs of the graph, and other numbers, flags or functions get their own graph.
    Beyond 16 such graphs, or if `f` changes such state itself, it runs eagerly, with a warning. The globals of
    installed packages count as constants, and so does state that `f` reads through a function of another kind:
    `ContextVar`, `os.environ`, `threading.local`, weak references, `sys.modules`, and switches of torch, such as
    `torch.are_deterministic_algorithms_enabled()`. Build the function again after they change, or pass them to `f`.

    Args:
        f: Function `f(x, *args)` that returns a tensor of shape ().
        value: Whether to return the value of `f` too.
        correct: As in `hodiff.hvp`.

    Returns:
        Function `(x, *args)` that returns the gradient in the structure of `x`; with `value`, the pair (gradient,
        value). It raises `InputError` if `f` does not return one real number or does not depend on `x`.

    Raises:
        InputError: If `f` is not callable.

    Example:
        >>> import torch, hodiff
        >>> gradient = hodiff.compile_gradient(lambda x: (x**2).sum())
        >>> gradient(torch.tensor([1.0, 2.0]))  # doctest: +SKIP
        tensor([2., 4.])

    Source: A. Griewank & A. Walther, *Evaluating Derivatives*, 2nd ed., section 3.2.
    """
    require_callable("compile_gradient", f=f)
    require_bools("compile_gradient", value=value, correct=correct)
    calls = CompiledCalls("compile_gradient", "the gradient")

    @functools.wraps(f, assigned=("__module__", "__doc__"), updated=())
    @at_the_boundary
    def gradient(x: PyTree, *args: Any) -> PyTree:
        calls.require_plain("use torch.func.grad(f) there")
        function = bind("compile_gradient", f, (x, *args), name="x", correct=correct)

        def of_leaves(leaves: Sequence[Tensor], rest: tuple[Any, ...]) -> Sequence[Tensor]:
            inner = bind("compile_gradient", f, (function.unflatten(leaves), *rest), name="x", correct=correct)
            with torch.enable_grad():
                primals = tuple(leaf.detach().requires_grad_() for leaf in leaves)
                y, _ = inner.scalar(primals)
                if not y.requires_grad:
                    raise inner.independent()
                found = torch.autograd.grad(y, primals, materialize_grads=True)
            return (*(each.detach() for each in found), y.detach())

        *leaves, y = calls(f, of_leaves, (function.leaves, args))
        result = function.unflatten(leaves)
        return (result, y) if value else result

    return gradient
