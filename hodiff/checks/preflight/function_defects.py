"""Defects of the custom Functions in a graph."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd import Function

from hodiff.graphs import is_once_differentiable, nodes_of
from hodiff.routes import ROUTES
from hodiff.torch_internals.autograd.graph_nodes import function_of, operator_of


@dataclass(frozen=True)
class FunctionDefect:
    """Defect of a custom Function that can be seen from outside.

    Attributes:
        name: Its class.
        defect: The missing or wrong part.
        remedy: What to change.
        wrong: Routes that are silently wrong because of it.
        missing: Routes that raise because of it.
    """

    name: str
    defect: str
    remedy: str
    wrong: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


def custom_functions(outputs: Iterable[Any]) -> Iterator[type[Function]]:
    """Yield the custom Functions that computed some tensors; hodiff's own Functions are skipped."""
    for output in outputs:
        for node in nodes_of(output) if isinstance(output, Tensor) else ():
            function = function_of(node)
            if function is not None and not function.__module__.startswith("hodiff."):
                yield function


def function_defects(function: type[Function]) -> Iterator[FunctionDefect]:
    """Yield the defects of a Function that can be seen without running its rules."""
    name = function.__name__
    if function.__module__ == "torch.utils.checkpoint":
        yield FunctionDefect(
            name,
            "torch.utils.checkpoint with use_reentrant=True takes no torch.autograd.grad, and torch.func refuses it",
            "call it with use_reentrant=False, or take hodiff's transforms, which replace it",
            missing=ROUTES,
        )
        return
    if is_once_differentiable(function):
        yield FunctionDefect(
            name,
            "backward is marked once_differentiable, and is a constant to a second derivative",
            "write it with torch operators or other Functions, and remove the mark",
            wrong=ROUTES[:2],
        )
    if operator_of(function):
        return  # operators are judged by `operator_routes`
    if function.setup_context is Function.setup_context:
        yield FunctionDefect(
            name,
            "forward takes ctx, which torch.func refuses",
            "split it into forward and setup_context",
            missing=ROUTES[1:],
        )
    if function.jvp is Function.jvp:
        yield FunctionDefect(
            name,
            "it has no jvp, so that forward mode raises",
            "add one, of saved inputs and torch operators",
            missing=ROUTES[1:],
        )
    if function.vmap is Function.vmap and not function.generate_vmap_rule:
        yield FunctionDefect(
            name,
            "it has no batching rule, so that dense derivatives take one direction at a time, or raise",
            "set generate_vmap_rule = True if all its rules are torch operators, else write vmap",
        )
