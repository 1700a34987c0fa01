"""Inspection of graphs with Functions written in less common ways."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hodiff import InputError, RouteError, hvp
from hodiff.functions import checkpoint
from hodiff.graphs import inspect_graph

X = torch.tensor([1.0, 2.0], dtype=torch.float64)


def cube_gradient(ctx: Any, grad_output: Tensor, *, factor: float) -> Tensor:
    return factor * ctx.saved_tensors[0] ** 2 * grad_output


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x**3

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)


class PartialBackward(Cube):
    backward = staticmethod(functools.partial(cube_gradient, factor=3.0))


class OnceByVjp(Cube):
    vjp = staticmethod(once_differentiable(functools.partial(cube_gradient, factor=3.0)))


def test_partial_as_backward_is_supported() -> None:
    product = hvp(lambda x: PartialBackward.apply(x).sum(), X, torch.ones_like(X))
    torch.testing.assert_close(product, 6 * X)


def test_once_differentiable_through_vjp_is_rejected() -> None:
    with pytest.raises(RouteError, match="once_differentiable"):
        hvp(lambda x: OnceByVjp.apply(x).sum(), X, torch.ones_like(X))


class Holder:
    """A class whose attributes are not searched."""

    weight = torch.tensor(2.0, requires_grad=True)


def test_graph_of_a_leaf_is_the_leaf():
    assert [id(leaf) for leaf in inspect_graph(Holder.weight)[0]] == [id(Holder.weight)]
    with pytest.raises(InputError, match="that f reaches otherwise"):
        checkpoint(lambda x: (x, Holder.weight), X.clone().requires_grad_())
