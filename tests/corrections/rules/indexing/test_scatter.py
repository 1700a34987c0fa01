"""Scattering from sources larger than the index, at repeated indices and by masks of any shape, by every route."""

import pytest
import torch
from corrections.against_torch import same_value
from corrections.contract import Contract
from drawing import normals, seeded

import hodiff

D = torch.float64
INDEX = torch.tensor([[0, 2], [1, 1]])
MASK = torch.tensor([[True, False], [True, True], [False, False]])

randn = normals(seeded())


def changed_in_place(x, src):
    y = 2 * x
    y.scatter_add_(0, INDEX, src)
    y.scatter_(0, INDEX, src[1:])
    y.scatter_reduce_(0, INDEX, src, "mean")
    return y.masked_scatter_(MASK, src**2)


def changed_in_place_at_repeated_indices(x, src):
    y = 2 * x
    y.scatter_(0, TWICE, src)
    y.index_copy_(1, torch.tensor([1, 1]), src[:3, :2] ** 2)
    y.index_copy_(0, torch.tensor(1), src[3:, :2] ** 2)
    y.index_put_((torch.tensor([0, 0]), torch.tensor([-1, 1])), src[0, :2] ** 3)
    y = y.sin()
    y.put_(torch.tensor([3, 3, 0]), src[0])
    y[[2, 2], 1:] = src[1:3, :1] * y[0, 0].clone()
    y[..., torch.tensor([[0], [0]]), None, None] = src[0, 1]
    y[MASK] = src[0]
    return y.index_fill_(0, torch.tensor([1, 1]), src[2, 2])


TWICE = torch.tensor([[0, 2], [0, 2], [1, 1]])
TARGET, LARGE = randn(3, 2), randn(4, 3)
CASES = {
    "scatter_add": (lambda x, src: x.scatter_add(0, INDEX, src**2), (TARGET, LARGE)),
    "scatter": (lambda x, src: torch.scatter(x, 0, INDEX[:1], src**2), (TARGET, LARGE)),
    "scatter_reduce sum": (lambda x, src: x.scatter_reduce(0, INDEX, src**2, "sum"), (TARGET, LARGE)),
    "scatter_reduce mean": (
        lambda x, src: torch.scatter_reduce(x, 0, INDEX, src**2, "mean", include_self=False),
        (TARGET, LARGE),
    ),
    "scatter_reduce amax": (lambda x, src: x.scatter_reduce(0, INDEX, src, "amax"), (TARGET, LARGE)),
    "masked_scatter": (lambda x, src: x.masked_scatter(MASK, src**2), (TARGET, LARGE)),
    "masked_scatter of a constant": (lambda src: torch.zeros(3, 2, dtype=D).masked_scatter(MASK, src), (randn(5),)),
    "masked_scatter broadcast": (lambda x, src: torch.masked_scatter(x, MASK[:, :1], src**2), (TARGET, randn(2, 2))),
    "scatter twice": (lambda x, src: x.scatter(0, TWICE, src**2), (TARGET, LARGE)),
    "index_copy twice": (lambda x, src: x.index_copy(0, TWICE[:, 1], src[:3, :2] ** 2), (TARGET, LARGE)),
    "index_copy of one": (lambda x, y: x.index_copy(0, TWICE[0, 1], y**2), (randn(3), randn())),
    "index_put twice": (lambda x, src: x.index_put((TWICE, TWICE // 2), src[:3, :2] ** 2), (TARGET, LARGE)),
    "index_put of one value": (lambda x, src: x.index_put((TWICE,), src[0, 0] ** 2), (TARGET, LARGE)),
    "put twice": (lambda x, src: x.put(TWICE, src[:3, :2] ** 2), (TARGET, LARGE)),
    "index_fill": (lambda src: torch.ones(3, 2, dtype=D).index_fill(1, TWICE[0, :1], src[0] ** 2), (randn(1),)),
    "in place at repeated indices": (changed_in_place_at_repeated_indices, (TARGET, LARGE)),
    "index_fill into a constant": (
        lambda x: torch.ones(3, 2, dtype=D).index_fill(0, torch.tensor([0, 2]), x[0, 0]) ** 3 * x,
        (TARGET,),
    ),
    "in place": (changed_in_place, (TARGET, LARGE)),
}


@pytest.mark.parametrize("dtype", [D, torch.bfloat16, torch.int64])
def test_values_match_torch(dtype):
    x, src = (TARGET * 4).to(dtype), (LARGE * 4).to(dtype)
    for f in (
        lambda: x.scatter_add(0, INDEX, src),
        lambda: torch.scatter(x, 1, INDEX[:, :1] % 2, src),
        lambda: x.scatter(0, INDEX, 3),
        lambda: x.scatter_reduce(0, INDEX, src, "amin"),
        lambda: x.clone().scatter_add_(0, INDEX, src),
        lambda: x.masked_scatter(MASK, src),
        lambda: torch.masked_scatter(x[:1], MASK, src),
        lambda: x.clone().masked_scatter_(MASK[:, :1], src),
    ):
        same_value(f)


BAD = {
    "scatter_add": lambda x: x.scatter_add(0, INDEX, x[:1]),
    "scatter dtype": lambda x: x.scatter(0, INDEX, LARGE.float()),
    "scatter_reduce": lambda x: x.scatter_reduce(0, INDEX, x[:1], "sum"),
    "masked_scatter dtype": lambda x: x.masked_scatter(MASK, x.float()),
    "masked_scatter too few": lambda x: x.masked_scatter(MASK, x[:1]),
    "masked_scatter shape": lambda x: x.masked_scatter(MASK[:2], x),
}


def filled(write):
    def f(x):
        z = torch.zeros(2, 3, dtype=D)
        write(z, x[0] * x[1])
        return (z**3).sum()

    return f


FILLS = {
    "fill_": lambda z, y: z.fill_(y),
    "torch.fill_": lambda z, y: torch.fill_(z, y),
    "fill_ of a view": lambda z, y: z[0].fill_(y),
    "aten.fill_": lambda z, y: torch.ops.aten.fill_.Tensor(z, y),
    "a column": lambda z, y: z.__setitem__((slice(None), 1), y),
    "an element": lambda z, y: z.__setitem__((0, 1), y),
    "everything": lambda z, y: z.__setitem__(..., y),
    "a mask": lambda z, y: z.__setitem__(torch.tensor([True, False]), y),
    "indices": lambda z, y: z.__setitem__((torch.tensor([0]), 1), y),
    "masked_fill_": lambda z, y: z.masked_fill_(torch.eye(2, 3) > 0, y),
    "index_fill_": lambda z, y: z.index_fill_(1, torch.tensor([0]), y),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", FILLS)
def test_a_number_fills_constants_by_every_route(name):
    f, x = filled(FILLS[name]), torch.tensor([0.5, -0.7], dtype=D)
    count = f(torch.ones_like(x)).item()
    a, b = x.tolist()
    slope = count * torch.tensor([3 * a**2 * b**3, 3 * a**3 * b**2], dtype=D)
    expected = count * torch.tensor([[6 * a * b**3, 9 * a**2 * b**2], [9 * a**2 * b**2, 6 * a**3 * b]], dtype=D)
    for mode in ("forward", "reverse"):
        torch.testing.assert_close(hodiff.jacobian(f, mode=mode)(x), slope)
    for route in hodiff.ROUTES:
        torch.testing.assert_close(hodiff.hessian(f, route=route)(x), expected)


class TestContract(Contract):
    cases, order, one_in, wrong_one_in = CASES, 3, 18, 8
    # Dynamo refuses the gradient of a constant tangent, writes in place, and masks.
    compiled = ("scatter", "scatter_reduce mean")
    # torch.func.vmap cannot write a batch into an unbatched tensor.
    not_batched = tuple(name for name in CASES if name.startswith("in place"))
    wrong = (
        *("scatter_add", "scatter_reduce mean", "masked_scatter of a constant"),
        *(each for each in CASES if "twice" in each or "repeated" in each),
    )
    errors, error_inputs = BAD, (TARGET,)
