"""Graph of the backward pass at each order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree

from hodiff.common.options import require_bool, require_callable, require_int
from hodiff.common.trees import PyTree, flatten_primals, leaf_names
from hodiff.errors import InputError
from hodiff.graphs import is_once_differentiable
from hodiff.plot.backward_graph import BackwardGraph, Box
from hodiff.plot.shared import one_number
from hodiff.torch_internals.autograd.graph_nodes import function_of, raises_when_run, saved_by_operator

COLOURS = ("#cfe2f3", "#fce5cd", "#d9ead3", "#ead1dc", "#fff2cc")  # of the nodes, by order
RAISES = "#e06666"
NO_FURTHER = "no further derivative"


def graph(f: Callable[..., Tensor], x: PyTree, *, order: int = 2, saved: bool = False) -> BackwardGraph:
    r"""Draw the nodes that backward visits for the first, second, ... derivative of a scalar function.

    Order 1 has the nodes under $f(x)$. Order k has the nodes that appear when the derivative before, contracted
    with ones, is computed with `create_graph=True`: $\nabla f$, then $\nabla^2 f \, 1$, and so on. Arrows point in the
    direction of backward. Nodes have the colour of the order at which they first appear. Custom Functions have a thick
    border, leaves are ellipses. Red nodes have no further derivative: Functions marked `once_differentiable`, and nodes
    whose backward would raise. An order without nodes has a derivative that is constant to autograd.

    Args:
        f: Maps x to a tensor with one element.
        x: A tensor or a pytree of tensors, real and floating-point.
        order: The highest order, 1 or more.
        saved: Whether nodes list the shapes of their saved tensors.

    Returns:
        The graph. Notebooks show it, `.draw(ax)` draws it, `.save("file.svg")` writes a picture, and
        `.save("file.dot")` writes Graphviz's language, as in `.source`. Names of nodes are their operation and a
        number, such as `MulBackward0_0`.

    Raises:
        InputError: If x holds no differentiable tensor, or f does not return one number that depends on it.
        HodiffError: If matplotlib is needed, and not installed.

    Example:
        >>> import torch
        >>> picture = graph(lambda x: x.sin().sum(), torch.ones(3))
        >>> [name for name in ("SinBackward0_0", "CosBackward0_0") if name in picture.source]
        ['SinBackward0_0', 'CosBackward0_0']
    """
    require_callable("graph", f=f)
    require_int("graph", "order", order, 1)
    require_bool("graph", "saved", saved)
    leaves, spec, names = named_leaves("graph", x)
    picture = BackwardGraph(_title(f, order), colours={f"order {k + 1}": _colour(k) for k in range(order)})
    # Nodes have the colour of the order that first reaches them.
    colour = ""
    drawing = Drawing(picture, lambda node: _look(node, names, colour, saved))
    for k, roots in enumerate(_roots(f, leaves, spec, order), start=1):
        colour = _colour(k - 1)
        if isinstance(roots, RuntimeError):
            message = str(roots).partition("\n")[0]
            picture.boxes[f"order{k}_raises"] = Box((f"order {k} raises", message), RAISES)
            break
        for index, root in enumerate(roots):
            if root is None:
                continue
            result = f"order{k}_{index}"
            picture.boxes[result] = Box((_result_label(k, names[id(leaves[index])]),), shape="plaintext")
            picture.arrows.append((result, drawing.add(root)))
    if any(box.colour == RAISES for box in picture.boxes.values()):
        picture.colours[NO_FURTHER] = RAISES
    return picture


def named_leaves(caller: str, x: PyTree) -> tuple[tuple[Tensor, ...], pytree.TreeSpec, dict[int, str]]:
    """Return copies of the leaves of x that require a gradient, their structure, and their names by id."""
    leaves, spec = flatten_primals(x, caller, "x")
    leaves = tuple(leaf.detach().clone().requires_grad_() for leaf in leaves)
    return leaves, spec, {id(leaf): f"x{name}" for leaf, name in zip(leaves, leaf_names(x), strict=True)}


def _roots(
    f: Callable[..., Tensor], leaves: Sequence[Tensor], spec: pytree.TreeSpec, order: int
) -> Iterator[list[Any] | RuntimeError]:
    """Yield the nodes where backward starts at each order: of f, then of its gradients; or the error it raises."""
    with torch.enable_grad():
        y = one_number("graph", f(pytree.tree_unflatten(list(leaves), spec)))
        require_dependence("graph", y)
        yield [get_gradient_edge(y).node]
        values = [y]
        for _ in range(order - 1):
            ones = [torch.ones_like(value) for value in values]
            try:
                gradients = torch.autograd.grad(values, leaves, ones, create_graph=True, allow_unused=True)
            except RuntimeError as error:
                yield error
                return
            yield [None if each is None else each.grad_fn for each in gradients]
            values = [each for each in gradients if each is not None and each.requires_grad]
            if not values:
                return


def require_dependence(caller: str, y: Tensor) -> None:
    """Raise if a value has no graph."""
    if not y.requires_grad:
        raise InputError(
            f"{caller}: f: expected a function that depends on x, got a constant; look for detach, .data, .item() and "
            "NumPy in f."
        )


class Drawing:
    """Adds nodes to a picture and keeps them alive, as their identity is valid no longer than they live."""

    def __init__(self, picture: BackwardGraph, look: Callable[[Any], Box]):
        self._picture = picture
        self._look = look
        self._drawn: dict[Any, str] = {}
        self._count: Counter[str] = Counter()

    def add(self, root: Any) -> str:
        """Draw a node, with all nodes reached from it that are not drawn yet, and return its name."""
        waiting: list[Any] = []

        def visit(node: Any) -> str:
            if node not in self._drawn:
                stem = node.name().rpartition("::")[2]
                self._drawn[node] = f"{stem}_{self._count[stem]}"
                self._count[stem] += 1
                self._picture.boxes[self._drawn[node]] = self._look(node)
                waiting.append(node)
            return self._drawn[node]

        name = visit(root)
        while waiting:
            node = waiting.pop()
            for following, _ in () if raises_when_run(node) else node.next_functions:
                if following is not None:
                    self._picture.arrows.append((self._drawn[node], visit(following)))
        return name


def _look(node: Any, names: dict[int, str], colour: str, saved: bool) -> Box:
    if hasattr(node, "variable"):
        leaf = node.variable
        return Box((names.get(id(leaf), "leaf"), str(tuple(leaf.shape))), shape="ellipse")
    lines = (node.name().rpartition("::")[2], *(_saved_shapes(node) if saved else ()))
    if raises_when_run(node):
        return Box(lines, RAISES)
    function = function_of(node)
    # If its incoming gradient is a constant, no node of the next order shows that there is no derivative.
    if function is not None and is_once_differentiable(function):
        return Box((*lines, "once_differentiable"), RAISES, thick=True)
    return Box(lines, colour, thick=isinstance(node, torch.autograd.function.BackwardCFunction))


def _saved_shapes(node: Any) -> list[str]:
    """Return the names and shapes of a node's saved tensors; a Function's tensors have no names of their own."""
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        kept = [("saved", tensor) for tensor in node.saved_tensors]
    else:
        kept = saved_by_operator(node)
    return [f"{name} {tuple(value.shape)}" for name, value in kept if isinstance(value, Tensor)]


def _result_label(order: int, name: str) -> str:
    if order == 1:
        return "f"
    power = "" if order == 2 else str(order - 1).translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"∇{power}f{' · 1' * (order - 2)} by {name}"


def _title(f: Callable[..., Tensor], order: int) -> str:
    name = getattr(f, "__name__", type(f).__name__)
    name = "f" if name == "<lambda>" else name
    return f"backward of {name} to order {order}"


def _colour(k: int) -> str:
    return COLOURS[k % len(COLOURS)]
