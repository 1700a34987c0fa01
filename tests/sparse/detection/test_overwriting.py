"""Patterns of functions that overwrite constants in place, at positions that depend on the argument."""

import numpy as np
import pytest
import torch

import hodiff
from hodiff.sparse import hessian_pattern, jacobian_pattern

X = torch.tensor([0.15, 0.25, 0.31, -0.4], dtype=torch.float64)
DTYPES = [torch.bool, torch.uint8, torch.int32, torch.long, torch.float64]


def two(x):
    """Return positions that depend on x: here those of -0.4 and 0.15."""
    return x.argsort()[:2]


def ones(m, count=2):
    return torch.ones(count, dtype=m.dtype)


def by_slice(m, x):
    m[1:] = x[1:] > 0
    return m


def at_positions(m, x):
    m[two(x)] = 1
    return m


WRITES = {
    "scatter_, number": lambda m, x: m.scatter_(0, two(x), 1),
    "scatter_, tensor": lambda m, x: m.scatter_(0, two(x), ones(m)),
    "scatter_, into a view": lambda m, x: m.view(2, 2).scatter_(1, two(x)[None] % 2, 1),
    "scatter_add_": lambda m, x: m.scatter_add_(0, two(x), ones(m)),
    "scatter_reduce_": lambda m, x: m.scatter_reduce_(0, two(x), ones(m), "amax"),
    "index_fill_": lambda m, x: m.index_fill_(0, two(x), 1),
    "index_copy_": lambda m, x: m.index_copy_(0, two(x), ones(m)),
    "index_add_": lambda m, x: m.index_add_(0, two(x), ones(m)),
    "index_reduce_": lambda m, x: m.index_reduce_(0, two(x), ones(m), "amax"),
    "index_put_": lambda m, x: m.index_put_((two(x),), ones(m)),
    "put_": lambda m, x: m.put_(two(x), ones(m)),
    "positions": at_positions,
    "slice": by_slice,
    "masked_fill_": lambda m, x: m.masked_fill_(x > 0, 1),
    "masked_scatter_": lambda m, x: m.masked_scatter_(x > 0, ones(m, 4)),
    "copy_": lambda m, x: m.copy_(x > 0),
    "fill_": lambda m, x: m.fill_(x[0] > 0),
    "zero_ of others": lambda m, x: m.fill_(1).masked_fill_(x < 0, 0),
    "add_": lambda m, x: m.add_((x > 0).to(m.dtype)),
    "logical_or_": lambda m, x: m.logical_or_(x > 0),
    "out=": lambda m, x: torch.gt(x, 0, out=m),
}


@pytest.mark.parametrize("name", WRITES)
def test_overwritten_constants_keep_what_was_written(name):
    write, compared = WRITES[name], 0
    for dtype in DTYPES:

        def f(x, dtype=dtype):
            m = torch.zeros(4, dtype=dtype)
            write(m, x)
            seen.append(m.clone())
            return m * x**3

        seen = []
        try:
            f(X)
        except (RuntimeError, NotImplementedError):  # torch has no such operator for the dtype
            continue
        m = seen[0]
        assert m.any()
        for at_point in (False, True):
            entries = np.diag(m.numpy() != 0)
            for found in (
                hessian_pattern(lambda x: f(x).sum(), X, at_point=at_point),
                jacobian_pattern(f, X, at_point=at_point),
            ):
                assert not (entries & ~found.toarray()).any(), (dtype, at_point)
        # The operator ran once in each detection.
        assert all(torch.equal(each, m) for each in seen)
        compared += 1
    assert compared >= 1


def test_one_hot_labels_that_depend_on_the_argument():
    def f(x):
        labels = torch.nn.functional.one_hot((x.abs() * 10).long() % 3, 3)
        return (labels * torch.arange(1, 4) * x[:, None] ** 3).sum()

    with pytest.warns(hodiff.HodiffWarning, match="The pattern at this x is used"):
        found = hodiff.sparse.hessian(f)(X).to_dense()
    torch.testing.assert_close(found, torch.diag(6 * X * torch.tensor([2, 3, 1, 2])))
