"""Pictures: a function of one number with its derivatives, and the graph that backward walks at each order."""

from __future__ import annotations

import importlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from scipy.differentiate import derivative
from torch import Tensor
from torch.utils import _pytree as pytree

from hodiff.derivatives.trees import PyTree, flatten_primals, leaf_names
from hodiff.errors import HodiffError, InputError

if TYPE_CHECKING:
    from graphviz import Digraph
    from matplotlib.axes import Axes

DOTS = 25  # SciPy's points along the axis
COLOURS = ("#cfe2f3", "#fce5cd", "#d9ead3", "#ead1dc", "#fff2cc")  # of the nodes, by order
RAISES = "#e06666"


def derivatives(
    f: Callable[[Tensor], Tensor],
    low: float,
    high: float,
    *,
    order: int = 2,
    points: int = 400,
    ax: Axes | None = None,
) -> Axes:
    r"""Draw a function of one number and its derivatives, with finite differences dotted over them.

    The curves are $f, f', \dots, f^{(k)}$ by nested reverse mode. The dots over $f^{(j)}$ are SciPy's differences of
    $f^{(j-1)}$, the curve before, so that each curve is checked by one that was checked. Dots beside their curve mean
    that the derivative is wrong, or that there is none.

    Args:
        f: Maps a float64 tensor of shape () to a tensor with one element.
        low: Left end of the interval.
        high: Right end of the interval.
        order: The highest order k, 0 or more.
        points: Points of each curve, 2 or more.
        ax: The matplotlib axes to draw in; new ones by default.

    Returns:
        The axes; `ax.figure` is the figure.

    Raises:
        InputError: If the interval or a count is out of range, or f does not return one number.

    Example:
        >>> import matplotlib as mpl, torch
        >>> mpl.use("Agg")
        >>> ax = derivatives(torch.tanh, -3, 3)
        >>> [text.get_text() for text in ax.get_legend().get_texts()]
        ['$f$', "$f'$", "$f''$", 'differences by SciPy']

    Source: `scipy.differentiate.derivative`, eighth-order central differences with shrinking steps.
    """
    _require_interval(low, high)
    _require_int("derivatives", "order", order, 0)
    _require_int("derivatives", "points", points, 2)
    grid = torch.linspace(low, high, points, dtype=torch.float64)
    curves = _tower(f, grid, order)
    step = (high - low) / (2 * DOTS)
    dots = low + step * np.arange(1, 2 * DOTS, 2)

    if ax is None:
        ax = _require("matplotlib.pyplot", "derivatives", 'pip install "hodiff[plot]"').subplots(layout="constrained")[
            1
        ]
    for k, curve in enumerate(curves):
        (line,) = ax.plot(grid.numpy(), curve.numpy(), label=_prime(k))
        if k > 0:
            ax.plot(dots, _differences(f, k, dots, step), ".", color=line.get_color(), label="_differences")
    _add_legend(ax, with_dots=order > 0)
    ax.set_xlabel("$x$")
    return ax


def graph(f: Callable[..., Tensor], x: PyTree, *, order: int = 2, saved: bool = False) -> Digraph:
    r"""Draw the nodes that backward walks for the first, second, ... derivative of a scalar function.

    Order 1 are the nodes under $f(x)$. Order k are those that appear when the derivative before, contracted with ones,
    is computed with `create_graph=True`: $\nabla f$, then $\nabla^2 f \, 1$, and so on. Arrows point the way that
    backward goes. Nodes are coloured by the order at which they first appear. Custom Functions have a thick border,
    leaves are ellipses, and where backward would raise, as under `once_differentiable` or for an operator without
    a second derivative, nodes are red. An order without nodes has a derivative that autograd takes for constant.

    Args:
        f: Maps x to a tensor with one element.
        x: A tensor or a pytree of tensors, real and floating-point.
        order: The highest order, 1 or more.
        saved: Whether nodes list the shapes of the tensors that they keep.

    Returns:
        The graph. Notebooks show it and `.render("file")` writes it, both by the program `dot` of Graphviz, which
        `.source` does not need. Nodes are called by what they do and a number, as `MulBackward0_0`.

    Raises:
        InputError: If x holds no differentiable tensor, or f does not return one number that depends on it.

    Example:
        >>> import torch
        >>> picture = graph(lambda x: x.sin().sum(), torch.ones(3))
        >>> [name for name in ("SinBackward0_0", "CosBackward0_0") if name in picture.source]
        ['SinBackward0_0', 'CosBackward0_0']
    """
    _require_int("graph", "order", order, 1)
    leaves, spec = flatten_primals(x, "graph", "x")
    leaves = tuple(leaf.detach().clone().requires_grad_() for leaf in leaves)
    names = {id(leaf): f"x{name}" for leaf, name in zip(leaves, leaf_names(x), strict=True)}
    graphviz = _require("graphviz", "graph", "pip install graphviz")

    picture = graphviz.Digraph(
        "backward",
        graph_attr={"label": _key(order), "labelloc": "b"},
        node_attr={"shape": "box", "style": "filled", "fontname": "Helvetica"},
    )
    drawing = _Drawing(picture, names, saved)
    for k, roots in enumerate(_roots(f, leaves, spec, order), start=1):
        if isinstance(roots, RuntimeError):
            message = str(roots).partition("\n")[0]
            picture.node(f"order{k}_raises", _text(f"order {k} raises", message), fillcolor=RAISES)
            break
        for index, root in enumerate(roots):
            if root is None:
                continue
            result = f"order{k}_{index}"
            picture.node(result, _result_label(k, names[id(leaves[index])]), shape="plaintext", style="")
            picture.edge(result, drawing.add(root, COLOURS[(k - 1) % len(COLOURS)]))
    return picture


def _tower(f: Callable[[Tensor], Tensor], points: Tensor, order: int) -> list[Tensor]:
    """Compute f and its derivatives at each point, one by one, so that nothing is asked of f but double backward."""
    x = points.detach().requires_grad_()
    with torch.enable_grad():
        rows = [torch.stack([_one_number("derivatives", f(each)) for each in x.unbind()])]
        for _ in range(order):
            rows.append(_slope(rows[-1], x))
    return [row.detach().double() for row in rows]


def _slope(y: Tensor, x: Tensor) -> Tensor:
    if not y.requires_grad:
        return torch.zeros_like(x)
    return torch.autograd.grad(y.sum(), x, create_graph=True, materialize_grads=True)[0]


def _differences(f: Callable[[Tensor], Tensor], order: int, dots: np.ndarray, step: float) -> np.ndarray:
    """SciPy's derivative of the derivative before. No point is further than a step away, so inside of the interval."""

    def before(x: np.ndarray) -> np.ndarray:
        return _tower(f, torch.from_numpy(x.reshape(-1)), order - 1)[-1].numpy().reshape(x.shape)

    with np.errstate(all="ignore"):  # at a pole the dot is missing, and that says enough
        return np.asarray(derivative(before, dots, initial_step=step).df)


def _prime(order: int) -> str:
    return f"$f{chr(39) * order}$" if order < 4 else f"$f^{{({order})}}$"


def _add_legend(ax: Axes, *, with_dots: bool) -> None:
    handles = ax.get_legend_handles_labels()[0]
    if with_dots:
        lines = importlib.import_module("matplotlib.lines")
        handles.append(lines.Line2D([], [], color="gray", marker=".", linestyle="", label="differences by SciPy"))
    ax.legend(handles=handles)


def _roots(
    f: Callable[..., Tensor], leaves: Sequence[Tensor], spec: pytree.TreeSpec, order: int
) -> Iterator[list[Any] | RuntimeError]:
    """Where backward starts at each order: under f, then under its gradient by each leaf, until there is none."""
    with torch.enable_grad():
        y = _one_number("graph", f(pytree.tree_unflatten(list(leaves), spec)))
        if not y.requires_grad:
            raise InputError(
                "graph: f: expected a function that depends on x, got a constant; look for detach, .data, .item() and "
                "NumPy in f."
            )
        yield [y.grad_fn]
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


class _Drawing:
    """Nodes as they are drawn. It holds them, as their identity lasts only as long as somebody does."""

    def __init__(self, picture: Digraph, names: dict[int, str], saved: bool):
        self._picture = picture
        self._names = names
        self._saved = saved
        self._drawn: dict[Any, str] = {}
        self._count: Counter[str] = Counter()

    def add(self, root: Any, colour: str) -> str:
        """Draw a node and all that are reached from it and not drawn yet; return its name."""
        waiting: list[Any] = []

        def visit(node: Any) -> str:
            if node not in self._drawn:
                stem = node.name().rpartition("::")[2]
                self._drawn[node] = f"{stem}_{self._count[stem]}"
                self._count[stem] += 1
                self._picture.node(self._drawn[node], **_look(node, self._names, colour, self._saved))
                waiting.append(node)
            return self._drawn[node]

        name = visit(root)
        while waiting:
            node = waiting.pop()
            for following, _ in () if _raises(node) else node.next_functions:
                if following is not None:
                    self._picture.edge(self._drawn[node], visit(following))
        return name


def _look(node: Any, names: dict[int, str], colour: str, saved: bool) -> dict[str, str]:
    if hasattr(node, "variable"):
        leaf = node.variable
        return {"label": _text(names.get(id(leaf), "leaf"), str(tuple(leaf.shape))), "shape": "ellipse", "style": ""}
    label = _text(node.name().rpartition("::")[2], *(_saved_shapes(node) if saved else ()))
    if _raises(node):
        return {"label": label, "fillcolor": RAISES}
    own = isinstance(node, torch.autograd.function.BackwardCFunction)
    return {"label": label, "fillcolor": colour, "penwidth": "3" if own else "1"}


def _raises(node: Any) -> bool:
    return node.name() in {"torch::autograd::Error", "torch::autograd::NotImplemented"}


def _saved_shapes(node: Any) -> list[str]:
    """What a node keeps: a Function's tensors have no names, an operator's have."""
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        kept = [("saved", tensor) for tensor in node.saved_tensors]
    else:
        kept = [(name.removeprefix("_saved_"), getattr(node, name)) for name in dir(node) if name.startswith("_saved_")]
    return [f"{name} {tuple(value.shape)}" for name, value in kept if isinstance(value, Tensor)]


def _result_label(order: int, name: str) -> str:
    if order == 1:
        return "f"
    power = "" if order == 2 else str(order - 1).translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return _text(f"∇{power}f{' · 1' * (order - 2)} by {name}")


def _text(*lines: str) -> str:
    """A label of several lines, in which names keep their backslashes."""
    return r"\n".join(line.replace("\\", "\\\\") for line in lines)


def _key(order: int) -> str:
    cells = "".join(f'<td bgcolor="{COLOURS[k % len(COLOURS)]}">order {k + 1}</td>' for k in range(order))
    return f'<<table border="0" cellborder="1" cellspacing="0"><tr>{cells}</tr></table>>'


def _one_number(function: str, y: Any) -> Tensor:
    if isinstance(y, Tensor) and y.numel() == 1 and y.is_floating_point():
        return y.reshape(()) if y.dim() else y
    got = f"shape {tuple(y.shape)} of {y.dtype}" if isinstance(y, Tensor) else type(y).__name__
    raise InputError(f"{function}: f: expected one real floating-point number in a tensor, got {got}.")


def _require_interval(low: float, high: float) -> None:
    ends = [isinstance(end, (int, float)) and not isinstance(end, bool) and math.isfinite(end) for end in (low, high)]
    if not all(ends) or not low < high:
        raise InputError(f"derivatives: low, high: expected finite numbers with low < high, got {low!r} and {high!r}.")


def _require_int(function: str, name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputError(f"{function}: {name}: expected an int of {least} or more, got {value!r}.")


def _require(module: str, function: str, remedy: str) -> Any:
    """Import an optional package, or say how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise HodiffError(f"{function}: needs {module.partition('.')[0]}, which is not installed; {remedy}.") from None
