"""Reads of tensor values during a trace: answered by evaluating the graph so far, and kept as conditions.

Operators in captured graphs that raise if a number that the function read leads to another branch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, fx
from torch.fx.node import has_side_effect

from hodiff.derivatives.capture.refusals import HiddenTensorError, RandomNumbersError, line_now
from hodiff.torch_internals.compilers.tracing import graph_so_far, node_of, outside_of_trace
from hodiff.torch_internals.interception import EagerDispatchMode
from hodiff.torch_internals.operators import number as number_of
from hodiff.torch_internals.operators import zeros_without_memory

# Operators live as long as the library that defines them.
_LIBRARY = torch.library.Library("hodiff", "FRAGMENT")


class OtherBranchError(Exception):
    """A graph was run with numbers for which the function would take another branch.

    Args:
        where: The line that read the number.
        known: The value that the graph was made for.
        found: The value now.
    """

    def __init__(self, where: str, known: Any, found: Any):
        super().__init__(f"{where} read {known!r}, and now {found!r}")
        self.where, self.known, self.found = where, known, found


def _require(x: Tensor, number: Any, where: str) -> None:
    found = x.item()
    # NaN equals nothing, but matches NaN here.
    if found != number and not (found != found and number != number):
        raise OtherBranchError(where, number, found)


def _indices(mask: Tensor, count: int, where: str) -> Tensor:
    found = mask.nonzero()
    if len(found) != count:
        raise OtherBranchError(where, count, len(found))
    return found


_LIBRARY.define("require(Tensor x, Scalar number, str where) -> ()")
_LIBRARY.impl("require", _require, "CompositeExplicitAutograd")
_LIBRARY.impl("require", lambda x, number, where: None, "Meta")
_LIBRARY.define("indices(Tensor mask, int count, str where) -> Tensor")
_LIBRARY.impl("indices", _indices, "CompositeExplicitAutograd")
_LIBRARY.impl(
    "indices",
    lambda mask, count, where: mask.new_empty_strided((count, mask.dim()), (1, count), dtype=torch.int64),
    "Meta",
)

# `require(x, number, where)` raises unless the one element of x is that number.
require = torch.ops.hodiff.require.default
# `indices(mask, count, where)` is `mask.nonzero()`, and raises unless it has `count` rows.
indices = torch.ops.hodiff.indices.default

# Dead code elimination must keep them although nothing uses their results.
CONDITIONS = tuple(map(has_side_effect, (require, indices)))


T = TypeVar("T")

aten = torch.ops.aten


class Reads(EagerDispatchMode):
    """A mode that lets a traced function read numbers, and writes conditions on these numbers into the graph.

    Args:
        inputs: The real tensors that the inputs without data represent.
    """

    supports_higher_order_operators = True
    makes_last_graph = True

    def __init__(self, inputs: Sequence[Tensor]):
        super().__init__()
        self._known = _Computed(inputs)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer operators that read numbers, and pass all others on to the tracer."""
        kwargs = kwargs or {}
        answer = _ANSWERS.get(func)
        if answer is not None:
            return answer(self, *args, **kwargs)
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            raise RandomNumbersError(str(func))
        return func(*args, **kwargs)

    def number(self, x: Tensor) -> Any:
        """Return the one element of a tensor."""
        node, constant = node_of(x)
        if constant:
            return number_of(x)
        number = self._known.asked(x, node, Tensor.item)
        require(x, number, line_now())
        return number

    def truth(self, x: Tensor) -> bool:
        """Whether the one element of a tensor is not zero."""
        return bool(self.number(aten.ne.Scalar(x, 0)))

    def same(self, x: Tensor, y: Tensor) -> bool:
        """Whether two tensors are equal."""
        return x.shape == y.shape and bool(self.number(aten.all.default(aten.eq.Tensor(x, y))))

    def places(self, mask: Tensor) -> Tensor:
        """Return the indices of nonzero elements; the graph computes them again, and requires the same count."""
        node, _ = node_of(mask)
        return indices(mask, self._known.asked(mask, node, lambda real: int(real.count_nonzero())), line_now())

    def picked(self, x: Tensor, index: Sequence[Tensor | None]) -> Tensor:
        """Compute `x[index]`, where `index` may contain masks."""
        whole: list[Tensor | None] = []
        for each in index:
            masks = each is not None and each.dim() and each.dtype in (torch.bool, torch.uint8)
            whole += self.places(each).unbind(1) if masks else [each]  # type: ignore[arg-type]
        return aten.index.Tensor(x, whole)

    def selected(self, x: Tensor, mask: Tensor) -> Tensor:
        """Compute `x.masked_select(mask)`."""
        x, mask = torch.broadcast_tensors(x, mask)
        return self.picked(x, [mask])

    def repeated(self, repeats: Tensor, *, output_size: int | None = None) -> Tensor:
        """Return the index of each place, as many times as `repeats` says there."""
        size = int(self.number(repeats.sum())) if output_size is None else output_size
        return aten.repeat_interleave.Tensor(repeats, output_size=size)

    def zeros(self, *args: Any, **options: Any) -> Tensor:
        """Return zeros with memory instead of zeros without, which compiled code would read."""
        return aten.zeros.default(*args, **options)


# Operators that read numbers or memory, and the methods that answer them.
_ANSWERS: dict[Any, Callable[..., Any]] = {
    number_of: Reads.number,
    aten.item.default: Reads.number,  # in inference mode
    aten.is_nonzero.default: Reads.truth,
    aten.equal.default: Reads.same,
    aten.nonzero.default: Reads.places,
    aten.index.Tensor: Reads.picked,
    aten.masked_select.default: Reads.selected,
    aten.repeat_interleave.Tensor: Reads.repeated,
    zeros_without_memory: Reads.zeros,
}


class _Computed:
    """Values of the graph that is being made; its operators run once, in order, when a value is first needed."""

    def __init__(self, inputs: Sequence[Tensor]):
        self._inputs = iter(inputs)
        self._values: dict[fx.Node, Any] = {}

    def asked(self, x: Tensor, node: fx.Node | None, question: Callable[[Tensor], T]) -> T:
        """Apply a question to the value of a traced tensor."""
        if node is None:
            raise HiddenTensorError(x)
        graph, root = graph_so_far()
        with outside_of_trace():
            # Evaluate all nodes in order, because some write into the results of others.
            for each in list(graph.nodes)[len(self._values) :]:
                self._values[each] = self._value(each, root)
            return question(self._values[node])

    def _value(self, node: fx.Node, root: Any) -> Any:
        if node.op == "placeholder":
            return next(self._inputs)
        if node.op == "get_attr":
            return getattr(root, str(node.target))
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._values.__getitem__)
        return node.target(*args, **kwargs)  # type: ignore[operator]
