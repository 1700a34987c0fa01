"""Tests of KL-Shampoo and KL-SOAP against the paper's equations with dense Kronecker products, in NumPy."""

import numpy as np
import pytest
import torch

from hodiff.errors import InputError
from hodiff.optim import KLSOAP, KLShampoo
from hodiff.optim.kronecker.kl_shampoo import inverse_roots

D = torch.float64
RNG = np.random.default_rng(0)


def kron(matrices):
    found = np.eye(1)
    for each in matrices:
        found = np.kron(found, each)
    return found


def update(factors, g, keep):
    """Update factors (Q, a) of all dimensions by dense matrices; also return the new matrices' changes."""
    shape, changes = g.shape, []
    for dim, size in enumerate(shape):
        # Whitening with the identity in this dimension.
        inverse = kron([np.eye(n) if i == dim else Q @ np.diag(1 / a) @ Q.T for i, (n, (Q, a)) in enumerate(factors)])
        rows = np.moveaxis(g, dim, 0).reshape(size, -1)
        whitened = np.moveaxis((inverse @ g.ravel()).reshape(shape), dim, 0).reshape(size, -1)
        changes.append(rows @ whitened.T / rows.shape[1])
    for dim, (_, (Q, a)) in enumerate(factors):
        a[:] = keep * a + (1 - keep) * np.diag(Q.T @ changes[dim] @ Q)
    return changes


def by_hand(kind, start, gradients, limit, lr, b1, b2, eps, decay, every):
    """Take the steps with vectors of all elements and matrices of all pairs."""
    shape, first = start.shape, gradients[0]
    whole = [n <= limit and len(shape) > 1 for n in shape]
    scale = (first**2).mean() ** (1 / len(shape))
    S = [scale * np.eye(n) for n in shape]
    # The identity is another basis of the first whitening.
    found = update([(n, (np.eye(n), np.full(n, scale))) for n in shape], first, b2)
    S = [b2 * old + (1 - b2) * new for old, new in zip(S, found, strict=True)]
    bases = [np.linalg.eigh(s)[1][:, ::-1] if each else np.eye(len(s)) for s, each in zip(S, whole, strict=True)]
    values = [np.diag(Q.T @ s @ Q).copy() for Q, s in zip(bases, S, strict=True)]
    w, m, v = start.ravel().copy(), np.zeros(start.size), np.zeros(start.size)
    changed = False
    for t, g in enumerate(gradients[1:], 1):
        frame = kron(bases)
        m, v = b1 * m + (1 - b1) * g.ravel(), b2 * v + (1 - b2) * (frame.T @ g.ravel()) ** 2
        scales = np.sqrt(v / (1 - b2**t)) if kind is KLSOAP else np.sqrt(np.diag(kron(map(np.diag, values))))
        w = w - lr * decay * w - lr * frame @ (frame.T @ m / (1 - b1**t) / (scales + eps))
        factors = [(len(Q), (Q, a)) for Q, a in zip(bases, values, strict=True)]
        S = [b2 * old + (1 - b2) * new for old, new in zip(S, update(factors, g, b2), strict=True)]
        if t % every == 0:
            orders = [
                np.argsort(-np.diag(Q.T @ s @ Q)) if each else np.arange(len(s))
                for Q, s, each in zip(bases, S, whole, strict=True)
            ]
            changed |= any((np.diff(order) != 1).any() for order in orders)
            v = v.reshape(shape)[np.ix_(*orders)].ravel()
            values = [a[order] for a, order in zip(values, orders, strict=True)]
            bases = [
                np.linalg.qr(s @ Q[:, order])[0] if each else Q
                for Q, s, order, each in zip(bases, S, orders, whole, strict=True)
            ]
    assert changed or shape != (3, 4) or not all(whole)
    return w.reshape(shape)


@pytest.mark.parametrize("kind", [KLShampoo, KLSOAP])
@pytest.mark.parametrize(("shape", "limit"), [((3, 4), 9), ((3, 4), 3), ((2, 3, 4), 4), ((5,), 9)])
def test_steps_match_dense_matrices(kind, shape, limit):
    b1, b2, lr, eps, decay, every = 0.8, 0.7, 0.05, 1e-3, 0.1, 3
    start = RNG.standard_normal(shape)
    # Scales along the first dimension reverse over time, so that eigenvectors change places.
    scales = np.linspace(np.linspace(3, 0.1, shape[0]), np.linspace(0.1, 3, shape[0]), 9)
    gradients = [each.reshape(-1, *[1] * (len(shape) - 1)) * RNG.standard_normal(shape) for each in scales]
    expected = by_hand(kind, start, gradients, limit, lr, b1, b2, eps, decay, every)
    ours = torch.from_numpy(start.copy()).requires_grad_()
    options = {"refresh_every": every, "max_preconditioner_size": limit, "merge_dims": False}
    optimizer = kind([ours], lr, (b1, b2), eps, decay, **options)
    for g in gradients:
        ours.grad = torch.from_numpy(g.copy())
        optimizer.step()
    np.testing.assert_allclose(ours.detach().numpy(), expected, rtol=1e-9)


def test_factors_minimize_the_divergence():
    """For gradients A^½ Z B^½, the factors approach A and B, up to a factor that their product does not have."""
    generator = torch.Generator().manual_seed(0)
    roots = [torch.eye(n, dtype=D) + 0.4 * torch.randn(n, n, generator=generator, dtype=D) for n in (3, 4)]
    w = torch.zeros(3, 4, dtype=D, requires_grad=True)
    optimizer = KLShampoo([w], lr=0.0, betas=(0.9, 0.99), refresh_every=1)
    mean, count = 0.0, 0
    for step in range(1500):
        w.grad = roots[0] @ torch.randn(3, 4, generator=generator, dtype=D) @ roots[1].T
        optimizer.step()
        if step >= 500:
            mean, count = mean + torch.kron(*optimizer.state[w]["whitened_moments"]), count + 1
    theirs = torch.kron(*(each @ each.T for each in roots))
    assert (mean / count - theirs).norm() < 0.1 * theirs.norm()
    values = [torch.linalg.eigvalsh(each).flip(0) for each in optimizer.state[w]["whitened_moments"]]
    torch.testing.assert_close(optimizer.state[w]["eigenvalues"], values, rtol=0.05, atol=0)


@pytest.mark.parametrize("kind", [KLShampoo, KLSOAP])
def test_parameters_begin_with_their_first_gradient(kind):
    """Steps before the first nonzero gradient change neither the parameter nor later steps."""
    gradients = torch.randn(4, 2, 3, generator=torch.Generator().manual_seed(0), dtype=D)
    found = []
    for zeros in (0, 2):
        w = torch.ones(2, 3, dtype=D, requires_grad=True)
        optimizer = kind([w], weight_decay=0.1)
        for each in (*torch.zeros(zeros, 2, 3, dtype=D), *gradients):
            w.grad = each.clone()
            optimizer.step()
        found.append(w.detach().clone())
    assert torch.equal(*found)
    assert not torch.equal(found[0], torch.ones(2, 3, dtype=D))


def test_inverse_roots_of_zero_are_zero():
    values = torch.tensor([[4.0, 1e-8, 1e-20, 0.0], [0.0, 0.0, 0.0, 0.0]], dtype=torch.float32)
    torch.testing.assert_close(inverse_roots(values), torch.tensor([[0.5, 1e4, 0.0, 0.0], [0.0] * 4]))


def test_state_of_klsoap_is_refused():
    held = []
    for kind in (KLSOAP, KLShampoo):
        weight = torch.nn.Parameter(torch.eye(3))
        optimizer = kind([weight])
        optimizer.step(lambda weight=weight: weight.square().sum())
        held.append(optimizer)
    with pytest.raises(InputError, match=r"KLShampoo: load_state_dict: .* got one with 'exp_avg_sq' for a parameter"):
        held[1].load_state_dict(held[0].state_dict())
    with pytest.raises(InputError, match=r"KLSOAP: load_state_dict: .* no 'exp_avg_sq'"):
        held[0].load_state_dict(held[1].state_dict())
