"""Tensors with elements that depend on no coordinate, reduced over dimensions in every form."""

import itertools

import pytest
import torch
from mpmath_series import D
from slow_cases import thinned_pairs
from taylor.second_order import assert_second_order
from torch.nn import functional as F

import hodiff
from hodiff.taylor import value_grad_laplacian

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")
# As many coordinates as rows of the matrices below, and as elements of the smallest ones.
POINT = torch.tensor([0.7, -1.3, 0.4, 1.9], dtype=D)


def constants(*shape, seed=0):
    return torch.rand(shape, dtype=D, generator=torch.Generator().manual_seed(seed))


def set_on_the_diagonal(x):
    z = torch.zeros(4, 4, dtype=x.dtype)
    z[range(4), range(4)] = x
    return z


def filled_diagonal(x):
    z = torch.zeros(4, 4, dtype=x.dtype)
    z.diagonal()[:] = x
    return z


def pairs(x):
    """Compute differences of two groups of two particles."""
    x = x.reshape(2, 2)
    return x[:, :, None] - x[:, None]


# Functions of four numbers, with matrices or batches of matrices whose elements move in no direction or in some.
PRODUCERS = {
    "some pairs": lambda x: x[:2, None] - x[:2],
    "all pairs": lambda x: x[:, None] - x,
    "groups of pairs": pairs,
    "diag": torch.diag,
    "diag above": lambda x: torch.diag(x[:3], 1),
    "diagflat": lambda x: torch.diagflat(x.reshape(2, 2)),
    "diag_embed": lambda x: torch.diag_embed(x.reshape(2, 2)),
    "diag_embed in front": lambda x: torch.diag_embed(x.reshape(2, 2), dim1=0, dim2=2),
    "diagonal twice": lambda x: torch.diag_embed(torch.diag(x)),
    "block_diag": lambda x: torch.block_diag(*x),
    "blocks": lambda x: torch.block_diag(x[:2].reshape(2, 1), x[2:].reshape(1, 2)),
    "set": set_on_the_diagonal,
    "set by a view": filled_diagonal,
    "diagonal_scatter": lambda x: torch.diagonal_scatter(torch.zeros(4, 4, dtype=D), x),
    "scatter": lambda x: torch.zeros(4, 2, dtype=D).scatter(1, torch.tensor([[0], [1], [1], [0]]), x[:, None]),
    "index_put": lambda x: torch.zeros(2, 4, dtype=D).index_put((torch.tensor([0, 1, 0, 1]), torch.arange(4)), x),
    "masked_scatter": lambda x: torch.zeros(4, 4, dtype=D).masked_scatter(torch.eye(4, dtype=torch.bool), x),
    "where": lambda x: torch.where(torch.eye(4, dtype=torch.bool), x, 0.0),
    "times the identity": lambda x: torch.eye(4, dtype=D) * x,
    "triu": lambda x: torch.outer(x, x.exp()).triu(1),
    "tril of rows": lambda x: (x[:, None] * constants(4, 3)).tril(),
    "pad": lambda x: F.pad(x.reshape(2, 2), (1, 0, 0, 1)),
    "stack with zeros": lambda x: torch.stack([torch.cat([x[:2], torch.zeros(2, dtype=D)]), x.flip(0)]),
    "shifted rows": lambda x: torch.stack([x, x.roll(1), x.roll(2)]),
    "constant rows": lambda x: torch.cat([torch.ones(2, 4, dtype=D), x[None]]),
}


def all_dims(rank):
    """Dimensions in every order, counted from the front and from the back."""
    for count in range(rank + 1):
        for dims in itertools.permutations(range(rank), count):
            yield dims
            yield tuple(d - rank for d in dims)


# Functions of a matrix or of a batch of matrices without zeros; the second argument has dimensions, more than one of
# them where torch supports it.
OVER_DIMS = {
    "sum": lambda z, dims, keepdim: z.sum(dims, keepdim=keepdim),
    "mean": lambda z, dims, keepdim: z.mean(dims, keepdim=keepdim),
    "nansum": lambda z, dims, keepdim: z.nansum(dims, keepdim=keepdim),
    "nanmean": lambda z, dims, keepdim: z.nanmean(dims, keepdim=keepdim),
    "amax": lambda z, dims, keepdim: z.amax(dims, keepdim=keepdim),
    "amin": lambda z, dims, keepdim: z.amin(dims, keepdim=keepdim),
    "logsumexp": lambda z, dims, keepdim: z.logsumexp(dims, keepdim=keepdim),
    "var": lambda z, dims, keepdim: z.var(dims, correction=0, keepdim=keepdim),
    "std": lambda z, dims, keepdim: z.std(dims, keepdim=keepdim),
    "var_mean": lambda z, dims, keepdim: torch.stack(torch.var_mean(z, dims, keepdim=keepdim)),
    "vector_norm": lambda z, dims, keepdim: torch.linalg.vector_norm(z, 2, dims, keepdim),
    "vector_norm 1": lambda z, dims, keepdim: torch.linalg.vector_norm(z, 1, dims, keepdim),
    "vector_norm 3": lambda z, dims, keepdim: torch.linalg.vector_norm(z, 3, dims, keepdim),
    "vector_norm inf": lambda z, dims, keepdim: torch.linalg.vector_norm(z, float("inf"), dims, keepdim),
    "sum then sum": lambda z, dims, keepdim: z.sum(dims, keepdim=True).exp().sum(dims, keepdim=keepdim),
}
OF_ALL = {
    "sum": torch.sum,
    "sum of no dimensions": lambda z: z.sum(()),
    "mean": torch.mean,
    "prod": torch.prod,
    "prod of each": lambda z: z.prod(-1).prod(-1),
    "amax": torch.amax,
    "max": torch.max,
    "var": torch.var,
    "std": torch.std,
    "norm": torch.norm,
    "matrix_norm": torch.linalg.matrix_norm,
    "matrix_norm of dims": lambda z: torch.linalg.matrix_norm(z, dim=(0, -1), keepdim=True),
    "nuclear": lambda z: torch.linalg.matrix_norm(z, "nuc"),
    "norm 1": lambda z: torch.linalg.norm(z, 1, dim=(-2, -1)),
    "logsumexp": lambda z: torch.logsumexp(z, (-2, -1)),
    "softmax": lambda z: torch.softmax(z.flatten(), 0),
    "log_softmax": lambda z: torch.log_softmax(z, -2),
    "trace": lambda z: torch.einsum("...ii->...", z[..., : z.shape[-2], : z.shape[-1]][..., :2, :2]),
    "trace of torch": lambda z: torch.trace(z.flatten(0, -2)),
    "einsum": lambda z: torch.einsum("...ij->...", z),
    "einsum of two": lambda z: torch.einsum("...ij,...ij->...", z, z),
    "einsum with a constant": lambda z: torch.einsum("...ij,ij->...", z, constants(*z.shape[-2:])),
    "tensordot": lambda z: torch.tensordot(z, z, z.ndim),
    "gram": lambda z: z.mT @ z,
    "gram of rows": lambda z: z @ z.mT,
    "gram as sum": lambda z: (z @ z.mT).sum((-1, -2)),
    "times a constant": lambda z: z @ constants(z.shape[-1], 3),
    "constant times it": lambda z: constants(3, z.shape[-2]) @ z,
    "linear": lambda z: F.linear(z, constants(3, z.shape[-1])),
    "matrix and vector": lambda z: z @ constants(z.shape[-1]),
    "vector and matrix": lambda z: constants(z.shape[-2]) @ z,
    "bilinear form": lambda z: constants(z.shape[-2]) @ z @ z.mT @ constants(z.shape[-2]),
    "dot": lambda z: torch.dot(z.flatten(), z.exp().flatten()),
    "flattened product": lambda z: z.flatten() @ constants(z.numel()),
    "cumsum": lambda z: z.cumsum(-1).cumsum(-2).exp().sum((-1, -2)),
    "cumsum of all": lambda z: z.flatten().cumsum(0),
    "cumprod": lambda z: z.cumprod(-2),
    "log determinant": lambda z: torch.linalg.slogdet(z @ z.mT + torch.eye(z.shape[-2], dtype=D))[1],
    "attention": lambda z: F.scaled_dot_product_attention(z, z, z),
    "layer_norm": lambda z: F.layer_norm(z, z.shape[-2:]),
    "normalize": lambda z: F.normalize(z, dim=(-2, -1)),
    "group_norm": lambda z: F.group_norm(z.flatten()[None, :, None], 1),
    "sum_to_size": lambda z: z.sum_to_size(*[1] * z.ndim),
    "mse_loss": lambda z: F.mse_loss(z, z.flip(-1).exp()),
    "cosine_similarity": lambda z: F.cosine_similarity(z, z.flip(-1), dim=-2),
    "cdist": lambda z: torch.cdist(z, z + 1),
    "avg_pool": lambda z: F.avg_pool2d(z.reshape(1, -1, *z.shape[-2:]), 2, 1),
    "max_pool": lambda z: F.max_pool2d(z.reshape(1, -1, *z.shape[-2:]), 2, 1),
    "conv": lambda z: F.conv2d(z.reshape(-1, 1, *z.shape[-2:]), constants(2, 1, 2, 2)),
    "sort": lambda z: z.sort(-2).values,
    "topk of all": lambda z: z.flatten().topk(2).values,
    "index_add": lambda z: torch.zeros(2, *z.shape[1:], dtype=D).index_add(0, torch.arange(len(z)) % 2, z),
    "quotient of sums": lambda z: z.exp().sum((-2, -1)) / z.square().sum((-1, -2)),
    "weights divided by their sum": lambda z: (z.exp() / z.exp().sum((-2, -1), keepdim=True)) @ z.mT,
    "sum of a broadcast": lambda z: (z[..., None, :] * z[..., None]).sum((-1, -2, -3)),
    "sum of pairs": lambda z: (z[..., None, :] - z[..., None, :, :]).square().sum((-3, -1)),
}


def number_of(producer, function):
    """Return a function of four numbers that reduces the elements away from 0, and weights the result."""

    def f(x):
        z = producer(x)
        z = z * (1 + 0.1 * z) + 2 * constants(*z.shape, seed=1) - 0.7
        found = function(z).flatten()
        return torch.sin(0.3 * found) @ (1 + constants(len(found), seed=2))

    return f


@pytest.mark.one_in(20)
@pytest.mark.parametrize("reduction", OF_ALL)
@pytest.mark.parametrize("producer", PRODUCERS)
def test_reductions_of_structural_zeros_match(producer, reduction):
    assert_second_order(number_of(PRODUCERS[producer], OF_ALL[reduction]), POINT)


@pytest.mark.one_in(10)
@pytest.mark.parametrize(("producer", "reduction"), thinned_pairs(PRODUCERS, OVER_DIMS, by=2))
def test_reductions_over_dimensions_match(producer, reduction):
    """All dimensions in one function: each contributes a result of its own."""
    made, function = PRODUCERS[producer], OVER_DIMS[reduction]
    rank = made(POINT).ndim

    def f(x):
        parts = [
            number_of(made, lambda z, dims=dims: function(z, dims, k % 2 == 1))(x) * (1 + 0.1 * k)
            for k, dims in enumerate(all_dims(rank))
            if dims
        ]
        return torch.stack(parts).sum()

    _assert_laplacians(f)


@pytest.mark.parametrize("producer", PRODUCERS)
def test_sums_alone_match(producer):
    """The plain sum of each, which no later rule converts to all directions."""
    made = PRODUCERS[producer]
    for dims in all_dims(made(POINT).ndim):
        for keepdim in (False, True):
            _assert_laplacians(lambda x: made(x).exp().sum(dims, keepdim=keepdim).log().sum())


def set_on_the_diagonals(x):
    z = torch.zeros(*x.shape, 4, dtype=x.dtype)
    z[..., range(4), range(4)] = x
    return z


# Functions of points (..., 4).
OF_POINTS = {
    "diag_embed": torch.diag_embed,
    "set": set_on_the_diagonals,
    "diagonal_scatter": lambda x: torch.diagonal_scatter(
        torch.zeros(*x.shape, 4, dtype=D), x, offset=0, dim1=-2, dim2=-1
    ),
    "times the identity": lambda x: torch.eye(4, dtype=D) * x[..., None, :],
    "pairs": lambda x: (x[..., :, None] - x[..., None, :]).triu(2),
    "some pairs": lambda x: x[..., :2, None] - x[..., None, :2],
}


@pytest.mark.parametrize("dims", [(-1, -2), (-2, -1), (1, 2), (2, 1), (1, -1)])
@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("producer", OF_POINTS)
def test_sums_of_batches_match(producer, keepdim, dims):
    made = OF_POINTS[producer]
    points = torch.stack([POINT, POINT.flip(0), 2 * POINT, POINT.exp()])

    def f(x):
        z = made(x) + constants(4, 4)[: made(x).shape[-2], : made(x).shape[-1]]
        total, mean = z.exp().sum(dims, keepdim=keepdim), z.mean(dims, keepdim=keepdim)
        norm, variance = torch.linalg.vector_norm(z, 2, dims, keepdim), z.var(dims, keepdim=keepdim)
        return (torch.log(total) * (mean + norm * variance)).reshape(len(x))

    found = hodiff.laplacian(f, batched=True)(points)
    expected = [hodiff.hessian_matrix(lambda x: f(x[None])[0], each).trace() for each in points]
    torch.testing.assert_close(found, torch.stack(expected))


def test_sums_over_dimers_match():
    """Fewer coordinates move an element than a sparse jet may hold, so that sums stay sparse."""
    x = torch.randn(5, 2, 3, dtype=D, generator=torch.Generator().manual_seed(0))

    def f(x):
        squares = (x[:, :, None] - x[:, None]).square().sum(-1)
        return (squares + torch.eye(2, dtype=D)).sqrt().sum((1, 2)).sin().sum()

    torch.testing.assert_close(hodiff.laplacian(f)(x), hodiff.hessian_matrix(f, x).trace())


def _assert_laplacians(f):
    value, gradient, laplacian = value_grad_laplacian(f)(POINT)
    leaf = POINT.clone().requires_grad_()
    torch.testing.assert_close(value, f(leaf).detach())
    torch.testing.assert_close(gradient, torch.autograd.grad(f(leaf), leaf)[0])
    torch.testing.assert_close(laplacian, hodiff.hessian_matrix(f, POINT).trace())
    both = torch.stack([POINT, POINT.flip(0)])
    rows = hodiff.laplacian(lambda points: torch.stack([f(each) for each in points]), batched=True)(both)
    torch.testing.assert_close(rows[0], laplacian)
