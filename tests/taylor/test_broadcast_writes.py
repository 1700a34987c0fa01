"""Writing to tensors in place, in every form, with values that broadcast to the elements that are written."""

import itertools
import operator

import pytest
import torch
from mpmath_series import D
from slow_cases import thinned_pairs
from taylor.second_order import assert_second_order

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")
POINT = torch.tensor([0.7, -1.3, 0.4], dtype=D)
# Shapes by the number of coordinates, which is one of the sizes or another number.
SHAPES = {2: [(2, 2), (3, 2)], 3: [(1, 3), (4, 3)]}


def constants(*shape, seed=0):
    return torch.rand(shape, dtype=D, generator=torch.Generator().manual_seed(seed))


def moving(x, shape):
    """Elements that depend on one coordinate each, in an order without a period."""
    places = torch.arange(torch.Size(shape).numel()) ** 2 % len(x)
    return (x[places] * (1 + constants(len(places), seed=3))).exp().reshape(shape)


def mixed(x, shape):
    """Elements that depend on all coordinates."""
    return torch.sin(constants(torch.Size(shape).numel(), len(x), seed=4) @ x + 0.3).reshape(shape)


# What is written to: the whole tensor, and the part of it that is shown.
TARGETS = {
    "zeros": lambda x, shape: (z := torch.zeros(shape, dtype=D), z),
    "like": lambda x, shape: (z := torch.full_like(mixed(x, shape), 0.5), z),
    "moving": lambda x, shape: (z := moving(x, shape) * 1, z),
    "mixed": lambda x, shape: (z := mixed(x, shape) * 1, z),
    "part of zeros": lambda x, shape: (z := torch.zeros(2, *shape, dtype=D), z[1]),
    "part": lambda x, shape: (z := moving(x, (2, *shape)) * 1, z[1]),
    "transposed": lambda x, shape: (z := mixed(x, shape[::-1]) * 1, z.mT),
    "columns of zeros": lambda x, shape: (z := torch.ones(*shape, 2, dtype=D), z[..., 0]),
}


def setting(index):
    def write(z, v):
        z[index(z) if callable(index) else index] = v

    return write


def calling(name, *before, **named):
    """Call a method with arguments, which may be functions of the target, before the value."""

    def write(z, v):
        getattr(z, name)(*(each(z) if callable(each) else each for each in before), v, **named)

    return write


def shown_by(view, write):
    return lambda z, v: write(view(z), v)


def checkered(z):
    return (torch.arange(z.numel()).reshape(z.shape) % 2) == 0


def some_rows(z):
    return torch.arange(len(z)) % 2 == 0


def indices(z):
    return (torch.arange(len(z)), torch.arange(len(z)) % z.shape[-1])


def assign(operation):
    def write(z, v):
        operation(z, v)

    return write


copy = calling("copy_")
# In-place functions of a target and of a value, of any shape that torch broadcasts.
WRITES = {
    "all": setting(slice(None)),
    "ellipsis": setting(...),
    "nothing": setting(()),
    "new axis": setting(None),
    "new axis inside": setting((slice(None), None)),
    "new axis behind": setting((..., None)),
    "row": setting(0),
    "last row": setting(-1),
    "column": setting((slice(None), 0)),
    "column by ellipsis": setting((..., 0)),
    "column that is kept": setting((slice(None), slice(0, 1))),
    "element": setting((0, 0)),
    "some rows": setting(slice(0, 2)),
    "every other row": setting(slice(None, None, 2)),
    "row and columns": setting((0, slice(0, 2))),
    "rows and new axis": setting((slice(0, 2), None, slice(0, 2))),
    "list": setting(([0],)),
    "rows by tensor": setting(lambda z: torch.arange(len(z)).flip(0)),
    "columns by tensor": setting(lambda z: (slice(None), torch.arange(z.shape[1]).flip(0))),
    "columns of ellipsis": setting((..., torch.tensor([0]))),
    "pairs": setting(indices),
    "rows and columns": setting(lambda z: (torch.arange(len(z))[:, None], torch.arange(z.shape[1]))),
    "mask": setting(checkered),
    "mask of rows": setting(some_rows),
    "mask of columns": setting(lambda z: (slice(None), some_rows(z.mT))),
    "mask and column": setting(lambda z: (some_rows(z), 0)),
    "tensor that is a number": setting(torch.tensor(0)),
    "copy_": copy,
    "copy_ to a row": shown_by(lambda z: z[0], copy),
    "copy_ to a column": shown_by(lambda z: z[:, 0], copy),
    "copy_ to the transpose": shown_by(lambda z: z.mT, copy),
    "copy_ to the diagonal": shown_by(torch.diagonal, copy),
    "copy_ to a new axis": shown_by(lambda z: z[:, None], copy),
    "copy_ to a selected row": shown_by(lambda z: z.select(-1, 1), copy),
    "copy_ to a flat part": shown_by(lambda z: z.flatten()[1:4], copy),
    "copy_ to a narrow part": shown_by(lambda z: z.narrow(1, 0, 1), copy),
    "copy_ to a part of a part": shown_by(lambda z: z[:2].mT[:1], copy),
    "fill_": calling("fill_"),
    "fill_ of a row": shown_by(lambda z: z[0], calling("fill_")),
    "add_": calling("add_"),
    "add_ with alpha": calling("add_", alpha=2),
    "sub_": calling("sub_"),
    "mul_": calling("mul_"),
    "div_": calling("div_"),
    "+=": assign(operator.iadd),
    "-=": assign(operator.isub),
    "*=": assign(operator.imul),
    "/=": assign(operator.itruediv),
    "+= of a row": lambda z, v: operator.setitem(z, 0, z[0] + v),
    "add_ to a column": shown_by(lambda z: z[:, 0], calling("add_")),
    "mul_ of the diagonal": shown_by(torch.diagonal, calling("mul_")),
    "addcmul_": lambda z, v: z.addcmul_(v, v, value=2),
    "addcdiv_": lambda z, v: z.addcdiv_(v, 2 + v),
    "lerp_": lambda z, v: z.lerp_(v, 0.3),
    "lerp_ by a weight": lambda z, v: z.lerp_(v, v),
    "hypot_": lambda z, v: z.add_(1).hypot_(v),
    "atan2_": lambda z, v: z.add_(1).atan2_(v),
    "pow_": lambda z, v: z.mul_(0.1).add_(1.5).pow_(v),
    "clamp_": lambda z, v: z.clamp_(min=v),
    "masked_fill_": lambda z, v: z.masked_fill_(checkered(z), v),
    "masked_fill_ by rows": lambda z, v: z.masked_fill_(some_rows(z)[:, None], v),
    "masked_scatter_": lambda z, v: z.masked_scatter_(checkered(z), v.expand(z.shape)),
    "masked_scatter_ of rows": lambda z, v: z.masked_scatter_(some_rows(z.mT), v.expand(z.shape).contiguous()),
    "index_put_": lambda z, v: z.index_put_(indices(z), v),
    "index_put_ of rows": lambda z, v: z.index_put_((torch.arange(len(z)),), v),
    "index_put_ that adds": lambda z, v: z.index_put_((torch.arange(len(z)) % 2,), v, accumulate=True),
    "index_put_ by a mask": lambda z, v: z.index_put_((checkered(z),), v),
    "index_copy_": lambda z, v: z.index_copy_(0, torch.arange(len(z)).flip(0), v.expand(z.shape)),
    "index_add_": lambda z, v: z.index_add_(0, torch.arange(len(z)) % 2, v.expand(z.shape), alpha=2),
    "index_add_ to columns": lambda z, v: z.index_add_(1, torch.zeros(z.shape[1]).long(), v.expand(z.shape)),
    "scatter_": lambda z, v: z.scatter_(1, torch.arange(z.shape[1]).flip(0).expand(z.shape), v.expand(z.shape)),
    "scatter_add_": lambda z, v: z.scatter_add_(0, torch.zeros(z.shape).long(), v.expand(z.shape)),
    "scatter_reduce_": lambda z, v: z.scatter_reduce_(0, torch.zeros(z.shape).long(), v.expand(z.shape), "sum"),
    "put_": lambda z, v: z.put_(torch.arange(z.numel()), v.expand(z.shape)),
    "slice_scatter": lambda z, v: z.copy_(z.slice_scatter(v.expand(1, z.shape[1]), 0, 0, 1)),
    "select_scatter": lambda z, v: z.copy_(z.select_scatter(v.expand(z.shape[1]), 0, 0)),
    "diagonal_scatter": lambda z, v: z.copy_(z.diagonal_scatter(v.expand(min(z.shape)))),
    "where": lambda z, v: z.copy_(torch.where(checkered(z), v, z)),
    "two writes": lambda z, v: (copy(z, v), z[0].add_(v * v), z.mul_(v)),
}


def value_shapes(shape):
    """Shapes that may broadcast to a shape or to a part of it, with and without leading dimensions."""
    rows, columns = shape
    found = [(), (1,), (columns,), (rows,), (1, columns), (rows, 1), (1, 1), shape, shape[::-1], (1, *shape)]
    return list(dict.fromkeys(found))


def cases(write, target, count):
    """Yield the shapes of target and value that torch accepts and differentiates."""
    for shape in SHAPES[count]:
        for own, make in zip(value_shapes(shape), itertools.cycle((moving, mixed)), strict=False):
            x = POINT.clone().requires_grad_()
            try:
                whole, shown = target(x, shape)
                write(shown, make(x, own))
                whole.sum().backward()
            except (RuntimeError, IndexError):
                continue
            yield shape, make, own


# Both numbers of coordinates occur for every target.
@pytest.mark.one_in(13)
@pytest.mark.parametrize(
    ("name", "target", "count"),
    [(*pair, 2 + (k + k // len(TARGETS)) % 2) for k, pair in enumerate(thinned_pairs(WRITES, TARGETS, by=2))],
)
def test_values_that_broadcast_match(name, target, count):
    write, make_target = WRITES[name], TARGETS[target]
    found = list(cases(write, make_target, count))
    assert found

    def f(x):
        total = 0
        for k, (shape, make, own) in enumerate(found):
            whole, shown = make_target(x, shape)
            write(shown, make(x, own))
            whole = whole.flatten()
            total = total + (1 + 0.1 * k) * (torch.sin(whole) @ (1 + constants(len(whole), seed=k)))
        return total

    assert_second_order(f, POINT[:count])
