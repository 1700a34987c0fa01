"""Tests of Shampoo and SOAP against the papers' pseudo-code in NumPy, and in special cases."""

import copy

import numpy as np
import pytest
import torch

import hodiff
from hodiff.optim import KLSOAP, SOAP, KLShampoo, Shampoo
from hodiff.optim.kronecker.kronecker_optimizer import multiplied, vectors_along, working_shape

D = torch.float64
RNG = np.random.default_rng(0)
START = RNG.standard_normal((3, 4))
LEFT, RIGHT, SHIFT = RNG.standard_normal((3, 3)), RNG.standard_normal((4, 4)), RNG.standard_normal((3, 4))


def loss(w):
    """Compute |L w R - S|^2 / 2 plus a quartic, whose gradients have full rank and rotate from step to step."""
    left, right, shift = (torch.from_numpy(each) for each in (LEFT, RIGHT, SHIFT))
    return 0.5 * (left @ w @ right - shift).square().sum() + (w**4).sum() / 4


def gradient(w):
    return LEFT.T @ (LEFT @ w @ RIGHT - SHIFT) @ RIGHT.T + w**3


def train(make, steps):
    w = torch.from_numpy(START.copy()).requires_grad_()
    optimizer = make([w])
    for _ in range(steps):
        optimizer.zero_grad()
        loss(w).backward()
        optimizer.step()
    return w.detach().numpy()


def root(matrix, power):
    values, vectors = np.linalg.eigh(matrix)
    return vectors @ np.diag(values**power) @ vectors.T


def test_shampoo_matches_algorithm_1():
    w, left, right, epsilon = START.copy(), 0.0, 0.0, 1e-3
    for _ in range(4):
        g = gradient(w)
        left, right = left + g @ g.T, right + g.T @ g
        damped = [m + epsilon * np.linalg.norm(m, 2) * np.eye(len(m)) for m in (left, right)]
        w = w - 0.1 * root(damped[0], -0.25) @ g @ root(damped[1], -0.25)
    options = {"accumulate": True, "grafting": None, "refresh_every": 1, "eps": epsilon}
    ours = train(lambda p: Shampoo(p, 0.1, (0.0, 0.0), **options), 4)
    np.testing.assert_allclose(ours, w, rtol=1e-9)


@pytest.mark.parametrize("grafting", ["sgd", "adagrad", "adam"])
def test_shampoo_with_averages_grafting_and_rare_refreshes_matches(grafting):
    b1, b2, lr, decay, epsilon = 0.8, 0.9, 0.05, 0.1, 1e-4
    w, m, v, left, right = START.copy(), 0.0, 0.0, 0.0, 0.0
    refreshed = []
    for t in range(1, 10):
        g = gradient(w)
        m, left, right = (
            b * old + (1 - b) * new for b, old, new in [(b1, m, g), (b2, left, g @ g.T), (b2, right, g.T @ g)]
        )
        v = v + g**2 if grafting == "adagrad" else b2 * v + (1 - b2) * g**2
        mean = m / (1 - b1**t)
        if t in (1, 2, 4, 5):  # powers of two below five, and multiples of five
            scaled = [each / (1 - b2**t) for each in (left, right)]
            roots = [root(each + epsilon * np.linalg.norm(each, 2) * np.eye(len(each)), -0.25) for each in scaled]
            refreshed.append(t)
        plain = {
            "sgd": mean,
            "adagrad": mean / (np.sqrt(v) + 1e-8),
            "adam": mean / (np.sqrt(v / (1 - b2**t)) + 1e-8),
        }[grafting]
        step = roots[0] @ mean @ roots[1]
        w = w - lr * decay * w - lr * step * np.linalg.norm(plain) / np.linalg.norm(step)
    assert refreshed == [1, 2, 4, 5]
    ours = train(lambda p: Shampoo(p, lr, (b1, b2), epsilon, decay, grafting=grafting, refresh_every=5), 9)
    np.testing.assert_allclose(ours, w, rtol=1e-9)


def test_shampoo_of_vectors_is_full_adagrad_and_of_large_dimensions_diagonal():
    w = torch.tensor([1.0, -2.0, 3.0], dtype=D, requires_grad=True)
    options = {"accumulate": True, "grafting": None, "betas": (0.0, 0.0), "eps": 0.0, "refresh_every": 1}
    gradients, place, total = (
        np.array([[1.0, 2.0, 0.5], [0.3, -1.0, 2.0], [1.0, 1.0, -1.0]]),
        w.detach().numpy().copy(),
        0.0,
    )
    full, diagonal = Shampoo([w], 0.1, **options), w.detach().clone().requires_grad_()
    small = Shampoo([diagonal], 0.1, **options, max_preconditioner_size=2)
    for i, g in enumerate(gradients):
        w.grad = diagonal.grad = torch.from_numpy(g.copy())
        total = total + np.outer(g, g)
        values, vectors = np.linalg.eigh(total)
        kept = values > 1e-9
        place = place - 0.1 * (vectors[:, kept] / np.sqrt(values[kept])) @ vectors[:, kept].T @ g
        full.step()
        small.step()
        if i == 2:
            np.testing.assert_allclose(w.detach().numpy(), place, rtol=1e-6)
    sums = np.cumsum(gradients**2, 0)
    expected = np.array([1.0, -2.0, 3.0]) - 0.1 * (gradients / np.sqrt(sums)).sum(0)
    np.testing.assert_allclose(diagonal.detach().numpy(), expected, rtol=1e-12)


def test_shampoo_preconditions_every_dimension():
    g = RNG.standard_normal((2, 3, 4))
    w = torch.zeros(2, 3, 4, dtype=D, requires_grad=True)
    w.grad = torch.from_numpy(g.copy())
    Shampoo([w], 1.0, grafting=None, eps=0.1, merge_dims=False).step()
    moments = [np.einsum("ijk,ajk->ia", g, g), np.einsum("ijk,iak->ja", g, g), np.einsum("ijk,ija->ka", g, g)]
    roots = [root(m + 0.1 * np.linalg.norm(m, 2) * np.eye(len(m)), -1 / 6) for m in moments]
    np.testing.assert_allclose(-w.detach().numpy(), np.einsum("ijk,ia,jb,kc->abc", g, *roots), rtol=1e-9)


def basis_of(matrix):
    return np.linalg.eigh(matrix)[1][:, ::-1]


@pytest.mark.parametrize("every", [1, 3])
def test_soap_matches_algorithm_3(every):
    b1, b2, lr, eps, decay = 0.8, 0.7, 0.05, 1e-3, 0.1
    # Row and column scales reverse over time, so that eigenvectors change places.
    scales = np.linspace([3.0, 1.0, 0.1], [0.1, 1.0, 3.0], 8)
    gradients = [np.diag(each) @ RNG.standard_normal((3, 4)) for each in scales]
    ours = torch.from_numpy(START.copy()).requires_grad_()
    optimizer = SOAP([ours], lr, (b1, b2), eps, decay, refresh_every=every)
    w, m, v = START.copy(), 0.0, np.zeros((3, 4))
    moments = [(1 - b2) * gradients[0] @ gradients[0].T, (1 - b2) * gradients[0].T @ gradients[0]]
    left, right = map(basis_of, moments)
    changed = False
    for t, g in enumerate(gradients):
        ours.grad = torch.from_numpy(g.copy())
        optimizer.step()
        if t == 0:
            continue
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * (left.T @ g @ right) ** 2
        turned = (left.T @ m @ right / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + eps)
        w = w - lr * decay * w - lr * left @ turned @ right.T
        moments = [b2 * old + (1 - b2) * new for old, new in zip(moments, (g @ g.T, g.T @ g), strict=True)]
        if t % every == 0:
            orders = [np.argsort(-np.diag(q.T @ p @ q)) for p, q in zip(moments, (left, right), strict=True)]
            changed |= any((np.diff(order) != 1).any() for order in orders)
            v = v[orders[0]][:, orders[1]]
            left, right = (
                np.linalg.qr(p @ q[:, order])[0] for p, q, order in zip(moments, (left, right), orders, strict=True)
            )
    assert changed
    np.testing.assert_allclose(ours.detach().numpy(), w, rtol=1e-8)


def test_soap_matches_adam_in_a_rotated_basis():
    def run(make, limit):
        w = torch.from_numpy(START.copy()).requires_grad_()
        ours = SOAP([w], 0.02, (0.9, 0.99), refresh_every=1000, max_preconditioner_size=limit)
        ours.zero_grad()
        loss(w).backward()
        ours.step()
        bases = [torch.eye(n, dtype=D) if q is None else q for n, q in zip((3, 4), ours.state[w]["bases"], strict=True)]
        assert torch.equal(w, torch.from_numpy(START))
        # In its own basis, this gradient would have zeros, and Adam would amplify their rounding errors.
        with torch.no_grad():
            w += 0.3 * torch.randn(3, 4, dtype=D)
        rotated = (bases[0].T @ w.detach() @ bases[1]).requires_grad_()
        adam = make([rotated], 0.02, (0.9, 0.99), 1e-8)
        for _ in range(5):
            ours.zero_grad()
            loss(w).backward()
            ours.step()
            adam.zero_grad()
            loss(bases[0] @ rotated @ bases[1].T).backward()
            adam.step()
        torch.testing.assert_close(w.detach(), (bases[0] @ rotated @ bases[1].T).detach(), rtol=1e-9, atol=1e-12)

    for limit in (2048, 3, 2):
        run(torch.optim.Adam, limit)


def test_working_shapes_merge_small_dimensions():
    assert working_shape((64, 3, 1, 3), 1000, True) == (64, 9)
    assert working_shape((64, 32, 3, 3), 100, True) == (64, 32, 9)
    assert working_shape((64, 32, 3, 3), 1000, False) == (64, 32, 3, 3)
    assert working_shape((5, 5), 1000, True) == (5, 5)
    assert working_shape((1, 7), 1000, True) == (7,)
    assert working_shape((), 10, True) == working_shape((1, 1), 10, False) == (1,)


def test_products_with_matrix_diagonal_and_identity_factors_match():
    tensors, matrices, diagonals = (torch.randn(*size, dtype=D) for size in [(5, 2, 3, 4), (5, 2, 2), (5, 4)])
    expected = torch.einsum("bijk,bai,bk->bajk", tensors, matrices, diagonals)
    torch.testing.assert_close(multiplied(tensors, [matrices, None, diagonals]), expected)
    expected = torch.einsum("bijk,bia,bk->bajk", tensors, matrices, diagonals)
    torch.testing.assert_close(multiplied(tensors, [matrices, None, diagonals], transposed=True), expected)
    vectors = vectors_along(tensors, 1)
    torch.testing.assert_close(vectors @ vectors.mT, torch.einsum("bijk,biak->bja", tensors, tensors))


@pytest.mark.parametrize("make", [Shampoo, SOAP, KLSOAP, KLShampoo])
def test_bfloat16_parameters_have_float32_states(make):
    w = torch.randn(3, 4).bfloat16().requires_grad_()
    optimizer = make([w], refresh_every=2)
    for _ in range(3):
        optimizer.step(lambda: (w.float() ** 4).sum())
    other = w.detach().clone().requires_grad_()
    loaded = make([other], refresh_every=2)
    loaded.load_state_dict(optimizer.state_dict())
    for _ in range(3):
        optimizer.step(lambda: (w.float() ** 4).sum())
        loaded.step(lambda: (other.float() ** 4).sum())
    name = optimizer.moments_name
    assert {each.dtype for each in loaded.state[other][name]} == {torch.float32}
    assert torch.equal(w, other)
    assert all(map(torch.equal, loaded.state[other][name], optimizer.state[w][name]))


def test_zero_gradients_at_the_start_are_accepted():
    w = torch.ones(3, 2, dtype=D, requires_grad=True)
    optimizer = Shampoo([w], 0.1, refresh_every=100)
    for scale in (0.0, 0.0, 0.0, 1.0):
        w.grad = torch.full((3, 2), scale, dtype=D)
        before = w.detach().clone()
        optimizer.step()
        assert torch.equal(before, w) == (scale == 0.0)
        assert w.isfinite().all()


@pytest.mark.parametrize("grafting", [None, "sgd", "adagrad", "adam"])
@pytest.mark.parametrize("make", [Shampoo, SOAP, KLSOAP, KLShampoo])
def test_parameters_of_one_shape_step_as_if_alone(make, grafting):
    """Stacked states also follow missing and zero gradients, loaded states, and entries that a script replaces."""
    options = {"lr": 0.1, "betas": (0.8, 0.9), "refresh_every": 3, "weight_decay": 0.1, "max_preconditioner_size": 7}
    if make is Shampoo:
        options["grafting"] = grafting
    elif grafting:
        pytest.skip("no grafting")
    shapes = [(3, 4)] * 4 + [(5,)] * 3 + [(2, 3, 2)] * 2 + [(2, 8)] * 2 + [()] * 2
    generator = torch.Generator().manual_seed(0)
    ours = [torch.randn(shape, generator=generator, dtype=D).requires_grad_() for shape in shapes]
    alone = [p.detach().clone().requires_grad_() for p in ours]
    optimizer, separate = make(ours, **options), [make([p], **options) for p in alone]
    for step in range(8):
        for i, (p, q) in enumerate(zip(ours, alone, strict=True)):
            gradient = torch.randn(p.shape, generator=generator, dtype=D) * (0.0 if i == 1 and step < 2 else 1.0)
            # One parameter comes later, and another has no gradient for a step.
            missing = (i == 2 and step < 2) or (i == 5 and step == 4)
            p.grad, q.grad = (None, None) if missing else (gradient, gradient.clone())
        given = [None if p.grad is None else p.grad.clone() for p in ours]
        optimizer.step()
        for each in separate:
            each.step()
        assert all(g is None or torch.equal(p.grad, g) for p, g in zip(ours, given, strict=True))
        torch.testing.assert_close(ours, alone, rtol=1e-9, atol=1e-12)
        if step == 3:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        if step == 5:
            for each in (optimizer, *separate):
                for state in each.state.values():
                    state["exp_avg"] = 3 * state["exp_avg"]
                    name = optimizer.moments_name
                    state[name] = [None if m is None else 2 * m for m in state[name]]


@pytest.mark.parametrize("make", [Shampoo, SOAP, KLSOAP, KLShampoo])
def test_nan_gradients_are_rejected(make):
    w = torch.ones(3, 2, requires_grad=True)
    w.grad = torch.full((3, 2), torch.nan)
    with pytest.raises(hodiff.InputError, match="expected finite gradients"):
        make([w]).step()


@pytest.mark.parametrize("make", [SOAP, KLSOAP, KLShampoo])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_adds_no_direction(make, dtype):
    """Four inputs span four directions, and gradient descent stays in their span."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 64, generator=generator, dtype=dtype)
    # The first gradient has all four directions; later directions would enter the basis only by rotation.
    start = torch.randn(8, 64, generator=generator, dtype=dtype) / 8
    w = start.clone().requires_grad_()
    optimizer = make([w], lr=1e-2)
    for _ in range(30):
        optimizer.zero_grad()
        (100 * torch.nn.functional.cross_entropy(x @ w.T, torch.tensor([0, 1, 2, 0]))).backward()
        optimizer.step()
    moved = w.detach() - start
    within = moved @ torch.linalg.pinv(x) @ x
    assert (moved - within).norm() < 1e-5 * within.norm()
