r"""The four second-order routes as compositions of `torch.func` transforms.

For scalar $f$ and directions $v$, each route computes $\nabla^2 f(x)\, v$ (Griewank & Walther, *Evaluating
Derivatives*, 2nd ed., ch. 5). Reverse mode pulls cotangents back, forward mode pushes tangents forward, and
"X-over-Y" applies X to the result of Y.

`torch.func` transforms of functions that return `(output, aux)`, with the types that torch does not declare.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import vmap
from torch.utils import _pytree as pytree

from hodiff.common.chunks import ByteCount, resolve_chunk_size, spans
from hodiff.common.trees import PyTree, one_hot_rows
from hodiff.derivatives.bound_function import BoundFunction
from hodiff.derivatives.route_choice import unavailable
from hodiff.derivatives.steady import steady
from hodiff.graphs import inspect_graph, nodes_of
from hodiff.recompute.cut_graphs import refuse_cuts_of
from hodiff.recompute.reachable import draw_of
from hodiff.recompute.recording import Recording
from hodiff.torch_internals.autograd.differentiation import only_reverse_mode
from hodiff.torch_internals.autograd.grad_mode import forward_pass, load_forward_rules
from hodiff.torch_internals.autograd.graph_nodes import lacks_kernel
from hodiff.torch_internals.wording import Wording, says


def push(f: Callable[..., Any], primals: tuple[PyTree, ...], tangents: tuple[PyTree, ...]) -> tuple[Any, Any, PyTree]:
    """Compute output, tangent and aux by forward mode, with the tangent in the dtypes of the output."""
    if not torch.compiler.is_compiling():
        load_forward_rules()
    output, tangent, aux = forward_pass(f, primals, tangents, has_aux=True)
    # torch promotes the tangent of a float32 scalar times a Python number to float64.
    return output, pytree.tree_map(lambda t, o: t.to(o.dtype), tangent, output), aux


def pull(f: Callable[..., Any], *primals: PyTree) -> tuple[Any, Callable[[Any], tuple[Any, ...]], PyTree]:
    """Compute output, pullback and aux by reverse mode."""
    try:
        result: Any = torch.func.vjp(f, *primals, has_aux=True)
    except Exception as error:
        if not (unavailable(error) and only_reverse_mode()):
            raise
        recorded = _recorded_pull(f, primals)
        if recorded is None:
            raise
        return recorded
    return result


def _recorded_pull(f: Callable[..., Any], primals: tuple[PyTree, ...]) -> Any:
    """Pull by `torch.autograd`, for Functions without setup_context; None if it would drop a gradient."""
    leaves, spec = pytree.tree_flatten(primals)

    recording = Recording(lambda operands: f(*pytree.tree_unflatten(operands, spec)), leaves, roots=(f,))
    output, aux = recording.result
    # Tensors that the function closes over may be differentiated, too.
    constant = [recording.inspect(each) for each in pytree.tree_leaves(output)]
    if any(map(lacks_kernel, nodes_of(*pytree.tree_leaves(output)))) or (recording.connected and any(constant)):
        return None

    def pullback(cotangents: Any) -> tuple[Any, ...]:
        found = recording.gradients(pytree.tree_leaves(output), pytree.tree_leaves(cotangents), keep=True)
        filled = [torch.zeros_like(x) if g is None else g for x, g in zip(recording.operands, found, strict=True)]
        result: tuple[Any, ...] = pytree.tree_unflatten(filled, spec)
        return result

    detached = output if recording.connected else pytree.tree_map(Tensor.detach, output)
    return detached, pullback, aux


def gradient(f: Callable[..., Any]) -> Callable[..., Any]:
    """Build a function that returns the gradient and aux."""
    return torch.func.grad(f, has_aux=True)


Leaves = tuple[Tensor, ...]


def reverse_over_reverse(f: BoundFunction, primals: Leaves, tangents: Leaves) -> tuple[Leaves, PyTree]:
    """Pull the direction back through the gradient."""
    _, pullback, aux = pull(gradient(guard_reverse(f)), primals)
    return pullback(tuple(tangents))[0], aux


def forward_over_reverse(f: BoundFunction, primals: Leaves, tangents: Leaves) -> tuple[Leaves, PyTree]:
    """Push the direction through the gradient."""
    _, product, aux = push(gradient(guard_reverse(f)), (primals,), (tangents,))
    return product, aux


def reverse_over_forward(f: BoundFunction, primals: Leaves, tangents: Leaves) -> tuple[Leaves, PyTree]:
    """Take the gradient of the directional derivative."""
    return gradient(_slope(f, tangents))(primals)


def forward_over_forward(f: BoundFunction, primals: Leaves, tangents: Leaves) -> tuple[Leaves, PyTree]:
    """Push every unit vector through the directional derivative: n passes instead of one."""
    _, _, product, aux = push_unit_vectors(f, primals, tangents)
    return product, aux


def push_unit_vectors(f: BoundFunction, primals: Leaves, tangents: Leaves) -> tuple[Tensor, Leaves, Leaves, PyTree]:
    """Compute value, gradient, product and aux; each pass yields an entry of the gradient and one of the product."""
    draw, f = draw_of(f.leaves, *f.roots), steady(f)
    bytes_each, value, aux = _size_of_tangents(f, primals)

    def along_all(*, filled: bool) -> tuple[Leaves, Leaves]:
        columns: tuple[list[Tensor], list[Tensor]] = [], []
        for index, leaf in enumerate(primals):
            parts = [(leaf.new_zeros(0), leaf.new_zeros(0))]
            for start, stop in spans(leaf.numel(), resolve_chunk_size("auto", leaf.numel(), bytes_each, leaf.device)):
                draw.rewind()
                along = _along(f, primals, tangents, index, filled=filled)
                parts.append(vmap(along, randomness="same")(one_hot_rows(start, stop, leaf)))
            for column, rows in zip(columns, zip(*parts, strict=True), strict=True):
                column.append(torch.cat(rows).view(leaf.shape).to(leaf.dtype))
        return tuple(columns[0]), tuple(columns[1])

    if torch.compiler.is_compiling():
        return value, *along_all(filled=False), aux
    try:
        return value, *along_all(filled=False), aux
    except RuntimeError as error:
        # A zero or unbatched tangent has no memory to write to in place, unless it is passed as zeros.
        if not says(error, Wording.CHANGES_ZERO, Wording.CHANGES_UNBATCHED):
            draw.rewind()
            _slope(f, tangents)(primals)  # its error says more than the error of a batch
            raise
    return value, *along_all(filled=True), aux


def _along(
    f: BoundFunction, primals: Leaves, tangents: Leaves, index: int, *, filled: bool
) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Build a function of a direction in one leaf: its first derivative, and its second along the tangents too."""

    def along(direction: Tensor) -> tuple[Tensor, Tensor]:
        directions = tuple(direction if i == index else torch.zeros_like(p) for i, p in enumerate(primals))
        if not filled:
            first, second = push(_value_and_slope(f, tangents), (primals,), (directions,))[1]
            return first, second
        # Batched zeros, so that in-place operators can write into them.
        zero = torch.zeros_like(direction).sum()
        zeros = tuple(torch.zeros_like(each) + zero.to(each) for each in tangents)
        directions = tuple(direction if i == index else each for i, each in enumerate(zeros))
        moved = push(lambda point, v: _value_and_slope(f, v)(point), (primals, tangents), (directions, zeros))
        first, second = moved[1]
        return first, second

    return along


def _value_and_slope(f: BoundFunction, tangents: Leaves) -> Callable[[Leaves], tuple[tuple[Tensor, Tensor], PyTree]]:
    """Build a function of the point that returns value and directional derivative, and aux."""

    def value_and_slope(point: Leaves) -> tuple[tuple[Tensor, Tensor], PyTree]:
        value, tangent, aux = push(guard_forward(f), (point,), (tangents,))
        return (value, tangent), aux

    return value_and_slope


def _slope(f: BoundFunction, tangents: Leaves) -> Callable[[Leaves], tuple[Tensor, PyTree]]:
    """Build a function of the point that returns the directional derivative, and aux."""

    def slope(point: Leaves) -> tuple[Tensor, PyTree]:
        _, tangent, aux = push(guard_forward(f), (point,), (tangents,))
        return tangent, aux

    return slope


def _size_of_tangents(f: BoundFunction, primals: Leaves) -> tuple[int, Tensor, PyTree]:
    """Return the bytes of a directional derivative's intermediate results for one unit vector, the value, and aux."""
    if torch.compiler.is_compiling():
        return 0, *f.scalar(primals)
    # Count without forward mode: there torch refuses in-place operators under a mode, and may end the process.
    # The function may change its argument in place, which is an error where it is differentiated.
    with ByteCount() as count:
        value, aux = f.scalar(tuple(map(torch.clone, primals)))
    return 2 * count.bytes, value, aux


PRODUCTS: dict[str, Callable[[BoundFunction, Leaves, Leaves], tuple[Leaves, PyTree]]] = {
    "reverse-over-reverse": reverse_over_reverse,
    "forward-over-reverse": forward_over_reverse,
    "reverse-over-forward": reverse_over_forward,
    "forward-over-forward": forward_over_forward,
}


def guard_reverse(f: BoundFunction) -> Callable[[Leaves], tuple[Tensor, PyTree]]:
    """Wrap the function for the innermost reverse pass, and raise if that pass would silently return zero."""

    def checked(point: Leaves) -> tuple[Tensor, PyTree]:
        value, aux = f.scalar(point)
        if not value.requires_grad:
            raise f.independent()
        if not torch.compiler.is_compiling():
            inspection = inspect_graph(value)
            if inspection.once is not None:
                raise NotImplementedError(inspection.once)
            refuse_cuts_of(value, inspection.functions, point)
        return value, aux

    return checked


def guard_forward(f: BoundFunction) -> Callable[[Leaves], tuple[Tensor, PyTree]]:
    """Wrap the function for the innermost forward pass, and raise if its value has no tangent."""

    def checked(point: Leaves) -> tuple[Tensor, PyTree]:
        value, aux = f.scalar(point)
        if forward_ad.unpack_dual(value).tangent is None:
            raise f.independent()
        return value, aux

    return checked
