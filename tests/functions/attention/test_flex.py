"""Attention under functions of scores and positions: derivatives, memory, and what it refuses."""

import math
import re

import pytest
import torch
from functions.attention.flex_problems import (
    PROBLEMS,
    Problem,
    alibi,
    blind,
    capped,
    causal,
    mask_of,
    normal,
    relative,
)
from functions.attention.test_attention import gradient_step, peak, product_step, reverse_product_step
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.utils import _pytree as pytree

import hodiff
from hodiff.checks import derivative, route_names
from hodiff.errors import InputError
from hodiff.functions import attention, flex_attention
from hodiff.functions.attention.flex import flex_attention as room
from hodiff.rules import blockwise


@pytest.fixture(params=["one block", "blocks of two rows"])
def rows(request, monkeypatch):
    """Two rows a block, so that small inputs have several."""
    if request.param != "one block":
        monkeypatch.setattr(blockwise, "BLOCK", 1)
        monkeypatch.setattr(blockwise, "FEWEST_ROWS", 2)
        monkeypatch.setattr(room, "_ROWS_TO_SKIP", 2)


def weighted(f, inputs):
    """A function of numbers in a row, and where to look at it."""
    sizes = [x.numel() for x in inputs]

    def phi(flat):
        parts = (part.reshape(x.shape) for part, x in zip(flat.split(sizes), inputs, strict=True))
        total = 0.0
        for y in pytree.tree_leaves(f(*parts)):
            w = torch.linspace(0.5, 1.5, y.numel(), dtype=y.dtype).reshape(y.shape)
            total = total + (y * w).sum() + y.square().sum()
        return total

    point = torch.cat([x.reshape(-1) for x in inputs])
    return phi, point, torch.linspace(-1, 1, point.numel(), dtype=point.dtype)


def to_second_order(f, inputs):
    """Value, gradient, tangent, and one product by each route."""
    phi, point, v = weighted(f, inputs)
    slope = torch.func.jvp(phi, (point,), (v,))[1]
    return [*pytree.tree_leaves(f(*inputs)), torch.func.grad(phi)(point), slope, *products(phi, point, v, 2)]


def products(phi, point, v, order):
    return [derivative(phi, name)(point, *[v] * (order - 1)) for name in route_names(order) if "reverse" in name]


def assert_same(ours, expected, tolerance=1e-11):
    for x, y in zip(ours, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=tolerance * max(1.0, float(y.detach().abs().max())))


@pytest.mark.parametrize("name", PROBLEMS)
def test_to_second_order(name, rows):
    problem = PROBLEMS[name]
    inputs = problem.inputs()
    assert_same(to_second_order(problem.ours, inputs), to_second_order(problem.by_primitives, inputs))
