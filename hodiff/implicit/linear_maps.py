"""Pairs of linear maps and their transposes: Jacobians of residuals, and the maps of `linear_solve`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from hodiff.common.trees import PyTree
from hodiff.derivatives.products_by_route import pull
from hodiff.implicit.sparse_matrices import sparse_jacobian_of

Map = Callable[[PyTree], PyTree]


@dataclass(frozen=True)
class Linear:
    """Linear map that depends on parameters."""

    # apply(u, *params), differentiable in all arguments.
    apply: Callable[..., PyTree]
    # prepare(like, *params): the map for trees with the structure of `like` at constant parameters, for many products.
    prepare: Callable[..., Map]
    # matrix(like, *params): the map as a SciPy sparse matrix, from products with its coloring.
    matrix: Callable[..., Any]


@dataclass(frozen=True)
class Pair:
    """Linear map and its transpose."""

    forward: Linear
    transposed: Linear

    @property
    def T(self) -> Pair:  # noqa: N802
        """Pair with map and transpose exchanged."""
        return Pair(self.transposed, self.forward)


def map_of(matvec: Callable[..., PyTree], symmetric: bool) -> Pair:
    """Return the pair of the map `matvec(u, *params)`."""

    def transposed(u: PyTree, *params: Any) -> PyTree:
        zeros = pytree.tree_map(torch.zeros_like, u)
        return _pull(lambda x: matvec(x, *params), zeros, u)

    def prepare_transposed(like: PyTree, *params: Any) -> Map:
        return _recorded_pullback(lambda x: matvec(x, *params), pytree.tree_map(torch.zeros_like, like))

    jacobian = sparse_jacobian_of(matvec)

    def matrix(like: PyTree, *params: Any) -> Any:
        return jacobian(pytree.tree_map(torch.zeros_like, like), *params)

    forward = Linear(matvec, lambda _like, *params: lambda u: matvec(u, *params), matrix)
    return Pair(
        forward, forward if symmetric else Linear(transposed, prepare_transposed, lambda *args: matrix(*args).T)
    )


def jacobian_of(residual: Callable[..., PyTree], symmetric: bool) -> Pair:
    """Return the pair of the Jacobian of `residual(x, *params)` in `x`; its parameters are `(x, *params)`."""
    # Both maps use reverse passes, the route that exists and is correct most often.

    def pulled(u: PyTree, x: PyTree, *params: Any) -> PyTree:
        return _pull(lambda x: residual(x, *params), x, u)

    def push(v: PyTree, x: PyTree, *params: Any) -> PyTree:
        # A pullback is linear in its cotangent, and its transpose is the Jacobian.
        zeros = pytree.tree_map(torch.zeros_like, v)
        return _pull(lambda u: pulled(u, x, *params), zeros, v)

    def prepare_pull(_like: PyTree, x: PyTree, *params: Any) -> Map:
        return _recorded_pullback(lambda x: residual(x, *params), x)

    def prepare_push(like: PyTree, x: PyTree, *params: Any) -> Map:
        pullback = _recorded_pullback(lambda x: residual(x, *params), x, again=True)
        return _recorded_pullback(pullback, pytree.tree_map(torch.zeros_like, like))

    jacobian = sparse_jacobian_of(residual)

    def matrix(_like: PyTree, x: PyTree, *params: Any) -> Any:
        return jacobian(x, *params)

    transposed = Linear(pulled, prepare_pull, lambda *args: matrix(*args).T)
    return Pair(transposed if symmetric else Linear(push, prepare_push, matrix), transposed)


def _pull(f: Map, x: PyTree, cotangent: PyTree) -> PyTree:
    _, pullback, _ = pull(lambda x: (f(x), ()), x)
    return pullback(cotangent)[0]


def _recorded_pullback(f: Map, x: PyTree, again: bool = False) -> Map:
    """Return the pullback at a constant point, whose forward pass is recorded once."""
    leaves, spec = pytree.tree_flatten(x)
    with torch.enable_grad():
        inputs = [each.detach().requires_grad_() for each in leaves]
        outputs = pytree.tree_leaves(f(spec.unflatten(inputs)))
    used = [i for i, each in enumerate(outputs) if each.requires_grad]

    def pullback(cotangent: PyTree) -> PyTree:
        seeds = pytree.tree_leaves(cotangent)
        if not used:
            return spec.unflatten([torch.zeros_like(each) for each in leaves])
        return spec.unflatten(
            torch.autograd.grad(
                [outputs[i] for i in used],
                inputs,
                [seeds[i] for i in used],
                retain_graph=True,
                create_graph=again,
                materialize_grads=True,
            )
        )

    return pullback
