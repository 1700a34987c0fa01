"""Gradients as compiled graphs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from hodiff.common.ordinary import ordinary
from hodiff.common.trees import PyTree, describe
from hodiff.derivatives.bound_function import at_the_boundary, bind
from hodiff.derivatives.capture.trace import drop_unused, take_conditions, trace
from hodiff.derivatives.compilation import Arguments, agree, compile_graph, warn_of_failure
from hodiff.derivatives.graphs_by_form import GraphsByForm
from hodiff.errors import HodiffError, InputError
from hodiff.recompute.dependencies import Dependencies
from hodiff.torch_internals.differentiation import only_reverse_mode


def compile_gradient(f: Callable[..., Any], *, value: bool = False, correct: bool = True) -> Callable[..., PyTree]:
    r"""Function that computes the gradient of a scalar function by one compiled graph.

    $$ x \mapsto \nabla_x f(x, \cdot) $$

    The gradient is traced through autograd, so that forward and backward are fused together, and its matrix products
    run on whichever of torch's CPU libraries is faster on this processor. A graph is made for each form of the
    arguments (shapes, dtypes, values of what is no tensor), which takes seconds, and its first result is compared with
    the eager gradient. Where they disagree, or the function cannot be traced, a warning says so and that form stays
    eager. The result carries no graph.

    Numbers of tensors that the function reads, as in `if x.sum() > 0` or `x[mask]`, are compared in each call before
    its graph runs; another way has a graph of its own. There are at most 8, or 2 where a float was read; further ways
    are eager, with a warning.

    What `f` reads besides its arguments (closures, globals, attributes of objects and modules, containers) is looked
    at in each call: tensors are inputs of the graph, and other numbers, flags or functions have a graph of their own.
    Beyond 16 of these, or where `f` changes such state itself, it stays eager, with a warning. The globals of installed
    packages are taken for constants.

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
    if not callable(f):
        raise InputError(f"compile_gradient: f must be callable, got {describe(f)}.")
    graphs: GraphsByForm[_Graph] = GraphsByForm("compile_gradient: f")

    @functools.wraps(f, assigned=("__module__", "__doc__"), updated=())
    @at_the_boundary
    def gradient(x: PyTree, *args: Any) -> PyTree:
        if not only_reverse_mode():
            raise InputError(
                "compile_gradient: expected a call outside of torch.func transforms, forward mode and torch.compile, "
                "which a compiled graph knows nothing of, got one inside; use torch.func.grad(f) there."
            )
        function = bind("compile_gradient", f, (x, *args), name="x", correct=correct)
        arguments = Arguments((function.leaves, args))

        def of_leaves(leaves: Sequence[Tensor], rest: tuple[Any, ...]) -> Sequence[Tensor]:
            inner = bind("compile_gradient", f, (function.unflatten(leaves), *rest), name="x", correct=correct)
            with torch.enable_grad():
                primals = tuple(leaf.detach().requires_grad_() for leaf in leaves)
                y, _ = inner.scalar(primals)
                if not y.requires_grad:
                    raise inner.independent()
                found = torch.autograd.grad(y, primals, materialize_grads=True)
            return (*(each.detach() for each in found), y.detach())

        def eager() -> Sequence[Tensor]:
            return of_leaves(function.leaves, args)

        def capture(dependencies: Dependencies, expected: Sequence[Tensor]) -> _Graph | None:
            count = len(arguments.tensors)

            def of_tensors(*tensors: Tensor) -> Sequence[Tensor]:
                leaves, rest = arguments.filled(tensors[:count])
                with dependencies.filled(tensors[count:]):
                    return of_leaves(leaves, rest)

            return _compiled(of_tensors, (*arguments.tensors, *dependencies.tensors), expected)

        def use(graph: _Graph, inputs: tuple[Tensor, ...]) -> Sequence[Tensor]:
            return graph(tuple(each.detach() for each in inputs))

        with torch.no_grad():
            found = graphs.run((f,), arguments, eager, capture, use)
            *leaves, y = eager() if found is None else found
        *leaves, y = ordinary((*leaves, y), arguments.tensors)
        result = function.unflatten(leaves)
        return (result, y) if value else result

    return gradient


class _Graph:
    """A compiled gradient, and what compares the numbers that it branches on.

    Args:
        traced: The gradient as it was traced.
        tensors: Its inputs.
    """

    def __init__(self, traced: fx.GraphModule, tensors: Sequence[Tensor]):
        self._conditions = take_conditions(traced)
        self._used = drop_unused(traced)
        self._run = compile_graph(traced, [tensors[i] for i in self._used], caller="compile_gradient")

    def __call__(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """The gradient, or `OtherBranchError`."""
        if self._conditions is not None:
            self._conditions(*tensors)
        return self._run(*(tensors[i] for i in self._used))


def _compiled(
    gradient: Callable[..., Sequence[Tensor]], tensors: Sequence[Tensor], expected: Sequence[Tensor]
) -> _Graph | None:
    tensors = [each.detach() for each in tensors]
    try:
        graph = _Graph(trace(gradient, tensors), tensors)
        found = graph(tensors)
    except HodiffError:
        raise
    except Exception as error:
        # Whatever the compiler could not do, eager autograd can.
        warn_of_failure("compile_gradient: the gradient", error)
        return None
    same, gap = agree(found, expected)
    if not same:
        warn_of_failure("compile_gradient: the gradient", gap)
        return None
    return graph
