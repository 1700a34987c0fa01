"""A captured product cut in two graphs: one that depends on the point alone, and one that is linear in the vector."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.func import functionalize, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from hodiff.derivatives.capture.graph_trace import trace
from hodiff.derivatives.capture.reads import CONDITIONS
from hodiff.derivatives.capture.refusals import VectorReadError
from hodiff.kernels.narrow import NARROW
from hodiff.torch_internals.compilers.dynamic_shapes import OpenSizes

Leaves = tuple[Tensor, ...]


@dataclass(frozen=True)
class SplitGraph:
    """A graph in two halves: from constants to residuals, and from residuals and tangents to products.

    Attributes:
        point: The first half.
        linear: The second half.
        residuals: Number of residuals: tensors, and numbers computed from open sizes.
        sizes: The sizes that were left open, if any.
    """

    point: fx.GraphModule
    linear: fx.GraphModule
    residuals: int
    sizes: OpenSizes | None = None

    def serves(self, constants: Leaves, tangents: Leaves) -> bool:
        """Whether the graph is right for inputs of other sizes."""
        return self.sizes is not None and self.sizes.hold((*constants, *tangents))


def capture(
    product: Callable[..., Sequence[Tensor]],
    constants: Leaves,
    tangents: Leaves,
    places: Mapping[int, int] | None = None,
) -> SplitGraph:
    """Trace a product of (constants, tangents), linear in the latter, and split it.

    Args:
        product: The product.
        constants: Inputs that do not change from product to product.
        tangents: The vector that is multiplied.
        places: Dimension left open for each constant, by its position, if the graph has to support other sizes.

    Returns:
        The halves; the sizes are open as far as the function allows it.
    """
    count = len(constants)
    inputs = (*constants, *tangents)
    sizes = OpenSizes(inputs, places) if places else None
    halves = split(trace(lambda *all_: product(all_[:count], all_[count:]), inputs, sizes), count)
    return replace(halves, sizes=sizes) if sizes is not None and sizes.are_open else halves


def split(traced: fx.GraphModule, constants: int) -> SplitGraph:
    """Cut a graph along the edges from nodes that depend only on its first inputs to nodes that depend on later ones.

    Args:
        traced: The graph.
        constants: The number of first inputs.

    Returns:
        Both halves; the first checks the numbers that the function read.

    Raises:
        VectorReadError: If the function read numbers that depend on later inputs.
    """
    nodes = list(traced.graph.nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    outputs = pytree.tree_leaves(next(node for node in nodes if node.op == "output").args)
    moving = set(inputs[constants:])
    for node in nodes:
        if node.op == "call_function" and not moving.isdisjoint(node.all_input_nodes):
            moving.add(node)
            if node.target in CONDITIONS:
                raise VectorReadError(str(node.args[-1]))
    computed = [node for node in nodes if node in moving and node.op != "placeholder"]
    edge = dict.fromkeys(
        source for node in computed for source in node.all_input_nodes if source not in moving
    ) | dict.fromkeys(each for each in outputs if isinstance(each, fx.Node) and each not in moving)

    point, linear = fx.Graph(), fx.Graph()
    at_point: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        if node not in moving and node.op != "output":
            at_point[node] = point.node_copy(node, at_point.__getitem__)
    point.output(tuple(at_point[node] for node in edge))
    point.eliminate_dead_code()
    in_linear: dict[fx.Node, fx.Node] = {}
    for kind, sources in (("residual", edge), ("tangent", inputs[constants:])):
        for i, source in enumerate(sources):
            in_linear[source] = linear.placeholder(f"{kind}_{i}")
            in_linear[source].meta = source.meta
    for node in computed:
        in_linear[node] = linear.node_copy(node, in_linear.__getitem__)
    linear.output(tuple(in_linear[each] if isinstance(each, fx.Node) else each for each in outputs))
    return SplitGraph(fx.GraphModule(traced, point), fx.GraphModule({}, linear), len(edge))


def widen(linear: fx.GraphModule, residuals: Leaves, tangents: Leaves) -> fx.GraphModule:
    """Vectorize the linear half for one vector to k vectors at once, leaves (k, *shape)."""
    constant = len(residuals)
    # Some of torch's formulas write in place, and have no batching rules.
    linear = make_fx(functionalize(linear), tracing_mode="fake")(*residuals, *(v[0] for v in tangents))

    def wide(*inputs: Any) -> Any:
        return vmap(linear, in_dims=(*(None,) * constant, *(0,) * len(tangents)))(*inputs)

    graph = make_fx(wide, tracing_mode="fake")(*residuals, *tangents)
    _fold_shared_factors(graph)
    return graph


def stand_ins(graph: fx.GraphModule) -> list[Any]:
    """Return the values that represented a graph's inputs while it was traced."""
    return [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]


def _fold_shared_factors(graph: fx.GraphModule) -> None:
    """Replace a batch of narrow products that share a factor by one product, which libraries compute far faster."""
    aten = torch.ops.aten
    for node in list(graph.graph.nodes):
        if node.op != "call_function" or node.target is not aten.bmm.default:
            continue
        left, right = node.args
        k, inner, columns = right.meta["val"].shape
        if columns >= NARROW or not _is_shared(left):
            continue
        with graph.graph.inserting_before(node):
            call = graph.graph.call_function
            # (a V_j)^T = V_j^T a^T for all j: stack the rows of all V_j^T.
            rows = call(aten.reshape.default, (call(aten.permute.default, (right, [0, 2, 1])), [k * columns, inner]))
            matrix = call(aten.permute.default, (call(aten.select.int, (left, 0, 0)), [1, 0]))
            product = call(aten.reshape.default, (call(aten.mm.default, (rows, matrix)), [k, columns, -1]))
            back = call(aten.permute.default, (product, [0, 2, 1]))
            # Later nodes were traced for a contiguous result.
            result = call(aten.clone.default, (back,), {"memory_format": torch.contiguous_format})
        node.replace_all_uses_with(result)
    graph.graph.eliminate_dead_code()
    graph.recompile()


def _is_shared(node: Any) -> bool:
    """Whether the node is one matrix, expanded k times."""
    value = node.meta["val"]
    return bool(value.shape[0] > 1 and value.stride(0) == 0)
