"""Gradients as compiled graphs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hodiff.common.trees import PyTree, describe
from hodiff.derivatives.bound_function import at_the_boundary, bind
from hodiff.derivatives.compiled_calls import CompiledCalls
from hodiff.errors import InputError


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
    if not callable(f):
        raise InputError(f"compile_gradient: f must be callable, got {describe(f)}.")
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
