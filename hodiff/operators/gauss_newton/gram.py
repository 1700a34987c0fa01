"""The Gram matrix of a model's outputs: the neural tangent kernel of a batch, as an operator."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from hodiff.common.chunks import spans
from hodiff.common.module_state import untouched
from hodiff.common.options import require_bool, require_callable, require_chunk_size, require_int
from hodiff.common.trees import PyTree, flatten_primals
from hodiff.derivatives.bound_function import BoundFunction, bind
from hodiff.derivatives.route_choice import refused
from hodiff.errors import InputError
from hodiff.estimators import DiagonalEstimate
from hodiff.operators.data.determinism import another_function, mark_of
from hodiff.operators.linear.conversion import Conversion
from hodiff.operators.linear.linear_operator import LinearOperator
from hodiff.operators.linearized.jacobian import JacobianOperator
from hodiff.operators.linearized.model_loss import module_call, module_with
from hodiff.operators.per_example.example_gradients import ExampleGradients, module_of
from hodiff.recompute.reachable import modules_in
from hodiff.torch_internals.threads import one_thread_at_a_time


class GramOperator(LinearOperator):
    r"""The Gram matrix of the gradients of a model's outputs, the neural tangent kernel of a batch.

    $$ K = J J^\top, \qquad J = \frac{\partial z}{\partial x}, \quad z = m(x, \text{inputs}) $$

    It acts on vectors like the outputs, with as many rows as the batch has outputs, however many parameters there are.
    A product multiplies with both Jacobians. `to_dense` and `diagonal(exact=True)` use gradients of the examples, one
    pull of the batch for each output of an example, if the examples are independent of each other; otherwise one for
    each output of the batch.

    Args:
        model: Function `model(x, inputs)` that returns a tensor or a pytree of tensors; or an `nn.Module`, and `x` a
            dict of its parameters.
        x: The point: a tensor or a pytree of tensors.
        inputs: Inputs of the model, taken as constants.
        memory_budget: Memory in bytes for gradients of outputs in `to_dense`, 1 GiB by default; with more outputs than
            fit, they are computed several times.
        chunk_size: Columns of a block that are multiplied together, as in `hodiff.HessianOperator`.
        correct: As in `hodiff.hvp`.

    Attributes:
        jacobian: The `hodiff.JacobianOperator`.

    Raises:
        InputError: If the model does not depend on `x`, or an argument is invalid.
        RouteError: If torch does not implement the derivative of the backward of an operator in the model.

    Example:
        >>> import torch, hodiff
        >>> model = lambda w, inputs: inputs @ w
        >>> K = hodiff.GramOperator(model, torch.zeros(2), torch.tensor([[1.0, 2.0], [0.0, 3.0]]))
        >>> K.to_dense()
        tensor([[5., 6.],
                [6., 9.]])

    Source: A. Jacot, F. Gabriel & C. Hongler, "Neural tangent kernel: convergence and generalization in neural
    networks", NeurIPS 2018, section 4; R. Novak, J. Sohl-Dickstein & S. Schoenholz, "Fast finite width neural tangent
    kernel", ICML 2022, section 3.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        x: PyTree,
        inputs: Any,
        *,
        memory_budget: int = 2**30,
        chunk_size: int | str | None = "auto",
        correct: bool = True,
    ):
        require_callable("GramOperator", model=model)
        flatten_primals(x, "GramOperator", "x")
        require_chunk_size("GramOperator", "chunk_size", chunk_size)
        require_bool("GramOperator", "correct", correct)
        require_int("GramOperator", "memory_budget", memory_budget, 0, remedy="it counts bytes")
        if isinstance(model, nn.Module):
            model = module_with("GramOperator", model, x)
        self.model, self.inputs, self.memory_budget = model, inputs, memory_budget
        self._function = module_call(model) if isinstance(model, nn.Module) else model
        self.jacobian = JacobianOperator(self._function, x, inputs, chunk_size=chunk_size, correct=correct)
        super().__init__(self.jacobian.codomain, symmetric=True)

    def multiply(self, block: Tensor) -> Tensor:
        """See `LinearOperator.multiply`."""
        return self.jacobian.multiply(self.jacobian.multiply_transposed(block))

    def at(self, x: PyTree) -> GramOperator:
        """See `LinearOperator.at`."""
        other = copy.copy(self)
        other.jacobian = self.jacobian.at(x)
        return other

    def converted(self, conversion: Conversion) -> GramOperator:
        """See `LinearOperator.to`."""
        jacobian = self.jacobian.converted(conversion)
        model = conversion.module(self.model) if isinstance(self.model, nn.Module) else self.model
        return GramOperator(
            model,
            jacobian.x,
            jacobian.args[0],
            memory_budget=self.memory_budget,
            chunk_size=jacobian.chunk_size,
            correct=jacobian.correct,
        )

    def to_dense(self, *, chunk_size: int | str | None = "auto", progress: bool = False) -> Tensor:
        """Compute the matrix from the gradients of the outputs.

        Args:
            chunk_size: As in `LinearOperator.to_dense`; for examples that depend on each other.
            progress: Whether to show a progress bar.

        Returns:
            Tensor (m, m), with m the number of outputs.

        Raises:
            InputError: If `chunk_size` is invalid.
        """
        require_chunk_size("to_dense", "chunk_size", chunk_size)
        require_bool("to_dense", "progress", progress)
        self._require_unchanged()
        if self._examples is None:
            return super().to_dense(chunk_size=chunk_size, progress=progress)
        outputs = self._examples.outputs
        count, width = len(outputs), outputs[0].numel()
        bytes_each = count * self.jacobian.shape[1] * self.dtype.itemsize
        groups = list(spans(width, max(1, self.memory_budget // max(1, 2 * bytes_each))))
        # (c, N, d, M): of output c of example n and output d of example m.
        found = outputs.new_zeros(width, count, width, count)
        with self._evaluations(), refused("GramOperator"):
            for i, (start, stop) in enumerate(tqdm(groups, unit=" groups of outputs", disable=not progress)):
                rows = self._rows(range(start, stop))
                for begin, end in groups[i:]:
                    others = rows if begin == start else self._rows(range(begin, end))
                    part = sum(a @ b.T for a, b in zip(rows, others, strict=True))
                    assert isinstance(part, Tensor)
                    part = part.reshape(stop - start, count, end - begin, count)
                    found[start:stop, :, begin:end] = part
                    found[begin:end, :, start:stop] = part.permute(2, 3, 0, 1)
        return found.permute(1, 0, 3, 2).reshape(self.shape)

    def _exact_diagonal(self, chunk_size: int | str | None, progress: bool) -> DiagonalEstimate:
        self._require_unchanged()
        if self._examples is None:
            return super()._exact_diagonal(chunk_size, progress)
        with self._evaluations(), refused("GramOperator"):
            found = [self._examples.squared_norms(each) for each in tqdm(self._units(), disable=not progress)]
        value = torch.stack(found, 1).reshape(-1)
        return DiagonalEstimate(value, torch.zeros_like(value), len(found), "exact")

    def _require_unchanged(self) -> None:
        """Raise if the gradients of examples, which evaluate the model again, would be of another function."""
        # A product of zeros reads all tensors of the graph, and raises if one was changed in place.
        self.jacobian.multiply_transposed(torch.zeros(self.shape[0], 1, dtype=self.dtype, device=self.device))
        known = self.__dict__.get("_examples")
        if known is None:
            return
        with self._evaluations(), refused("GramOperator"):
            function = self._bound(self.inputs)
            now, _ = function(function.leaves)
        if not mark_of([now]).agrees(mark_of([known.outputs])):
            raise another_function("GramOperator", 0)

    def _rows(self, some: range) -> list[Tensor]:
        """Compute gradients of some outputs of all examples, (outputs * N, numbers) for each parameter."""
        assert self._examples is not None
        rows = [self._examples.gradients(each) for i, each in enumerate(self._units()) if i in some]
        return [torch.cat([each[:, None].flatten(1) for each in column]) for column in zip(*rows, strict=True)]

    def _units(self) -> Iterator[Tensor]:
        """Yield cotangents that are 1 at one output of every example."""
        assert self._examples is not None
        outputs = self._examples.outputs
        for i in range(outputs[0].numel()):
            unit = torch.zeros_like(outputs).reshape(len(outputs), -1)
            unit[:, i] = 1
            yield unit.view_as(outputs)

    def __getstate__(self) -> dict[str, Any]:
        # Gradients of examples hold graphs, and are computed again.
        return {name: value for name, value in self.__dict__.items() if name != "_examples"}

    @cached_property
    def _examples(self) -> ExampleGradients | None:
        """Gradients of the examples; None if the outputs have no examples, or examples depend on each other."""
        labels = self.jacobian.domain.labels
        if any(self.jacobian.domain.joined) or any(self.codomain.joined):
            return None
        try:
            with self._evaluations():
                found = ExampleGradients(
                    self._bound, self.inputs, module_of(self.model, labels), labels, self.dtype, mixing=False
                )
                found.gradients(torch.ones_like(found.outputs))
        except InputError:
            return None
        # Of random functions, such as dropout, the Jacobian is that of one draw, and other evaluations draw again.
        same = torch.allclose(found.outputs, self.jacobian.outputs[0], rtol=torch.finfo(self.dtype).eps ** 0.5)
        return found if len(found.outputs) and same else None

    def _bound(self, inputs: Any) -> BoundFunction:
        return bind("GramOperator", self._function, (self.jacobian.x, inputs), name="x", correct=self.jacobian.correct)

    @contextmanager
    def _evaluations(self) -> Iterator[None]:
        """Return a context for evaluations of the model, which keep its buffers."""
        with one_thread_at_a_time(), torch.no_grad(), untouched(modules_in(self.model)):
            yield
