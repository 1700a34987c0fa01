"""Laplacians with sparse directions are correct for any function of particles, and stay sparse where possible."""

import itertools
import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch.func import functional_call, grad, jvp, vmap
from torch.nn import functional as F

import hodiff
from hodiff.taylor.jets import Jet
from hodiff.taylor.sparsity import remembering
from hodiff.taylor.sparsity.moving_directions import Support, levelled, merged_rows, support, united

D = torch.float64
PARTICLES, WIDTH = 5, 7
SOURCES, TARGETS = torch.tensor([0, 2, 2, 4, 1, 0]), torch.tensor([1, 1, 3, 0, 4, 2])
EYE = torch.eye(PARTICLES, dtype=D)


def weights(rows, columns, seed=0):
    return torch.randn(rows, columns, dtype=D, generator=torch.Generator().manual_seed(seed))


FIRST, SECOND, MIX, ORBITALS = weights(WIDTH, 3), weights(WIDTH, WIDTH, 1), weights(5, 5, 2), weights(5, WIDTH, 3)


def features(x):
    return torch.tanh(F.linear(x, FIRST))


def pairs(x):
    return x.unsqueeze(-2) - x.unsqueeze(-3)


def distances(x):
    return torch.sqrt((pairs(x) ** 2).sum(-1) + EYE)


def one_particle_features(x, particle, rows):
    """Compute a matrix of one particle's features."""
    return features(x)[..., particle, :].unsqueeze(-2) * weights(rows, WIDTH, rows) + weights(rows, WIDTH, rows + 1)


def unnormalised_attention(x):
    e = torch.exp(features(x) @ features(x).mT / 3)
    return (e @ features(x)) / e.sum(-1, keepdim=True)


def attention_from_the_right(x):
    e = torch.exp(features(x) @ features(x).mT / 3)
    return features(x).mT @ (e / e.sum(-2, keepdim=True))


def messages(x):
    sent = torch.tanh(x[..., SOURCES, :] * x[..., TARGETS, :])
    return torch.zeros_like(x).index_add(-2, TARGETS, sent)


def written(x):
    y = torch.zeros_like(x)
    y[..., 0] = x[..., 1].sin()
    y[..., 1:] = x[..., :2] ** 2
    return y


def residual_in_place(x):
    y = features(x)
    y += torch.sin(y)
    y.mul_(2)
    return y


def wavefunction(x):
    h = features(x)
    h = h + unnormalised_attention(x) + F.scaled_dot_product_attention(h, h, h)
    envelope = torch.exp(-x.norm(dim=-1, keepdim=True))
    log = torch.linalg.slogdet(F.linear(h, ORBITALS) * envelope)[1]
    return log - (1 / (1 + distances(x))).triu(1).sum((-1, -2))


# A function of points (..., 5, 3), and the number of the 15 directions in its result; None means all.
PROGRAMS = {
    "layer": (features, 3),
    "two layers": (lambda x: F.silu(F.linear(F.silu(F.linear(x, FIRST)), SECOND)), 3),
    "sum of features": (lambda x: features(x).sum(-1), 3),
    "sum of particles": (lambda x: features(x).sum(-2), None),
    "nothing": (lambda x: features(x)[..., :0], ...),
    "mean": (lambda x: features(x).mean((-1, -2)), None),
    "mean in other order": (lambda x: features(x).mean((-2, -1), keepdim=True), None),
    "sum that is kept": (lambda x: features(x).sum(-2, keepdim=True) * features(x), None),
    "pairs": (lambda x: torch.sin(pairs(x)), 2),
    "distances": (lambda x: torch.exp(-distances(x)), 6),
    "sum of distances": (lambda x: distances(x).sum(-1), None),
    "repulsion": (lambda x: (1 / distances(x)).triu(1).sum((-1, -2)), None),
    "norm": (lambda x: torch.linalg.vector_norm(x, dim=-1), 3),
    "scaled by norm": (lambda x: x.norm(dim=-1, keepdim=True) * x, 3),
    "flat": (lambda x: torch.sin(x.flatten(-2)), 1),
    "flat and mixed": (lambda x: torch.sin(F.linear(x.flatten(-2), weights(4, 15))), None),
    "transposed": (lambda x: torch.sin(x.mT) * x.mT, 1),
    "matrix from the left": (lambda x: torch.tanh(MIX @ features(x)), None),
    "matrix from the right": (lambda x: features(x).mT @ MIX, None),
    "edges": (lambda x: torch.tanh(x[..., SOURCES, :] - x[..., TARGETS, :]), 2),
    "messages": (messages, None),
    "cat": (lambda x: torch.tanh(F.linear(torch.cat([x, x.flip(-2)], -1), torch.cat([FIRST, FIRST], -1))), 6),
    "cat with a mean": (
        lambda x: torch.cat([features(x), features(x).mean(-2, keepdim=True) + 0 * features(x)], -1),
        None,
    ),
    "stack": (lambda x: torch.stack([x[..., 0, :], x[..., 1, :] * x[..., 2, :]], -2).exp(), 2),
    "cat with a constant": (lambda x: torch.cat([x, torch.ones_like(x).detach()], -1).exp(), 1),
    "padded": (lambda x: F.pad(x, (1, 0), value=2.0) ** 3, 1),
    "copies": (lambda x: torch.transpose_copy(torch.constant_pad_nd(x, (1, 0)), -1, -2).exp(), 1),
    "zeta": (lambda x: torch.special.zeta(3.0, 1 + x * x), 1),
    "scores": (lambda x: torch.exp(features(x) @ features(x).mT / 3), 6),
    "scores twice": (lambda x: (features(x) @ features(x).mT) @ (features(x) @ features(x).mT), None),
    "softmax": (lambda x: torch.softmax(features(x) @ features(x).mT, -1), None),
    "attention": (lambda x: torch.softmax(features(x) @ features(x).mT, -1) @ features(x), None),
    "attention, divided last": (unnormalised_attention, None),
    "attention from the right": (attention_from_the_right, None),
    "attention with a constant": (lambda x: torch.softmax(features(x) @ features(x).mT, -1) @ ORBITALS, None),
    "attention of torch": (lambda x: F.scaled_dot_product_attention(features(x), features(x), features(x)), None),
    "causal attention": (
        lambda x: F.scaled_dot_product_attention(features(x), features(x), features(x), is_causal=True),
        None,
    ),
    "weights asked for twice": (
        lambda x: (w := torch.softmax(features(x) @ features(x).mT, -1)) @ features(x) @ ORBITALS.mT * w,
        None,
    ),
    "layer norm": (lambda x: F.layer_norm(features(x), (WIDTH,)), 3),
    "variance": (lambda x: features(x).var(-1), 3),
    "product": (lambda x: features(x).prod(-1), 3),
    "logsumexp": (lambda x: torch.logsumexp(features(x), -1), 3),
    "cumsum of features": (lambda x: torch.cumsum(features(x), -1), 3),
    "cumsum of particles": (lambda x: torch.cumsum(features(x), -2), None),
    "determinant of rows": (lambda x: torch.linalg.slogdet(F.linear(features(x), ORBITALS))[1], None),
    "determinant of columns": (
        lambda x: torch.logdet(F.linear(features(x), ORBITALS).mT @ F.linear(features(x), ORBITALS) + 3 * EYE),
        None,
    ),
    "transposed determinant": (lambda x: torch.linalg.slogdet(F.linear(features(x), ORBITALS).mT)[1], None),
    "determinant itself": (lambda x: torch.linalg.det(F.linear(features(x), ORBITALS)), None),
    "rows of two particles": (
        lambda x: torch.linalg.slogdet(F.linear(features(x) * features(x).roll(1, -2), ORBITALS) + EYE)[1],
        None,
    ),
    "two determinants": (
        lambda x: torch.linalg.slogdet(torch.stack([F.linear(features(x), w) for w in (ORBITALS, ORBITALS.sin())], -3))[
            1
        ],
        None,
    ),
    "masked": (lambda x: features(x).masked_fill(torch.arange(5)[:, None] > 2, 0.0).exp(), 3),
    "where": (lambda x: torch.where(x > 0, x.sin(), x**2), 1),
    "where of others": (lambda x: torch.where(x > 0, x.roll(1, -2), x) ** 2, 2),
    "in place": (residual_in_place, 3),
    "written": (written, None),
    "einsum": (lambda x: torch.einsum("...if,...jf->...ij", features(x), features(x)), None),
    "sort": (lambda x: torch.sort(x, -2)[0] ** 2, None),
    "largest": (lambda x: features(x).amax(-1), None),
    "inner product": (lambda x: (x[..., 0, :] * x[..., 1, :]).sum(-1), 6),
    "outer product": (lambda x: x[..., 0, :].unsqueeze(-1) * x[..., 1, :].unsqueeze(-2), 2),
    "times a vector": (lambda x: torch.matmul(features(x), SECOND[0]), 3),
    "times a column": (lambda x: torch.matmul(features(x), features(x)[..., 0, :].unsqueeze(-1)), 6),
    "times a vector, and on": (lambda x: torch.matmul(features(x), SECOND[0]).sin().unsqueeze(-1) * features(x), 3),
    "a vector times": (lambda x: torch.matmul(MIX[0], features(x)).sin().unsqueeze(-2) * features(x), None),
    "a layer of one weight": (lambda x: F.linear(features(x), SECOND[0]).sin().unsqueeze(-1) + features(x), ...),
    "powers of a matrix": (lambda x: torch.exp((y := features(x) @ features(x).mT) @ y), None),
    "convolution": (lambda x: F.conv1d(features(x).reshape(-1, 5, 7), MIX.unsqueeze(-1)).tanh(), None),
    "ring": (lambda x: (x - x.roll(1, -2)).pow(4).sum(-1), 6),
    "expanded": (lambda x: x.unsqueeze(-3).expand(*x.shape[:-2], 4, 5, 3).sin(), 1),
    "chunks": (lambda x: sum(each.sin() for each in F.linear(x, torch.cat([FIRST, SECOND[:, :3]])).chunk(2, -1)), 3),
    "detached": (lambda x: x.detach() * x, 1),
    "diagonal": (lambda x: torch.diagonal(pairs(x).sum(-1) + x[..., :1].cos(), dim1=-2, dim2=-1), 6),
    "three axes": (
        lambda x: torch.baddbmm(features(x), features(x) @ features(x).mT, features(x)) if x.ndim == 3 else x,
        ...,
    ),
    "matrices of one particle": (lambda x: one_particle_features(x, 0, 4) @ one_particle_features(x, 0, 6).mT, 3),
    "matrices of two particles": (lambda x: one_particle_features(x, 0, 4) @ one_particle_features(x, 1, 6).mT, 6),
    "matrix of one, rows of each": (lambda x: one_particle_features(x, 2, 4) @ features(x).mT, 6),
    "determinant of one particle": (
        lambda x: torch.linalg.slogdet(one_particle_features(x, 0, WIDTH) + weights(WIDTH, WIDTH, 7))[1],
        3,
    ),
    "holes along the sum": (lambda x: F.pad(features(x), (2, 1)) @ F.pad(features(x).roll(1, -2), (1, 2)).mT, 6),
    "masks along the sum": (lambda x: (torch.exp(distances(x)).triu() @ features(x)).sin(), None),
    "softmax under a mask": (
        lambda x: torch.softmax(distances(x).masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf), -1) @ features(x),
        None,
    ),
    "squares": (lambda x: features(x) @ features(x).mT * (MIX @ MIX), 6),
    "larger and smaller": (
        lambda x: features(x) + (features(x).sum(-2, keepdim=True) * features(x)) - features(x).sin(),
        None,
    ),
    "of all and of one": (lambda x: (MIX @ features(x)) * features(x) / (2 + features(x)), None),
    "wavefunction": (wavefunction, None),
}


# torch differentiates these for a batch of points only, or not at all.
ALONE = ("convolution", "three axes", "in place", "nothing")


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", PROGRAMS)
def test_sparse_and_dense_passes_agree(name):
    f, slots = PROGRAMS[name]
    seen = []

    def watched(x):
        y = f(x)
        # The check that points do not interact is a separate pass with one direction.
        if isinstance(y, Jet) and y.frame.sparse:
            seen.append(None if y.support is None else y.support.slots)
        return y

    generator = torch.Generator().manual_seed(4)
    x = torch.randn(2, PARTICLES, 3, dtype=D, generator=generator)
    by_torch = None if name in ALONE else trace(f, x[0])
    found = hodiff.laplacian(watched, batched=True)(x)
    torch.testing.assert_close(found, hodiff.laplacian(f, batched=True, sparse=False)(x), rtol=1e-11, atol=1e-11)
    if by_torch is not None:
        torch.testing.assert_close(found[0], by_torch, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(hodiff.laplacian(f)(x[0]), by_torch, rtol=1e-9, atol=1e-9)
    if slots is not ...:
        assert seen == [slots]


def trace(f, x):
    """Compute the trace of the Hessian by reverse-over-reverse rules that torch's own database confirms."""
    rows = [torch.autograd.functional.hessian(lambda x, i=i: f(x).reshape(-1)[i], x) for i in range(f(x).numel())]
    return torch.stack([each.reshape(x.numel(), -1).trace() for each in rows]).reshape(f(x).shape)


def test_gradients_match_in_sparse_passes():
    x = torch.randn(3, PARTICLES, 3, dtype=D, generator=torch.Generator().manual_seed(0))
    value, slopes, total = hodiff.taylor.value_grad_laplacian(wavefunction, batched=True)(x)
    expected = torch.func.vmap(torch.func.grad(wavefunction))(x)
    torch.testing.assert_close(slopes, expected)
    torch.testing.assert_close(value, wavefunction(x))
    torch.testing.assert_close(total, hodiff.laplacian(wavefunction, batched=True, sparse=False)(x))


def test_pytrees_of_particles_match():
    electrons, nuclei = torch.randn(4, 3, dtype=D), torch.randn(2, 3, dtype=D)

    def f(tree):
        gaps = tree["electrons"].unsqueeze(1) - tree["nuclei"]
        return torch.exp(-gaps.square().sum(-1)), {"each": tree["nuclei"].sin()}

    found = hodiff.laplacian(f)({"electrons": electrons, "nuclei": nuclei})
    expected = hodiff.laplacian(f, sparse=False)({"electrons": electrons, "nuclei": nuclei})
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(found[1]["each"], -nuclei.sin())


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["layer", "attention", "distances", "determinant of rows", "wavefunction"])
def test_derivatives_and_batches_of_sparse_laplacians_match(name):
    f, _ = PROGRAMS[name]
    x = torch.randn(2, PARTICLES, 3, dtype=D, generator=torch.Generator().manual_seed(1))
    v = torch.randn(PARTICLES, 3, dtype=D, generator=torch.Generator().manual_seed(2))

    def total(x, sparse):
        return hodiff.laplacian(f, sparse=sparse)(x).sum()

    for transform in (
        lambda g: vmap(g)(x),
        lambda g: grad(g)(x[0]),
        lambda g: vmap(grad(g))(x),
        lambda g: jvp(g, (x[0],), (v,))[1],
        lambda g: hodiff.hvp(g, x[0], v),
    ):
        found, expected = (transform(lambda x, sparse=sparse: total(x, sparse)) for sparse in (True, False))
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_cache_does_not_depend_on_the_calling_context():
    # The cache must not depend on a transform or on inference mode.
    x = torch.randn(PARTICLES, 3, dtype=D, generator=torch.Generator().manual_seed(3))
    scale = torch.tensor(1.5, dtype=D, requires_grad=True)

    def f(x):
        y = torch.cat([x.roll(2, -2), scale * x[..., [2, 0, 1]]], -1)
        return torch.exp(-distances(y[..., :3] * y[..., 3:])).sum()

    with torch.inference_mode():
        first = hodiff.laplacian(f)(x)
    second = vmap(grad(hodiff.laplacian(f)))(x.unsqueeze(0))
    third = hodiff.laplacian(f)(x)
    third.backward()
    torch.testing.assert_close(first, third.detach())
    torch.testing.assert_close(second[0], grad(hodiff.laplacian(f, sparse=False))(x))
    (expected,) = torch.autograd.grad(hodiff.laplacian(f, sparse=False)(x), scale)
    torch.testing.assert_close(scale.grad, expected)


def test_training_gradients_match():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.GELU(), torch.nn.Linear(8, 1)).to(D)
    x = torch.randn(4, PARTICLES, 3, dtype=D)

    def loss(parameters, sparse):
        def f(x):
            return functional_call(net, parameters, (x,)).sum((-1, -2))

        return hodiff.laplacian(f, batched=True, sparse=sparse)(x).square().mean()

    parameters = {name: each.detach() for name, each in net.named_parameters()}
    torch.testing.assert_close(grad(loss)(parameters, True), grad(loss)(parameters, False))


def test_empty_and_scalar_inputs_are_accepted():
    assert hodiff.laplacian(lambda x: x.sin().sum(-1), batched=True)(torch.ones(0, 4, 3)).shape == (0, 4)
    assert hodiff.laplacian(lambda x: x[..., :0].exp().sum())(torch.ones(4)) == 0
    torch.testing.assert_close(hodiff.laplacian(torch.sin)(torch.tensor(0.5)), -torch.sin(torch.tensor(0.5)))


@pytest.mark.parametrize("kind", [torch.as_tensor, np.asarray])
def test_indices_that_change_between_calls_match(kind):
    # The indices have one shape, and are so long that their printed forms look alike.
    x = torch.randn(3000, dtype=D)
    for seed in range(3):
        order = kind(np.random.default_rng(seed).permutation(3000))
        f = lambda x, order=order: (x[order][:1500] * x[order][1500:]).sin().sum()  # noqa: E731
        first, second = x[order][:1500], x[order][1500:]
        expected = -((first * second).sin() * (first**2 + second**2)).sum()
        torch.testing.assert_close(hodiff.laplacian(f)(x), expected)


def test_sorting_by_value_matches():
    x = torch.randn(4, 6, dtype=D)

    def f(x):
        order = x.detach().argsort(-1)
        return (torch.gather(x, -1, order) ** torch.arange(1, 7)).sum(-1)

    sorted_x, k = x.sort(-1)[0], torch.arange(1, 7)
    expected = (k * (k - 1) * sorted_x ** (k - 2).clamp(min=0)).sum(-1)
    torch.testing.assert_close(hodiff.laplacian(f, batched=True)(x), expected)


def test_sparse_laplacian_inside_a_jet_matches():
    def f(s):
        return hodiff.laplacian(lambda x: torch.exp(s * (features(x) @ features(x).mT)).sum((-1, -2)))(x)

    x = torch.randn(PARTICLES, 3, dtype=D, generator=torch.Generator().manual_seed(6))
    s = torch.tensor(0.3, dtype=D)
    value, slope, curvature = hodiff.directional_derivatives(f, s, torch.ones_like(s), order=2)
    torch.testing.assert_close(value, f(s))
    torch.testing.assert_close(slope, grad(f)(s))
    torch.testing.assert_close(curvature, grad(grad(f))(s))


def test_cache_is_bounded(monkeypatch):
    monkeypatch.setattr(remembering, "BUDGET", 200_000)
    for seed in range(30):
        order = torch.as_tensor(np.random.default_rng(seed).permutation(1000))
        hodiff.laplacian(lambda x, order=order: x[order].sin().sum())(torch.randn(1000))
        assert remembering.MEMORY.bytes <= 200_000 or len(remembering.MEMORY.results) == 1
    assert remembering.MEMORY.bytes == sum(size for _, size in remembering.MEMORY.results.values())


def test_threads_match():
    def one(seed):
        x = torch.randn(PARTICLES, 3, dtype=D, generator=torch.Generator().manual_seed(seed))
        return hodiff.laplacian(wavefunction)(x)

    expected = [one(seed) for seed in range(8)]
    remembering.MEMORY.results.clear()
    remembering.MEMORY.bytes = 0
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(one, range(8)))
    torch.testing.assert_close(found, expected)


def test_equal_supports_are_shared():
    index = np.arange(6).reshape(1, 2, 3)
    assert support(index, 6) is support(index.copy(), 6)
    wide = support(np.broadcast_to(np.arange(3).reshape(3, 1, 1), (3, 4, 5)), 9)
    assert wide.index.shape == (3, 1, 1)
    assert wide is support(np.arange(3).reshape(3, 1, 1), 9)


def directions_at(given: Support, shape, place):
    column = np.broadcast_to(given.index, (given.slots, *shape))[(slice(None), *place)]
    return sorted(int(each) for each in column if each >= 0)


@pytest.mark.parametrize("seed", range(20))
def test_support_arithmetic_matches_python_sets(seed):
    rng = np.random.default_rng(seed)
    shape, most = (2, 3, 4), 40

    def drawn(slots, sizes):
        table = np.full((slots, *sizes), -1)
        for place in itertools.product(*map(range, sizes)):
            own = rng.choice(most, slots, replace=False)
            own[rng.random(slots) < 0.3] = -1
            table[(slice(None), *place)] = own
        return support(table, most)

    a, b = drawn(2, (2, 1, 4)), drawn(3, (1, 3, 4))
    both = united((a, b), 3)
    dims = ((2,), (0, 2), (2, 1), (0, 1, 2))[seed % 4]
    along = levelled(a, dims)
    for place in itertools.product(*map(range, shape)):
        if both is not None:
            expected = {*directions_at(a, shape, place), *directions_at(b, shape, place)}
            assert directions_at(both[0], shape, place) == sorted(expected)
        if along is not None:
            others = itertools.product(*(range(n) if d in dims else [place[d]] for d, n in enumerate(shape)))
            row = [directions_at(a, shape, each) for each in others]
            assert directions_at(along[0], shape, place) == sorted({d for each in row for d in each})
    for given, found in ((a, both and (both[0], both[1][0])), (b, both and (both[0], both[1][1])), (a, along)):
        if found is None:
            continue
        # A moved element keeps its direction.
        data = torch.rand(given.slots, *shape, dtype=D)
        data[torch.as_tensor(np.broadcast_to(given.index, data.shape) < 0)] = 0
        torch.testing.assert_close(found[0].dense(found[1](data)), given.dense(data))


def test_merged_rows_beyond_the_limit_are_rejected():
    rows = np.arange(12).reshape(4, 3)
    assert merged_rows(rows, 3) is None
    assert len(merged_rows(rows, 4)[0]) == 4


def test_memory_is_linear_in_the_slots():
    # Three of 600 coordinates are in slots: the largest tensor has the size of a layer, not one per direction.
    largest = []

    def f(x):
        y = features(x)
        if isinstance(y, Jet):
            largest.append(max(each.numel() for each in y.in_slots() if each is not None))
        return y.sum((-1, -2))

    x = torch.randn(200, 3, dtype=D)
    hodiff.laplacian(f)(x)
    assert largest == [3 * 200 * WIDTH]
    assert math.isclose(hodiff.laplacian(f)(x).item(), hodiff.laplacian(f, sparse=False)(x).item(), rel_tol=1e-10)
