"""The Function that calls NumPy code, and the nodes that compute its derivatives."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hodiff.errors import HodiffWarning, InputError, RouteError
from hodiff.functions.numpy.numpy_differences import Measured, elementwise_derivative, jacobian, rounded
from hodiff.rules.any_order import AnyOrderFunction
from hodiff.rules.nesting import nestable_jvp

Array = np.ndarray[Any, Any]
Optional = Sequence[Tensor | None]


@dataclass(frozen=True)
class Convert:
    """Converts between tensors and the float64 arrays of NumPy code."""

    dtype: torch.dtype
    device: torch.device

    def array(self, tensor: Tensor) -> Array:
        """Copy a tensor to an array, which the code may change."""
        tensor = tensor.double() if tensor.is_floating_point() else tensor
        return np.array(tensor.numpy(force=True))  # by force, as torch has tensors of zeros without memory

    def tensor(self, array: Any) -> Tensor:
        """Convert an array to a tensor; floating-point results get the dtype of the inputs."""
        array = np.asarray(array)
        if array.dtype.kind not in "fiub":
            raise InputError(f"numpy_function: f: expected real numbers, got an array of {array.dtype}.")
        tensor = torch.from_numpy(np.array(array))
        return tensor.to(self.device, self.dtype if tensor.is_floating_point() else tensor.dtype)


class DifferencePolicy:
    """The number of orders that may use differences, and the last estimate of their error."""

    def __init__(self, name: str, orders: int, tolerance: float):
        self.name, self.orders, self.tolerance = name, orders, tolerance
        self.last_error: float | None = None

    def require(self, depth: int) -> None:
        """Raise if an order of derivative has no rule and may not use differences."""
        if depth > self.orders:
            raise RouteError(
                f"numpy_function: {self.name}: this order of derivative has no rule: expected "
                + (
                    f"at most {self.orders} order(s) of differences; pass difference_order={depth}, or"
                    if self.orders
                    else "one;"
                )
                + " give `derivatives` of the order, or a vjp or jvp that is itself a numpy_function with rules, or "
                "torch code with rules='torch'."
            )

    def report(self, value: Array, error: Array) -> Array:
        """Record an error, warn if it is large, and return the value."""
        self.last_error = float(error.max()) if error.size else 0.0
        scale = float(np.abs(value[np.isfinite(value)]).max(initial=0.0))
        if self.last_error > self.tolerance * max(scale, np.finfo(np.float64).tiny) and self.last_error > 1e-10:
            warnings.warn(
                f"numpy_function: {self.name}: a derivative by differences has an error of {self.last_error:.1e}, for "
                f"values of {scale:.1e}; pass a rule, or tighten the tolerances of the code.",
                HodiffWarning,
                stacklevel=2,
            )
        return value


class External(AnyOrderFunction):
    """The Function behind `numpy_function`. Saves its inputs."""

    @staticmethod
    def forward(node: Node, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Call the NumPy code."""
        results = node.evaluate(*(node.convert.array(each) for each in inputs))
        return tuple(node.convert.tensor(each) for each in results)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Save the inputs."""
        ctx.node, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.likes = tuple((each.shape, each.is_floating_point()) for each in output)
        ctx.mark_non_differentiable(*(each for each in output if not each.is_floating_point()))
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        """Pull the cotangents back by the node."""
        gradients: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        needed = [i for i, need in enumerate(ctx.needs_input_grad[1:]) if need]
        if needed and any(each is not None for each in cotangents):
            for i, gradient in zip(
                needed, ctx.node.pull(ctx.saved_tensors, cotangents, needed, ctx.likes), strict=True
            ):
                gradients[i + 1] = gradient
        return tuple(gradients)

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        """Push the tangents forward by the node."""
        return tuple(
            pushed if floating else None
            for pushed, (_, floating) in zip(
                ctx.node.push(ctx.saved_tensors, tangents, ctx.likes), ctx.likes, strict=True
            )
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], node: Node, *inputs: Tensor) -> tuple[Any, Any]:
        """Loop over the batch, unless the code is elementwise."""
        if isinstance(node, ElementwiseNode):
            return External.call(node, *inputs), (in_dims[1],)
        rows = [External.call(node, *_row(inputs, in_dims[1:], i)) for i in range(info.batch_size)]
        return tuple(torch.stack(column) for column in zip(*rows, strict=True)), (0,) * len(rows[0])


class Node:
    """NumPy code with methods that compute its derivatives.

    Attributes:
        several: Whether the code returned a tuple; known after a call.
    """

    several = False

    def __init__(self, convert: Convert, policy: DifferencePolicy, f: Callable[..., Any] | None = None):
        self.convert, self.policy, self.f = convert, policy, f

    def evaluate(self, *arrays: Array) -> list[Any]:
        """Call the code, and return a list with one result per output; nodes without code of their own override it."""
        if self.f is None:
            raise NotImplementedError
        result = self.f(*arrays)
        self.several = isinstance(result, (tuple, list))
        return list(result) if self.several else [result]

    def jacobian(self, inputs: Sequence[Tensor], likes: Sequence[Any], output: int, index: int) -> Tensor:
        """Derivative of an output with respect to an input, (*output, *input), as a differentiable tensor."""
        raise NotImplementedError

    def differentiated(self, inputs: Sequence[Tensor]) -> tuple[Node, float]:
        """Return the node of the next order, and the estimated error of its values."""
        raise NotImplementedError

    def pull(self, inputs: Sequence[Tensor], cotangents: Optional, needed: Sequence[int], likes: Any) -> Optional:
        """Compute the gradients of the needed inputs."""
        return [
            _total(
                torch.tensordot(u, self.jacobian(inputs, likes, o, i), u.dim())
                for o, u in enumerate(cotangents)
                if u is not None and likes[o][1]
            )
            for i in needed
        ]

    def push(self, inputs: Sequence[Tensor], tangents: Optional, likes: Any) -> Optional:
        """Compute the tangents of all outputs."""
        return [
            _total(
                torch.tensordot(self.jacobian(inputs, likes, o, i), t.to(self.convert.dtype), t.dim())
                for i, t in enumerate(tangents)
                if t is not None
            )
            if floating
            else None
            for o, (_, floating) in enumerate(likes)
        ]


class CallNode(Node):
    """Code without a rule; its Jacobian by differences is code again. `depth` counts the differences."""

    def __init__(
        self,
        f: Callable[..., Any],
        convert: Convert,
        policy: DifferencePolicy,
        depth: int = 0,
        measured: Measured | None = None,
    ):
        super().__init__(convert, policy, f)
        self.depth, self.measured = depth, measured

    def jacobian(self, inputs: Sequence[Tensor], likes: Sequence[Any], output: int, index: int) -> Tensor:
        """Compute the Jacobian by differences."""
        return External.call(self._below(output, index), *inputs)[0]

    def differentiated(self, inputs: Sequence[Tensor]) -> tuple[Node, float]:
        """Differentiate every output with respect to every input; return the last node and the largest error."""
        count = len(self.evaluate(*map(self.convert.array, inputs)))
        node: Node = self
        errors = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", HodiffWarning)
            for output in range(count):
                for index in (i for i, each in enumerate(inputs) if each.is_floating_point()):
                    node = self._below(output, index)
                    node.evaluate(*map(self.convert.array, inputs))
                    errors.append(self.policy.last_error or 0.0)
        return node, max(errors)

    def _below(self, output: int, index: int) -> CallNode:
        self.policy.require(self.depth + 1)

        below = self.measured or rounded(lambda *arrays: self.evaluate(*arrays)[output])

        def measured(*arrays: Array) -> tuple[Array, Array]:
            return jacobian(below, arrays, index)

        def reported(*arrays: Array) -> Array:
            return self.policy.report(*measured(*arrays))

        return CallNode(reported, self.convert, self.policy, self.depth + 1, measured)


class ElementwiseNode(Node):
    """One order of derivative of elementwise code of one argument: from the list, then by differences."""

    def __init__(
        self, tower: Sequence[Callable[[Array], Array]], order: int, convert: Convert, policy: DifferencePolicy
    ):
        super().__init__(convert, policy)
        self.tower, self.order = list(tower), order

    def evaluate(self, *arrays: Array) -> list[Any]:
        """Call the code."""
        (x,) = arrays
        result = self.tower[self.order](x)
        if np.shape(result) != x.shape:
            raise InputError(
                f"numpy_function: {self.policy.name}: expected an output of shape {x.shape} from an elementwise "
                f"function, got {np.shape(result)}; drop elementwise=True."
            )
        return [result]

    def pull(self, inputs: Sequence[Tensor], cotangents: Optional, needed: Sequence[int], likes: Any) -> Optional:
        """Multiply the cotangents by the slope."""
        return [None if u is None else u * self._slope(inputs) for u in cotangents]

    def push(self, inputs: Sequence[Tensor], tangents: Optional, likes: Any) -> Optional:
        """Multiply the tangents by the slope."""
        return [None if t is None else t * self._slope(inputs) for t in tangents]

    def differentiated(self, inputs: Sequence[Tensor]) -> tuple[Node, float]:
        """Return the next derivative, which is exact if from the list, else by differences."""
        node = self._next()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", HodiffWarning)
            node.evaluate(*map(self.convert.array, inputs))
        return node, 0.0 if self.order + 1 < len(self.tower) else self.policy.last_error or 0.0

    def _slope(self, inputs: Sequence[Tensor]) -> Tensor:
        return External.call(self._next(), *inputs)[0]

    def _next(self) -> ElementwiseNode:
        if self.order + 1 < len(self.tower):
            return ElementwiseNode(self.tower, self.order + 1, self.convert, self.policy)
        depth = sum(isinstance(each, _Differenced) for each in self.tower) + 1
        self.policy.require(depth)
        tower: list[Callable[[Array], Array]] = [*self.tower, _Differenced(self.tower[-1], self.policy)]
        return ElementwiseNode(tower, self.order + 1, self.convert, self.policy)


class _Differenced:
    """An elementwise derivative by differences."""

    def __init__(self, f: Callable[[Array], Array], policy: DifferencePolicy):
        self.f = f.measured if isinstance(f, _Differenced) else rounded(f)
        self.policy = policy

    def measured(self, x: Array) -> tuple[Array, Array]:
        return elementwise_derivative(self.f, x)

    def __call__(self, x: Array) -> Array:
        return self.policy.report(*self.measured(x))


def _row(inputs: Sequence[Tensor], in_dims: Sequence[int | None], index: int) -> list[Tensor]:
    return [x if d is None else x.select(d, index) for x, d in zip(inputs, in_dims, strict=True)]


def _total(terms: Any) -> Tensor | None:
    parts = list(terms)
    return torch.stack(parts).sum(0) if len(parts) > 1 else parts[0] if parts else None
