"""Reverse-over-reverse by `torch.autograd`: record the gradient once, then pull back any number of cotangents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.func import vmap
from torch.utils import _pytree as pytree

from hodiff.common.trees import PyTree
from hodiff.corrections import Corrections
from hodiff.corrections.rules.distances.lengths import receiver_of_a_kink
from hodiff.derivatives.bound_function import BoundFunction
from hodiff.distributed.regathering import free_gathered
from hodiff.errors import RouteError
from hodiff.graphs import coarsest_eps, cotangent_bytes
from hodiff.recompute.recording import Recording
from hodiff.torch_internals.autograd.grad_mode import gradients_of
from hodiff.torch_internals.autograd.graph_nodes import function_name
from hodiff.torch_internals.wording import Wording, says


class RecordedGradient:
    """The gradient of a scalar function at a point, with the graph that computed it.

    Args:
        function: The function, bound at its point.
        tangents: The vectors of the products, if products may need a graph in them.
        numbers: Whether the gradient's numbers are wanted.
        recording: The result of `recorded_value`, if it ran already.

    Attributes:
        value: The function's value.
        aux: The function's auxiliary output.
        gradient: With `numbers`, the gradient of each leaf; else empty, as its memory outlives the recording.
        primals: The leaves as the function saw them.
        edges: Graph edges of the gradient of each leaf; None if the gradient is constant.
        connected: Whether products carry a graph, because outside code may differentiate them.
    """

    gradient: tuple[Tensor, ...] = ()

    def __init__(
        self,
        function: BoundFunction,
        tangents: Sequence[Tensor] = (),
        *,
        numbers: bool = False,
        recording: Recording[tuple[Tensor, PyTree]] | None = None,
    ):
        if function.sharded is None:
            recording, gradient = self._record(function, tangents, recording)
        else:
            recording, gradient = function.recorded(lambda: self._record(function, tangents, recording))
        value, aux = recording.result
        self.primals, self.connected = recording.operands, recording.connected
        if all(leaf is None for leaf in gradient):
            raise function.independent()
        self.edges = tuple([None if g is None or not g.requires_grad else get_gradient_edge(g) for g in gradient])
        if numbers:
            # A leaf that the function ignores has no gradient, and its zeros have no graph.
            filled = [torch.zeros_like(p) if g is None else g for p, g in zip(self.primals, gradient, strict=True)]
            self.gradient = tuple(g if self.connected else g.detach() for g in filled)
        self.value = value if numbers and self.connected else value.detach()
        self.aux = aux if self.connected or not function.has_aux else pytree.tree_map_only(Tensor, Tensor.detach, aux)

    @staticmethod
    def _record(
        function: BoundFunction, tangents: Sequence[Tensor], recording: Recording[tuple[Tensor, PyTree]] | None
    ) -> tuple[Recording[tuple[Tensor, PyTree]], tuple[Tensor | None, ...]]:
        """Record the value and its gradient; raise if a derivative of the gradient would be wrong."""
        recording = recording or recorded_value(function, tangents, many=not tangents)
        value, _ = recording.result
        if not value.requires_grad:
            raise function.independent()
        once = recording.inspect(value)
        if once is not None:
            raise NotImplementedError(f"{once}, so its derivative is not recorded")
        if (node := receiver_of_a_kink(recording.functions or ())) is not None:
            raise RouteError(
                f"{function.caller}: expected custom Functions that receive no length, distance or deviation that is 0 "
                f"somewhere, got {function_name(node)} with one; its second derivatives at the zeros are unknown. "
                "Pass the square, leave the zeros out, or write the function with torch's operators."
            )
        return recording, recording.gradients([value], graph=True, curved=True)

    @property
    def live_edges(self) -> list[GradientEdge]:
        """Graph edges of the gradients that are not constant."""
        return [edge for edge in self.edges if edge is not None]

    @property
    def bytes_each(self) -> int:
        """Bytes of one product's intermediate results: a cotangent for each result, and as much again in flight."""
        return 2 * cotangent_bytes(*self.live_edges)

    @property
    def eps(self) -> float:
        """Machine epsilon of the coarsest dtype in which the gradient was computed."""
        return coarsest_eps(*self.live_edges)

    def product(self, tangents: Sequence[Tensor], *, keep: bool = False) -> tuple[Tensor, ...]:
        """Compute the product `H v`; without `keep` the graph is freed, so this must be the last product."""
        live = [v for edge, v in zip(self.edges, tangents, strict=True) if edge is not None]
        products = self._pull(self.live_edges, live, self.primals, retain_graph=keep)
        return tuple([
            torch.zeros_like(primal) if p is None else p for p, primal in zip(products, self.primals, strict=True)
        ])

    def products(self, tangents: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Compute products with k vectors at once; `tangents` and the results have shapes (k, *leaf shape)."""
        live = [v for edge, v in zip(self.edges, tangents, strict=True) if edge is not None]
        if not live:
            return tuple(map(torch.zeros_like, tangents))
        rows = self._batched(self.live_edges, live, self.primals)
        return tuple(torch.zeros_like(v) if row is None else row for v, row in zip(tangents, rows, strict=True))

    def rows(self, index: int, basis: Tensor, wanted: Sequence[int]) -> tuple[Tensor | None, ...]:
        """Pull `basis` (k, *leaf shape) back from one leaf's gradient to the wanted leaves: rows of the Hessian."""
        edge = self.edges[index]
        primals = [self.primals[i] for i in wanted]
        return (None,) * len(primals) if edge is None else self._batched([edge], [basis], primals)

    def _batched(
        self, outputs: Sequence[GradientEdge], cotangents: Sequence[Tensor], primals: Sequence[Tensor]
    ) -> tuple[Tensor | None, ...]:
        return pull_batch(lambda *rows: self._pull(outputs, rows, primals), cotangents)

    def _pull(
        self,
        outputs: Sequence[GradientEdge],
        cotangents: Sequence[Tensor],
        primals: Sequence[Tensor],
        *,
        retain_graph: bool = True,
    ) -> tuple[Tensor | None, ...]:
        if not outputs:
            return (None,) * len(primals)
        found = gradients_of(outputs, primals, cotangents, keep=retain_graph or self.connected, graph=self.connected)
        free_gathered()
        return found


def recorded_value(
    function: BoundFunction, tangents: Sequence[Tensor] = (), *, many: bool = False
) -> Recording[tuple[Tensor, PyTree]]:
    """Record value and aux with a graph whose gradient can be recorded; `many` is as in `Corrections`."""
    mode = Corrections(lean=True, many=many)
    others = (*function.constants(), *tangents)
    return Recording(lambda primals: function.scalar(primals, mode), function.leaves, others, roots=function.roots)


G = TypeVar("G", bound="Tensor | None")

# Errors of a pullback that works for one cotangent but not for a batch.
_ONE_BY_ONE = (
    Wording.BATCHING,
    Wording.SPARSE,
    Wording.JAGGED,
    Wording.REQUIRES_GRAD_INSIDE,
    Wording.NO_SETUP_CONTEXT,
    Wording.NO_VMAP,
)


def pull_batch(
    pull: Callable[..., Sequence[G]], cotangents: Sequence[Tensor], *, randomness: str = "error"
) -> tuple[G, ...]:
    """Run a pullback for each row of its cotangents, for all rows together if torch can.

    Args:
        pull: Maps one row of each cotangent to gradients; None means zero, which must not depend on the row.
        cotangents: Tensors (k, ...).
        randomness: As in `torch.func.vmap`.

    Returns:
        The results of `pull`, with shapes (k, ...).

    Raises:
        RuntimeError: If the pullback raises for another reason than a missing batching rule.
    """
    if len(cotangents[0]) == 1:  # a batch of one costs up to 1.5 times as much
        one: list[Any] = [
            None if p is None else p.unsqueeze(0) for p in pull(*[each.squeeze(0) for each in cotangents])
        ]
        return tuple(one)
    used: list[int] = []
    number = 0

    def present(*rows: Tensor) -> list[Tensor]:
        nonlocal number
        pulled = pull(*rows)
        number = len(pulled)
        used[:] = [i for i, p in enumerate(pulled) if p is not None]
        return [p for p in pulled if p is not None]

    # Not is_grads_batched=True: it leaves torch's batching rules for tanh, log_softmax and others unloaded, and
    # loops over the directions there.
    try:
        found = vmap(present, randomness=randomness)(*cotangents)
    except RuntimeError as error:
        if not says(error, *_ONE_BY_ONE):
            raise
        found = [torch.stack(column) for column in zip(*map(present, *cotangents), strict=True)]
    result: list[Any] = [None] * number
    for i, each in zip(used, found, strict=True):
        result[i] = each
    return tuple(result)
