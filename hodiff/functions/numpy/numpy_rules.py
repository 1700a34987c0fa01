"""NumPy code whose derivative is a rule: a vector-Jacobian or a Jacobian-vector product."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hodiff.errors import InputError
from hodiff.functions.numpy.nodes import Convert, DifferencePolicy, Node

Array = np.ndarray[Any, Any]
Optional = Sequence[Tensor | None]


class RuleNode(Node):
    """Code with a vjp, a jvp or both, as differentiable functions `(directions, inputs)` of tensors."""

    def __init__(
        self,
        f: Callable[..., Any],
        vjp: Callable[..., Any] | None,
        jvp: Callable[..., Any] | None,
        convert: Convert,
        policy: DifferencePolicy,
    ):
        super().__init__(convert, policy, f)
        self.vjp, self.jvp = vjp, jvp

    def differentiated(self, inputs: Sequence[Tensor]) -> tuple[Node, float]:
        """Return an exact node; the rule's own `derivative_error` estimates errors of further orders."""
        return _Exact(self.convert, self.policy), 0.0

    def pull(self, inputs: Sequence[Tensor], cotangents: Optional, needed: Sequence[int], likes: Any) -> Optional:
        """Pull back by the vjp, or by one call of the jvp for each element of the inputs."""
        if self.vjp is None:
            return super().pull(inputs, cotangents, needed, likes)
        filled = [
            self._zeros(inputs, shape) if u is None else u
            for u, (shape, floating) in zip(cotangents, likes, strict=True)
            if floating
        ]
        floating = _floating(inputs)
        gradients = dict(
            zip(floating, self._rows(self.vjp, filled, inputs, [inputs[i].shape for i in floating]), strict=True)
        )
        return [gradients[i] for i in needed]

    def push(self, inputs: Sequence[Tensor], tangents: Optional, likes: Any) -> Optional:
        """Push forward by the jvp, or by one call of the vjp for each element of the outputs."""
        if self.jvp is None:
            return super().push(inputs, tangents, likes)
        pairs = [(inputs[i], tangents[i]) for i in _floating(inputs)]
        filled = [torch.zeros_like(x) if t is None else t for x, t in pairs]
        pushed = iter(self._rows(self.jvp, filled, inputs, [shape for shape, floating in likes if floating]))
        return [next(pushed) if floating else None for _, floating in likes]

    def jacobian(self, inputs: Sequence[Tensor], likes: Sequence[Any], output: int, index: int) -> Tensor:
        """Call the given rule once for each element."""
        out_shape, in_shape = likes[output][0], inputs[index].shape
        if self.vjp is not None:
            rows = [
                self.pull(inputs, [u if o == output else None for o in range(len(likes))], [index], likes)[0]
                for u in _basis(self._zeros(inputs, out_shape))
            ]
            return _stacked(rows, (*out_shape, *in_shape), self._zeros(inputs, ()))
        columns = [
            self.push(inputs, [t if i == index else None for i in range(len(inputs))], likes)[output]
            for t in _basis(torch.zeros_like(inputs[index]))
        ]
        flat = _stacked(columns, (in_shape.numel(), *out_shape), self._zeros(inputs, ()))
        return flat.movedim(0, -1).reshape(*out_shape, *in_shape)

    def _zeros(self, inputs: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
        return torch.zeros(shape, dtype=self.convert.dtype, device=self.convert.device)

    def _rows(
        self, rule: Callable[..., Any], directions: list[Tensor], inputs: Sequence[Tensor], shapes: Sequence[Any]
    ) -> Sequence[Tensor | None]:
        """Call a rule and check the shapes of its results; a single direction or result is passed bare."""
        result = rule(directions[0] if len(directions) == 1 else tuple(directions), inputs)
        results = result if isinstance(result, (tuple, list)) else (result,)
        got = [None if each is None else tuple(each.shape) for each in results]
        if len(got) != len(shapes) or any(a is not None and a != tuple(b) for a, b in zip(got, shapes, strict=True)):
            raise InputError(
                f"numpy_function: {self.policy.name}: expected the vjp or jvp to return shapes "
                f"{[tuple(each) for each in shapes]}, got {got}."
            )
        return results


class _Exact(Node):
    """A derivative computed by a rule."""

    def differentiated(self, inputs: Sequence[Tensor]) -> tuple[Node, float]:
        """Raise: only the rule itself knows the errors of further orders."""
        raise InputError(
            f"numpy_function: {self.policy.name}: derivative_error: expected order=1 for a function with a vjp or jvp; "
            "for higher orders, call vjp.derivative_error(cotangent, *args)."
        )


def _floating(inputs: Sequence[Tensor]) -> list[int]:
    return [i for i, each in enumerate(inputs) if each.is_floating_point()]


def _basis(zeros: Tensor) -> list[Tensor]:
    eye = torch.eye(zeros.numel(), dtype=zeros.dtype, device=zeros.device)
    return [row.reshape(zeros.shape) for row in eye]


def _stacked(rows: Sequence[Tensor | None], shape: Sequence[int], zero: Tensor) -> Tensor:
    if not rows or all(row is None for row in rows):
        return zero.expand(shape)
    like = next(row for row in rows if row is not None)
    return torch.stack([torch.zeros_like(like) if row is None else row for row in rows]).reshape(shape)
