r"""The four second-order routes as compositions of `torch.func` transforms.

For scalar $f$ and directions $v$, each computes $\nabla^2 f(x)\, v$ (Griewank & Walther, *Evaluating Derivatives*,
2nd ed., ch. 5): reverse mode pulls cotangents back, forward mode pushes tangents on, and "X-over-Y" applies X to what
Y computes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import vmap

from hodiff.common.chunks import ByteCount, resolve_chunk_size, spans
from hodiff.common.trees import PyTree, one_hot_rows
from hodiff.derivatives.bound_function import BoundFunction
from hodiff.derivatives.steady import draw_of, steady
from hodiff.derivatives.transforms import gradient, pull, push
from hodiff.graphs import inspect_graph

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
    """Push every unit vector through the directional derivative: n passes where the other routes take one."""
    draw, f = draw_of(f), steady(f)
    slope = _slope(f, tangents)

    def second(index: int) -> Callable[[Tensor], Tensor]:
        def along(direction: Tensor) -> Tensor:
            directions = tuple(direction if i == index else torch.zeros_like(p) for i, p in enumerate(primals))
            return push(slope, (primals,), (directions,))[1]

        return along

    bytes_each, aux = _size_of_tangents(slope, primals)
    product = []
    for index, leaf in enumerate(primals):
        parts = []
        for start, stop in spans(leaf.numel(), resolve_chunk_size("auto", leaf.numel(), bytes_each, leaf.device)):
            draw.rewind()
            parts.append(vmap(second(index), randomness="same")(one_hot_rows(start, stop, leaf)))
        product.append(torch.cat(parts).view(leaf.shape).to(leaf.dtype) if parts else torch.zeros_like(leaf))
    return tuple(product), aux


def _slope(f: BoundFunction, tangents: Leaves) -> Callable[[Leaves], tuple[Tensor, PyTree]]:
    """The directional derivative, and aux, as a function of the point."""

    def slope(point: Leaves) -> tuple[Tensor, PyTree]:
        _, tangent, aux = push(guard_forward(f), (point,), (tangents,))
        return tangent, aux

    return slope


def _size_of_tangents(slope: Callable[[Leaves], tuple[Tensor, PyTree]], primals: Leaves) -> tuple[int, PyTree]:
    """Bytes that a directional derivative computes, each of which has a tangent for each unit vector; and aux."""
    if torch.compiler.is_compiling():
        return 0, slope(primals)[1]
    with ByteCount() as count:
        _, aux = slope(primals)
    return count.bytes, aux


PRODUCTS: dict[str, Callable[[BoundFunction, Leaves, Leaves], tuple[Leaves, PyTree]]] = {
    "reverse-over-reverse": reverse_over_reverse,
    "forward-over-reverse": forward_over_reverse,
    "reverse-over-forward": reverse_over_forward,
    "forward-over-forward": forward_over_forward,
}


def guard_reverse(f: BoundFunction) -> Callable[[Leaves], tuple[Tensor, PyTree]]:
    """The function as the innermost reverse pass sees it, refusing what that pass would silently take for zero."""

    def checked(point: Leaves) -> tuple[Tensor, PyTree]:
        value, aux = f.scalar(point)
        if not value.requires_grad:
            raise f.independent()
        if not torch.compiler.is_compiling():
            _, once = inspect_graph(value)
            if once is not None:
                raise NotImplementedError(once)
        return value, aux

    return checked


def guard_forward(f: BoundFunction) -> Callable[[Leaves], tuple[Tensor, PyTree]]:
    """The same for the innermost forward pass."""

    def checked(point: Leaves) -> tuple[Tensor, PyTree]:
        value, aux = f.scalar(point)
        if forward_ad.unpack_dual(value).tangent is None:
            raise f.independent()
        return value, aux

    return checked
