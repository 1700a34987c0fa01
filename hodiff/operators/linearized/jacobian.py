"""The Jacobian of a function as an operator."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hodiff.common.chunks import resolve_chunk_size, spans
from hodiff.common.module_state import untouched
from hodiff.common.options import require_chunk_size
from hodiff.common.trees import PyTree, as_point, flatten_primals
from hodiff.derivatives.bound_function import bind, leave_inference_mode
from hodiff.derivatives.route_choice import refused
from hodiff.errors import InputError
from hodiff.operators.data.determinism import read_unchanged
from hodiff.operators.data.watched_point import Point
from hodiff.operators.linear.constant_points import require_constant
from hodiff.operators.linear.conversion import Conversion, Portable
from hodiff.operators.linear.linear_operator import LinearOperator
from hodiff.operators.linear.spaces import Space
from hodiff.operators.linearized.recorded_model import RecordedModel
from hodiff.recompute.reachable import modules_in
from hodiff.torch_internals.autograd.transforms import in_transform, outside_transforms


class JacobianOperator(Portable, LinearOperator):
    r"""The Jacobian of a function at a point, given by products with it and with its transpose.

    $$ A v = \frac{\partial f}{\partial x}(x)\, v, \qquad A^\top u $$

    The function is evaluated once, when the operator is made; products in both directions share the graph, so
    that random numbers are those of one draw. Forward products are reverse mode through the pullback, which is linear,
    so that no operator needs a forward rule.

    Args:
        f: Function `f(x, *args)` that returns a tensor or a pytree of tensors, m numbers in all.
        x: The point: a tensor or a pytree of tensors, n numbers in all.
        *args: Further arguments of `f`, taken as constants.
        chunk_size: Columns of a block that are multiplied together, as in `hodiff.HessianOperator`.
        correct: As in `hodiff.hvp`.

    Raises:
        InputError: If `f` does not depend on `x`, or an argument is invalid.
        RouteError: If torch does not implement the derivative of the backward of an operator in `f`.

    Example:
        >>> import torch, hodiff
        >>> A = hodiff.JacobianOperator(lambda x: torch.stack([x[0] * x[1], x[1]]), torch.tensor([2.0, 3.0]))
        >>> A @ torch.tensor([1.0, 0.0]), A.T @ torch.tensor([1.0, 1.0])
        (tensor([3., 0.]), tensor([3., 3.]))

    Source: A. Griewank & A. Walther, *Evaluating Derivatives*, 2nd ed., section 3.2; the transpose of the transpose is
    J. Townsend, "A new trick for calculating Jacobian vector products" (2017).
    """

    @leave_inference_mode
    def __init__(
        self,
        f: Callable[..., Any],
        x: PyTree,
        *args: Any,
        chunk_size: int | str | None = "auto",
        correct: bool = True,
    ):
        require_chunk_size("JacobianOperator", "chunk_size", chunk_size)
        require_constant("JacobianOperator", x, f, args)
        leaves, _ = flatten_primals(x, "JacobianOperator", "x")
        self.f, self.args, self.correct = f, args, correct
        self.domain = Space.of(x)
        self.point = Point(tuple(map(as_point, leaves)))
        self._restore()
        self.chunk_size = chunk_size
        super().__init__(self.domain, self._codomain)

    made_of_constants = True
    _recorded = ("_model",)

    @property
    def x(self) -> PyTree:
        """The point."""
        return pytree.tree_unflatten(list(self.point.leaves), self.domain.spec)

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        """The outputs of the function at the point, one tensor for each leaf."""
        return tuple(self._model.outputs)

    def _require_portable(self) -> None:
        self.point.require_unchanged("JacobianOperator")

    @leave_inference_mode
    def _restore(self) -> None:
        modules = modules_in(self.f)
        function = bind("JacobianOperator", self.f, (self.x, *self.args), name="x", correct=self.correct)
        # The point is a constant, and its graph is none of a surrounding transform.
        apart = outside_transforms() if in_transform() else nullcontext()
        with apart, torch.no_grad(), untouched(modules), refused("JacobianOperator"):
            self._model = RecordedModel(function)

    def at(self, x: PyTree) -> JacobianOperator:
        """See `LinearOperator.at`."""
        if not self.domain.same(space := Space.of(x)):
            raise InputError(
                "JacobianOperator.at: x: expected the structure, shapes, dtypes and devices of the first point, "
                f"{self.domain.size} numbers, got {space.size}; create a new operator for other parameters."
            )
        return JacobianOperator(self.f, x, *self.args, chunk_size=self.chunk_size, correct=self.correct)

    def converted(self, conversion: Conversion) -> JacobianOperator:
        """See `LinearOperator.to`."""
        self._require_portable()
        x = pytree.tree_unflatten(list(map(conversion, self.point.leaves)), self.domain.spec)
        args = conversion.tree(self.args)
        return JacobianOperator(self.f, x, *args, chunk_size=self.chunk_size, correct=self.correct)

    @cached_property
    def _codomain(self) -> Space:
        return Space.of(pytree.tree_unflatten(list(self._model.outputs), self._model.spec))

    @read_unchanged
    def multiply(self, block: Tensor) -> Tensor:
        """See `LinearOperator.multiply`."""
        return self._columns(block, self.domain, self.codomain, self._model.push, self._model.push_many)

    @read_unchanged
    def multiply_transposed(self, block: Tensor) -> Tensor:
        """See `LinearOperator.multiply_transposed`."""
        return self._columns(block, self.codomain, self.domain, self._model.pull, self._model.pull_many)

    def _columns(self, block: Tensor, source: Space, target: Space, one: Any, many: Any) -> Tensor:
        k = block.shape[1]
        self.point.require_unchanged("JacobianOperator")
        with torch.no_grad(), refused("JacobianOperator"):
            if k == 1:
                return target.join([p[None] for p in one([v[0] for v in source.split(block)])], 1)
            size = resolve_chunk_size(self.chunk_size, max(k, 1), self._model.bytes_each, self.device)
            parts = [
                target.join(many(source.split(block[:, start:stop])), stop - start) for start, stop in spans(k, size)
            ]
        return torch.cat(parts, dim=1) if parts else block.new_zeros(target.size, 0)
