"""A model's Jacobian at a point, recorded once, for products with the Jacobian and its transpose."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils import _pytree as pytree

from hodiff.common.trees import PyTree, describe
from hodiff.corrections import Corrections
from hodiff.derivatives.bound_function import BoundFunction
from hodiff.derivatives.recorded_gradient import pull_batch
from hodiff.distributed.regathering import free_gathered
from hodiff.errors import InputError
from hodiff.graphs import cotangent_bytes, nodes_of
from hodiff.recompute.recording import Recording
from hodiff.torch_internals.autograd.grad_mode import gradients_of
from hodiff.torch_internals.autograd.graph_nodes import raises_when_run
from hodiff.torch_internals.tensors import stands_for_tensor

Leaves = tuple[Tensor, ...]


class RecordedModel:
    r"""The outputs $z(x)$ with the graphs of $u \mapsto J^\top u$ and of its own transpose, $v \mapsto J v$.

    The pullback is linear in its cotangent, so reverse mode through the pullback is forward mode through the model. The
    primal is not computed again, and no forward rule is needed.

    Args:
        function: The model, bound at its point.
        recording: A recorded run of the model, if it ran already.

    Attributes:
        outputs: Leaves of the model's result, detached.
        spec: Structure of the result.
        bytes_each: Bytes of intermediate results for one vector.
        weight: Weight of this rank's outputs among those of all ranks.
    """

    # Without grad mode, a subclass of Tensor is created through a view that cuts the graph.
    @torch.enable_grad()
    def __init__(self, function: BoundFunction, recording: Recording[tuple[PyTree, PyTree]] | None = None):
        self.weight = 1.0 if function.sharded is None else function.sharded.own_weight
        function.recorded(lambda: self._record(function, recording))
        if lacks_derivatives(*self._pulled):
            self.push([torch.zeros_like(leaf) for leaf in self._primals])

    def _record(self, function: BoundFunction, recording: Recording[tuple[PyTree, PyTree]] | None) -> None:
        mode = Corrections(lean=True, many=True)
        recording = recording or Recording(
            lambda primals: function(primals, mode), [leaf.detach() for leaf in function.leaves]
        )
        self._primals = recording.operands
        leaves, self.spec = pytree.tree_flatten(recording.result[0])
        for leaf in leaves:
            if not isinstance(leaf, Tensor) or stands_for_tensor(leaf) or not leaf.is_floating_point():
                raise InputError(
                    f"{function.caller}: the model must return real floating-point tensors, got {describe(leaf)}; "
                    "return only outputs to differentiate."
                )
        if not any(leaf.requires_grad for leaf in leaves):
            raise function.independent()
        # An output without a graph gets one, so that all outputs are treated alike.
        self._outputs = tuple(leaf if leaf.requires_grad else leaf.clone().requires_grad_() for leaf in leaves)
        for leaf in self._outputs:
            once = recording.inspect(leaf)
            if once is not None:
                raise NotImplementedError(f"{once}, so its transpose is not recorded")
        self._cotangents = tuple(torch.ones_like(leaf, requires_grad=True) for leaf in self._outputs)
        pulled = recording.gradients(self._outputs, self._cotangents, graph=True)
        # The outputs may depend on tensors that the model closes over, and not on the point.
        if all(each is None for each in pulled):
            raise function.independent()
        live = {i: each for i, each in enumerate(pulled) if each is not None and each.requires_grad}
        self._live = list(live)
        # The gradients' values are not needed, and take as much memory as the parameters.
        self._pulled = [get_gradient_edge(each) for each in live.values()]
        self.outputs: Leaves = tuple(leaf.detach() for leaf in self._outputs)
        self.bytes_each = 2 * cotangent_bytes(*self._pulled)

    def push(self, tangents: Sequence[Tensor]) -> Leaves:
        """Compute the product `J v`."""
        found = self._push(*(tangents[i] for i in self._live))
        return tuple(torch.zeros_like(z) if each is None else each for each, z in zip(found, self.outputs, strict=True))

    def pull(self, cotangents: Sequence[Tensor]) -> Leaves:
        """Compute the product `J^T u`."""
        found = self._pull(*cotangents)
        return tuple(
            torch.zeros_like(p) if each is None else each for each, p in zip(found, self._primals, strict=True)
        )

    def push_many(self, tangents: Sequence[Tensor]) -> Leaves:
        """Compute products `J v` for leaves (k, *shape)."""
        found = pull_batch(self._push, [tangents[i] for i in self._live])
        return _filled(found, self.outputs, tangents[0].shape[0])

    def pull_many(self, cotangents: Sequence[Tensor]) -> Leaves:
        """Compute products `J^T u` for leaves (k, *shape)."""
        return _filled(pull_batch(self._pull, cotangents), self._primals, cotangents[0].shape[0])

    def _push(self, *tangents: Tensor) -> tuple[Tensor | None, ...]:
        found = gradients_of(self._pulled, self._cotangents, tangents, keep=True)
        free_gathered()
        return found

    def _pull(self, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        found = gradients_of(self._outputs, self._primals, cotangents, keep=True)
        free_gathered()
        return found


def lacks_derivatives(*outputs: Tensor | GradientEdge) -> bool:
    """Whether torch may lack the derivative of an operator in a graph, so that products raise."""
    return any(map(raises_when_run, nodes_of(*outputs)))


def _filled(found: Sequence[Tensor | None], like: Sequence[Tensor], k: int) -> Leaves:
    """Replace missing results by zeros (k, *shape)."""
    return tuple(z.new_zeros(k, *z.shape) if each is None else each for each, z in zip(found, like, strict=True))
