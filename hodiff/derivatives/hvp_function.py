"""The Hessian-vector product as a Function of the point and the direction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hodiff.common.options import require_callable
from hodiff.common.overriding import overridable_in_trees
from hodiff.derivatives.hvp import hvp
from hodiff.errors import InputError
from hodiff.recompute.checkpoint import CallProgram
from hodiff.recompute.programs import Checkpoint, Program, Tensors
from hodiff.recompute.recording import Recording
from hodiff.torch_internals.autograd.transforms import in_transform
from hodiff.torch_internals.threads import one_thread_at_a_time

# Tangents by position among the operands of f; operands without a tangent are constant.
Direction = dict[int, Tensor]


def hvp_function(f: Callable[..., Any]) -> Callable[..., Any]:
    r"""Make the Hessian-vector product of a function one node of the graph, differentiable to any order.

    $$ h(x, v) = \nabla^2 f(x)\, v, \qquad
       \bar v = \nabla^2 f(x)\, \bar h, \qquad \bar x = \nabla^3 f(x)[v, \bar h] $$

    The node stores references to the arguments and to what `f` closes over, but no intermediate results; `hodiff.hvp`
    itself would store the graph of a gradient and of its derivative. As higher derivatives are symmetric, the
    derivative of a product with respect to its direction is again a product, at every order. Tensors that `f` closes
    over get their gradients, as in `checkpoint`.

    Args:
        f: Function `f(x, *args)` that returns a floating-point tensor of shape `()`; `x` is a tensor or a pytree.

    Returns:
        A function `(x, v, *args)` of a point and a direction with the structure, shapes and dtypes of `x`. It returns
        the product in that structure.

    Raises:
        InputError: If `f` is not callable; when called, if `v` does not match `x` or `f` does not return one number.

    Example:
        >>> import torch
        >>> product = hvp_function(lambda x: x[0] ** 3 * x[1])
        >>> x, v = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 0.0])
        >>> product(x, v)
        tensor([12.,  3.])
        >>> torch.func.grad(lambda x: product(x, v).sum())(x)
        tensor([18.,  6.])

    Source: B. A. Pearlmutter, "Fast exact multiplication by the Hessian", Neural Computation 6 (1994), eq. 2.4.
    """
    require_callable("hvp_function", f=f)

    @overridable_in_trees
    def product(x: Any, v: Any, *args: Any) -> Any:
        if torch.compiler.is_compiling():
            return hvp(f, x, v, *args)
        points, spec = _flatten(x)
        directions = _flatten_direction(v, points, spec)
        with one_thread_at_a_time():  # as in `checkpoint`
            call = CallProgram("hvp_function", f, (x, *args), {})
            # The leaves of x come first among the operands.
            moving = list(range(len(points)))
            program = _SymmetricDerivative(call, [moving], moving)
            operands = call.without_unused(call.take_inputs(), again=True)
            return pytree.tree_unflatten(list(Checkpoint.call(program, *operands, *directions)), spec)

    return product


class _SymmetricDerivative(Program):
    r"""$\nabla^{k+1} f(z)[v_1, \dots, v_k]$, restricted to some operands of f. Its inputs are z, then the directions.

    Attributes:
        call: The function.
        moving: For each direction, the positions in z of its components.
        wanted: The positions in z of the outputs.
    """

    def __init__(self, call: CallProgram, moving: Sequence[Sequence[int]], wanted: Sequence[int]):
        self.call, self.moving, self.wanted, self.name = call, [list(each) for each in moving], list(wanted), call.name

    def run(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Compute the derivative by `hodiff.hvp`, or beyond second order by nested reverse passes."""
        point, directions = self._split(inputs)
        if len(directions) > 1:
            gradient = _gradient(partial(_directional, self._value, directions), point, self.wanted, inputs)
            return tuple(gradient[i] for i in self.wanted)
        (direction,) = directions
        active = sorted({*direction, *self.wanted})

        def restricted(leaves: Tensors) -> Tensor:
            return self._value(_moved(point, dict(zip(active, leaves, strict=True))))

        tangents = [direction[i] if i in direction else torch.zeros_like(point[i]) for i in active]
        product = dict(zip(active, hvp(restricted, [point[i] for i in active], tangents), strict=True))
        return tuple(product[i] for i in self.wanted)

    def pull(self, inputs: Tensors, cotangents: Sequence[Tensor | None], needed: Sequence[int]) -> list[Tensor | None]:
        """Pull a cotangent back: by symmetry it replaces each direction, and is one more direction for the point."""
        point, directions = self._split(inputs)
        cotangent = {i: u for i, u in zip(self.wanted, cotangents, strict=True) if u is not None}
        found: dict[int, Tensor] = {}
        self._collect(found, needed, 0, range(len(point)), point, [*directions, cotangent])
        start = len(point)
        for k, positions in enumerate(self.moving):
            self._collect(found, needed, start, positions, point, [*directions[:k], cotangent, *directions[k + 1 :]])
            start += len(positions)
        return [found.get(i) for i in needed]

    def push(self, inputs: Tensors, tangents: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        """Apply the product rule: a tangent replaces its direction, and the point's tangent is one more direction."""
        point, directions = self._split(inputs)
        moved = {i: t for i, t in enumerate(tangents[: len(point)]) if t is not None}
        terms = [self._derivative(point, [*directions, moved], self.wanted)] if moved else []
        start = len(point)
        for k, positions in enumerate(self.moving):
            pairs = zip(positions, tangents[start : start + len(positions)], strict=True)
            moved = {i: t for i, t in pairs if t is not None}
            if moved:
                replaced = [*directions[:k], moved, *directions[k + 1 :]]
                terms.append(self._derivative(point, replaced, self.wanted))
            start += len(positions)
        return tuple(torch.stack(parts).sum(0) if len(parts) > 1 else parts[0] for parts in zip(*terms, strict=True))

    def _collect(
        self,
        found: dict[int, Tensor],
        needed: Sequence[int],
        start: int,
        positions: Sequence[int],
        point: Tensors,
        directions: Sequence[Direction],
    ) -> None:
        """Add the gradients of needed inputs from `start` on; input `start + j` belongs to operand `positions[j]`."""
        wanted = {start + j: position for j, position in enumerate(positions) if start + j in needed}
        if wanted:
            outputs = self._derivative(point, directions, list(wanted.values()))
            found.update(zip(wanted, outputs, strict=True))

    def _derivative(self, point: Tensors, directions: Sequence[Direction], wanted: Sequence[int]) -> tuple[Tensor, ...]:
        program = _SymmetricDerivative(self.call, [list(each) for each in directions], wanted)
        return Checkpoint.call(program, *point, *(t for each in directions for t in each.values()))

    def _split(self, inputs: Tensors) -> tuple[Tensors, list[Direction]]:
        count = len(inputs) - sum(map(len, self.moving))
        rest = iter(inputs[count:])
        return inputs[:count], [{i: next(rest) for i in positions} for positions in self.moving]

    def _value(self, point: Tensors) -> Tensor:
        outputs = self.call.run(*point)
        if len(outputs) != 1 or outputs[0].shape != () or not outputs[0].is_floating_point():
            raise InputError(
                "hvp_function: f: expected a floating-point tensor of shape (), got "
                f"{', '.join(f'{tuple(each.shape)} {each.dtype}' for each in outputs) or 'no tensor'}; reduce it with "
                ".sum() or .mean()."
            )
        return outputs[0]


def _directional(f: Callable[[Tensors], Tensor], directions: Sequence[Direction], point: Tensors) -> Tensor:
    """Return the derivative along all directions."""
    if not directions:
        return f(point)
    *earlier, last = directions
    gradient = _gradient(partial(_directional, f, earlier), point, list(last), point)
    return torch.stack([(gradient[i] * t).sum() for i, t in last.items()]).sum()


def _gradient(f: Callable[[Tensors], Tensor], point: Tensors, wanted: Sequence[int], others: Tensors) -> Direction:
    """Compute gradients of some operands by reverse mode, which is right most often; `others` may need a graph."""
    if in_transform():
        return torch.func.grad(lambda moved: f(_moved(point, moved)))({i: point[i] for i in wanted})
    recording = Recording(
        lambda operands: f(_moved(point, dict(zip(wanted, operands, strict=True)))), [point[i] for i in wanted], others
    )
    gradients = recording.gradients([recording.result])
    return {i: torch.zeros_like(point[i]) if g is None else g for i, g in zip(wanted, gradients, strict=True)}


def _moved(point: Tensors, moved: Direction) -> list[Tensor]:
    return [moved.get(i, each) for i, each in enumerate(point)]


def _flatten(x: Any) -> tuple[list[Tensor], pytree.TreeSpec]:
    leaves, spec = pytree.tree_flatten(x)
    for leaf in leaves:
        if not (isinstance(leaf, Tensor) and leaf.is_floating_point()):
            got = str(leaf.dtype) if isinstance(leaf, Tensor) else type(leaf).__name__
            raise InputError(f"hvp_function: x: expected floating-point tensors, got {got}; pass others after v.")
    if not leaves:
        raise InputError("hvp_function: x: expected a tensor or a pytree of tensors, got none.")
    return leaves, spec


def _flatten_direction(v: Any, points: Tensors, spec: pytree.TreeSpec) -> list[Tensor]:
    leaves, own = pytree.tree_flatten(v)
    if own != spec:
        raise InputError(f"hvp_function: v: expected the structure of x, {spec}, got {own}.")
    for leaf, point in zip(leaves, points, strict=True):
        matches = isinstance(leaf, Tensor) and (leaf.shape, leaf.dtype) == (point.shape, point.dtype)
        if not matches:
            got = f"{tuple(leaf.shape)} {leaf.dtype}" if isinstance(leaf, Tensor) else type(leaf).__name__
            raise InputError(
                f"hvp_function: v: expected {tuple(point.shape)} {point.dtype} as in x, got {got}; "
                "torch.zeros_like(x) has the right form."
            )
    return leaves
