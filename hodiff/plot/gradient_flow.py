"""Graph of a function with the value and the gradient at each node."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from hodiff.common.options import name_of, require_callable
from hodiff.common.trees import PyTree
from hodiff.displays import numbers
from hodiff.graphs import nodes_of
from hodiff.plot.backward_graph import BackwardGraph, Box
from hodiff.plot.graph import RAISES, Drawing, named_leaves, require_dependence
from hodiff.plot.shared import one_number
from hodiff.torch_internals.interception import DispatchMode, run_operator

# Labels, with the largest entry of a gradient up to which they apply, and their colours.
SIZES = {
    "no gradient": (0.0, "#d9d9d9"),
    "gradient below 1e-6": (1e-6, "#9ecae1"),
    "gradient below 1e-3": (1e-3, "#deebf7"),
    "gradient up to 1e3": (1e3, "#e5f5e0"),
    "gradient above 1e3": (float("inf"), "#fdae6b"),
}
NOT_FINITE = "gradient nan or inf"
DIGITS = 3
OUTPUTS = 2  # most outputs of a node that are shown

Numbers = dict[Any, dict[int, Tensor]]  # by node and the number of its output


def gradient_flow(f: Callable[..., Tensor], x: PyTree) -> BackwardGraph:
    r"""Draw the graph of a scalar function with the value that each node computed and the gradient that reaches it.

    The gradient at a node is $\partial f / \partial z$ of its value z, as backward computes it. Its largest entry
    decides the colour, from vanishing (blue) to exploding (orange); no gradient at all is grey, nan and inf are red.
    Values are shown for torch's functions and custom Functions; nodes inside a torch function may have none.

    Args:
        f: Maps x to a tensor with one element.
        x: A tensor or a pytree of tensors, real and floating-point.

    Returns:
        The graph, like that of `hodiff.plot.graph`. For more than four numbers it shows the least and the largest.

    Raises:
        InputError: If x holds no differentiable tensor, or f does not return one number that depends on it.
        HodiffError: If matplotlib is needed, and not installed.

    Example:
        >>> import torch
        >>> picture = gradient_flow(lambda x: (x.exp() - 1).square().sum(), torch.tensor([0.0, 1.0]))
        >>> picture.boxes["ExpBackward0_0"].lines
        ('ExpBackward0', 'value [1, 2.72]', 'gradient [0, 3.44]')
    """
    require_callable("gradient_flow", f=f)
    leaves, spec, names = named_leaves("gradient_flow", x)
    with torch.enable_grad():
        y, values = _watched(f, leaves, spec)
        gradients = _gradients(y)
    picture = BackwardGraph(f"values and gradients of {name_of(f)}")

    def look(node: Any) -> Box:
        leaf = getattr(node, "variable", None)
        at_node = {0: leaf.detach()} if leaf is not None else values.get(node, {})
        size, colour = _size(gradients.get(node, {}))
        picture.colours.setdefault(size, colour)
        lines = [names.get(id(leaf), "leaf") if leaf is not None else node.name().rpartition("::")[2]]
        lines += _told("value", at_node) + _told("gradient", gradients.get(node, {}))
        is_function = isinstance(node, torch.autograd.function.BackwardCFunction)
        return Box(tuple(lines), colour, "ellipse" if leaf is not None else "box", thick=is_function)

    picture.boxes["f"] = Box((f"f = {numbers(y, DIGITS)}",), shape="plaintext")
    picture.arrows.append(("f", Drawing(picture, look).add(get_gradient_edge(y).node)))
    order = [*SIZES, NOT_FINITE]
    picture.colours = dict(sorted(picture.colours.items(), key=lambda pair: order.index(pair[0])))
    return picture


class _Seen(DispatchMode):
    """Mode that keeps the results of operators: autograd sets the node on the tensor itself, unless it is a view."""

    def __init__(self) -> None:
        super().__init__()
        self.results: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = run_operator(func, args, kwargs)
        self.results.append(result)
        return result


class _SeenOutside(TorchFunctionMode):
    """Mode that keeps the results of torch's functions, views as well."""

    def __init__(self) -> None:
        super().__init__()
        self.results: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.results.append(result)
        return result


def _watched(f: Callable[..., Tensor], leaves: Sequence[Tensor], spec: pytree.TreeSpec) -> tuple[Tensor, Numbers]:
    """Return the value of f, and the values that its nodes computed."""
    inside, outside = _Seen(), _SeenOutside()
    with inside, outside:
        y = f(pytree.tree_unflatten(list(leaves), spec))
    y = one_number("gradient_flow", y)
    require_dependence("gradient_flow", y)
    values: Numbers = defaultdict(dict)
    for each in pytree.tree_leaves([inside.results, outside.results, y]):
        if isinstance(each, Tensor) and each.grad_fn is not None:
            values[each.grad_fn].setdefault(each.output_nr, each.detach())
    return y, values


def _gradients(y: Tensor) -> Numbers:
    """Return the gradients that reach each node in backward, by the number of the node's output."""
    reached: Numbers = {}
    nodes = list(nodes_of(get_gradient_edge(y)))
    variables = {node: node.variable for node in nodes if hasattr(node, "variable")}

    def note(node: Any) -> Callable[[tuple[Tensor | None, ...]], None]:
        def hook(gradients: tuple[Tensor | None, ...]) -> None:
            reached[node] = {i: each.detach() for i, each in enumerate(gradients) if each is not None}

        return hook

    with _hooks((node, note(node)) for node in nodes if node not in variables):
        found = torch.autograd.grad(y, list(variables.values()), allow_unused=True, retain_graph=True)
    reached |= {node: {0: each} for node, each in zip(variables, found, strict=True) if each is not None}
    return reached


@contextmanager
def _hooks(pairs: Iterator[tuple[Any, Callable[..., None]]]) -> Iterator[None]:
    handles = [node.register_prehook(hook) for node, hook in pairs]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _size(gradients: dict[int, Tensor]) -> tuple[str, str]:
    """Return the size of the gradients at a node, in words and as a colour."""
    largest = [each.abs().max().item() for each in gradients.values() if each.numel()]
    if not all(map(torch.isfinite, map(torch.tensor, largest))):
        return NOT_FINITE, RAISES
    size = max(largest, default=0.0)
    return next((words, colour) for words, (most, colour) in SIZES.items() if size <= most)


def _told(what: str, tensors: dict[int, Tensor]) -> list[str]:
    shown = sorted(tensors.items())[:OUTPUTS]
    return [f"{what} {f'{i}: ' if len(tensors) > 1 else ''}{numbers(each, DIGITS)}" for i, each in shown]
