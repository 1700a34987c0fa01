"""Tests of the first steps against the papers' pseudo-code in plain NumPy, with derivatives by hand."""

import numpy as np
import pytest
import torch
from torch import nn

import hodiff
from hodiff.optim import LBFGS, SAM, AdaHessian, HessianFree, NewtonCG, SophiaG, SophiaH

D = torch.float64
A = np.array([[3.0, 1.0, 0.5], [1.0, 2.0, -0.3], [0.5, -0.3, 4.0]])
START = np.array([1.0, -2.0, 0.7])


def loss(w):
    """Compute a quadratic plus a quartic function, whose Hessian varies and is not diagonal."""
    return 0.5 * w @ torch.from_numpy(A) @ w + (w**4).sum() / 12


def gradient(w):
    return A @ w + w**3 / 3


def hessian(w):
    return A + np.diag(w**2)


def point():
    return torch.from_numpy(START.copy()).requires_grad_()


def train(make, steps):
    w = point()
    optimizer = make([w])
    for _ in range(steps):
        optimizer.zero_grad()
        loss(w).backward()
        optimizer.step()
    return w.detach().numpy()


def probes(draw, count):
    generator = torch.Generator().manual_seed(7)
    return [draw(generator).double().numpy() for _ in range(count)]


def signs(generator):
    return torch.randint(0, 2, (3,), generator=generator).float() * 2 - 1


def gaussian(generator):
    return torch.randn(3, generator=generator, dtype=D)


@pytest.mark.parametrize("every", [1, 2])
def test_adahessian_matches_pseudocode(every):
    lr, b1, b2, eps, decay, power = 0.1, 0.8, 0.9, 1e-3, 0.02, 0.7
    w, m, v, refreshes = START.copy(), 0.0, 0.0, 0
    draws = iter(probes(signs, 5))
    for t in range(1, 6):
        m = b1 * m + (1 - b1) * gradient(w)
        if (t - 1) % every == 0:
            z = next(draws)
            v, refreshes = b2 * v + (1 - b2) * (z * (hessian(w) @ z)) ** 2, refreshes + 1
        scale = np.sqrt(v / (1 - b2**refreshes)) ** power + eps
        w = w - lr * (m / (1 - b1**t) / scale + decay * w)
    generator = torch.Generator().manual_seed(7)
    options = {"hessian_power": power, "update_every": every, "generator": generator}
    ours = train(lambda p: AdaHessian(p, lr, (b1, b2), eps, decay, **options), 5)
    np.testing.assert_allclose(ours, w, rtol=1e-12)


def test_adahessian_averages_over_kernels():
    kernel = torch.randn(2, 3, 2, 2, dtype=D).requires_grad_()
    weights = torch.rand(2, 3, 2, 2, dtype=D)
    optimizer = AdaHessian([kernel], lr=1.0, betas=(0.0, 0.0), eps=0.0)
    (weights * kernel**2).sum().backward()
    before = kernel.detach().clone()
    optimizer.step()
    mean = (2 * weights.numpy()).mean((2, 3), keepdims=True)
    expected = before.numpy() - 2 * weights.numpy() * before.numpy() / mean
    np.testing.assert_allclose(kernel.detach().numpy(), expected, rtol=1e-12)


def sophia(w, h, m, estimate, g, due, lr=0.3, b1=0.7, b2=0.9, gamma=0.4, eps=1e-12, decay=0.05):
    m = b1 * m + (1 - b1) * g
    if due:
        h = b2 * h + (1 - b2) * estimate()
    w = w - lr * decay * w
    return w - lr * np.clip(m / np.maximum(gamma * h, eps), -1, 1), h, m


@pytest.mark.parametrize("every", [1, 3])
def test_sophia_h_matches_pseudocode(every):
    w, h, m = START.copy(), 0.0, 0.0
    draws = iter(probes(gaussian, 8))

    def estimate():
        u = next(draws)
        return u * (hessian(w) @ u)

    clipped = 0
    for t in range(1, 9):
        before = w
        w, h, m = sophia(w, h, m, estimate, gradient(w), (t - 1) % every == 0)
        clipped += (np.abs(w - before * (1 - 0.3 * 0.05)) > 0.3 - 1e-12).sum()
    assert 0 < clipped < 24  # the data cover both branches
    generator = torch.Generator().manual_seed(7)
    ours = train(lambda p: SophiaH(p, 0.3, (0.7, 0.9), 0.4, 1e-12, 0.05, update_every=every, generator=generator), 8)
    np.testing.assert_allclose(ours, w, rtol=1e-12)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_sophia_g_matches_pseudocode(reduction):
    x, y = torch.randn(5, 2, dtype=D), torch.tensor([0, 2, -100, 1, 1])
    model = nn.Linear(2, 3, bias=False).double()
    w, h, m = model.weight.detach().numpy().copy(), 0.0, 0.0
    optimizer = SophiaG(
        model.parameters(),
        0.3,
        (0.7, 0.9),
        20.0,
        1e-12,
        0.05,
        update_every=2,
        generator=torch.Generator().manual_seed(7),
    )
    generator = torch.Generator().manual_seed(7)
    taken = (y >= 0).numpy()
    count = taken.sum()
    scale = count if reduction == "sum" else 1
    for t in range(1, 5):
        z = x.numpy() @ w.T
        p = np.exp(z - z.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)

        def of(labels, p=p):
            """Return the gradient of the mean loss by the weight."""
            return ((p - np.eye(3)[labels]) * taken[:, None]).T @ x.numpy() / count

        def estimate(p=p, of=of):
            drawn = torch.multinomial(torch.from_numpy(p).float(), 1, generator=generator)[:, 0].numpy()
            return scale * count * of(drawn) ** 2

        g = scale * of(np.maximum(y.numpy(), 0))
        w, h, m = sophia(w, h, m, estimate, g, (t - 1) % 2 == 0, gamma=20.0)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y, reduction=reduction).backward()
        optimizer.step()
        np.testing.assert_allclose(model.weight.detach().numpy(), w, rtol=1e-6)


@pytest.mark.slow
def test_sophia_g_estimate_is_unbiased():
    torch.manual_seed(0)
    x = torch.randn(4, 2, dtype=D)
    model = nn.Linear(2, 3, bias=False).double()
    optimizer = SophiaG(model.parameters(), betas=(0.9, 0.999), update_every=None)
    for _ in range(4000):
        optimizer.update_curvature(model(x))
    p = torch.softmax(model(x), 1).detach().numpy()
    exact = np.einsum("nc,nd->cd", p * (1 - p), x.numpy() ** 2) / 4
    estimate = optimizer.state[model.weight]["curvature"].numpy() / (1 - 0.999**4000)
    np.testing.assert_allclose(estimate, exact, rtol=0.15)


@pytest.mark.parametrize("adaptive", [False, True])
def test_sam_matches_pseudocode(adaptive):
    rho, eta, lr, momentum = 0.5, 0.01, 0.1, 0.9
    w, buffer = START.copy(), 0.0
    ours = point()
    optimizer = SAM([ours], torch.optim.SGD, rho, adaptive, eta, lr=lr, momentum=momentum)
    for _ in range(4):
        scale = np.abs(w) + eta if adaptive else 1.0
        g = gradient(w)
        there = w + rho * scale**2 * g / np.linalg.norm(scale * g)
        buffer = momentum * buffer + gradient(there)
        w = w - lr * buffer
        before = loss(ours).item()
        assert optimizer.step(lambda: loss(ours)).item() == before
    np.testing.assert_allclose(ours.detach().numpy(), w, rtol=1e-12)


def truncated(B, b, steps):
    """Run conjugate gradients as in Nocedal and Wright, algorithm 7.1."""
    x, r = np.zeros_like(b), -b
    d = -r
    for k in range(steps):
        if d @ B @ d <= 0:
            return d if k == 0 else x
        alpha = (r @ r) / (d @ B @ d)
        x, new = x + alpha * d, r + alpha * B @ d
        d, r = -new + (new @ new) / (r @ r) * d, new
    return x


@pytest.mark.parametrize("iterations", [1, 2, 3])
def test_newton_cg_matches_truncated_conjugate_gradients(iterations):
    w, ours = START.copy(), point()
    optimizer = NewtonCG([ours], 0.5, 0.1, 0.02, cg_iterations=iterations)
    for _ in range(3):
        w = w + 0.5 * truncated(hessian(w) + 0.12 * np.eye(3), -gradient(w) - 0.02 * w, iterations)
        optimizer.step(lambda: loss(ours))
    np.testing.assert_allclose(ours.detach().numpy(), w, rtol=1e-9)


def test_newton_cg_solves_a_quadratic_in_one_step():
    b = torch.tensor([1.0, -1.0, 2.0], dtype=D)
    w = point()
    NewtonCG([w]).step(lambda: 0.5 * w @ torch.from_numpy(A) @ w - b @ w)
    np.testing.assert_allclose(w.detach().numpy(), np.linalg.solve(A, b.numpy()), rtol=1e-8)


def test_newton_cg_with_gauss_newton_solves_linear_least_squares():
    x, y = torch.randn(9, 3, dtype=D), torch.randn(9, dtype=D)
    w = point()
    NewtonCG([w], curvature="gauss-newton").step(lambda: (x @ w, lambda z: ((z - y) ** 2).mean()))
    np.testing.assert_allclose(w.detach().numpy(), np.linalg.lstsq(x.numpy(), y.numpy())[0], rtol=1e-7)


@pytest.mark.parametrize("start", [[1.0, 0.0], [1.0, 0.2]])
def test_newton_cg_in_negative_curvature_matches(start):
    B = np.diag([-1.0, 2.0])
    w = torch.tensor(start, dtype=D, requires_grad=True)
    NewtonCG([w]).step(lambda: 0.5 * w @ torch.from_numpy(B) @ w)
    step = w.detach().numpy() - np.array(start)
    np.testing.assert_allclose(step, truncated(B, -B @ np.array(start), 9), rtol=1e-12)
    assert step @ B @ np.array(start) < 0  # a descent direction


def test_hessian_free_solves_a_quadratic_in_n_iterations():
    x, y = torch.randn(9, 3, dtype=D), torch.randn(9, dtype=D)
    w = point()
    optimizer = HessianFree([w], damping=0.0)
    optimizer.step(lambda: (x @ w, lambda z: ((z - y) ** 2).mean()))
    assert optimizer.last.cg_iterations == 3
    np.testing.assert_allclose(optimizer.last.reduction_ratio, 1.0, rtol=1e-9)
    np.testing.assert_allclose(w.detach().numpy(), np.linalg.lstsq(x.numpy(), y.numpy())[0], rtol=1e-7)


def test_hessian_free_matches_levenberg_marquardt():
    t = np.linspace(0, 3, 12)
    data = 2.5 * np.exp(-1.3 * t) + 0.1 * np.sin(20 * t)

    def value(w):
        return ((w[0] * np.exp(-w[1] * t) + w[2] - data) ** 2).sum() + 0.5 * 0.01 * w @ w

    w, damping = np.array([1.6, -1.0, 0.4]), 1e-3
    ours = torch.from_numpy(w.copy()).requires_grad_()
    optimizer = HessianFree([ours], damping=damping, weight_decay=0.01, warm_start=0.0, cg_iterations=3)
    seen = []
    for _ in range(5):
        J = np.stack([np.exp(-w[1] * t), -w[0] * t * np.exp(-w[1] * t), np.ones_like(t)], 1)
        g = 2 * J.T @ (w[0] * np.exp(-w[1] * t) + w[2] - data) + 0.01 * w
        B = 2 * J.T @ J + (0.01 + damping) * np.eye(3)
        # Iterates 1, 2 and 3 of conjugate gradients, from the last one back while the loss decreases.
        steps = [truncated(B, -g, k) for k in (1, 2, 3)]
        best = steps.pop()
        while steps and value(w + steps[-1]) < value(w + best):
            best = steps.pop()
        promised = g @ best + 0.5 * best @ B @ best
        ratio = (value(w + best) - value(w)) / promised
        curve = torch.from_numpy(t)
        optimizer.step(
            lambda curve=curve: (
                ours[0] * torch.exp(-ours[1] * curve) + ours[2],
                lambda z: ((z - torch.from_numpy(data)) ** 2).sum(),
            )
        )
        np.testing.assert_allclose(optimizer.last.reduction_ratio, ratio, rtol=1e-5)
        assert optimizer.last.damping == pytest.approx(damping)
        if value(w + best) < value(w):
            w = w + best
        damping *= 2 / 3 if ratio > 0.75 else 1.5 if ratio < 0.25 else 1.0
        seen.append((optimizer.last.accepted, ratio > 0.75, len(steps)))
        np.testing.assert_allclose(ours.detach().numpy(), w, rtol=1e-5)
    # The steps are good, moderate and bad, and earlier iterates occur.
    assert [accepted for accepted, *_ in seen] == [True] * 4 + [False]
    assert [good for _, good, _ in seen] == [True, True, False, True, False]
    assert [2 - left for *_, left in seen] == [1, 2, 1, 2, 0]


def test_hessian_free_warm_start_continues_the_last_solution():
    x, y = torch.randn(9, 3, dtype=D), torch.randn(9, dtype=D)
    for warm, expected in ((1.0, 0), (0.0, 3)):
        w = point()
        optimizer = HessianFree([w], damping=0.0, warm_start=warm, cg_tolerance=1e-6)
        closure = lambda w=w: (x @ w, lambda z: ((z - y) ** 2).mean())  # noqa: E731
        optimizer.step(closure)
        with torch.no_grad():
            w.copy_(torch.from_numpy(START))  # the same problem again
        optimizer.step(closure)
        assert optimizer.last.cg_iterations == expected


def test_lbfgs_satisfies_wolfe_conditions_and_matches_torch():
    ours, theirs = point(), point()
    optimizer, torchs = (
        LBFGS([ours], max_iter=1),
        torch.optim.LBFGS([theirs], max_iter=1, line_search_fn="strong_wolfe"),
    )

    def closure():
        torchs.zero_grad()
        value = loss(theirs)
        value.backward()
        return value

    for _ in range(5):
        w = ours.detach().numpy().copy()
        before = loss(ours).item()
        optimizer.step(lambda: loss(ours))
        torchs.step(closure)
        assert torch.equal(ours, theirs)
        after = ours.detach().numpy()
        step = after - w
        assert loss(ours).item() <= before + 1e-4 * gradient(w) @ step
        assert abs(gradient(after) @ step) <= 0.9 * abs(gradient(w) @ step)


def test_closures_are_corrected():
    """The closure is corrected: `cdist` has no second derivative in torch."""
    x = torch.randn(4, 3, dtype=D)
    w = torch.randn(2, 3, dtype=D, requires_grad=True)

    def distance():
        return (torch.cdist(x, w) ** 3).mean()

    at = w.detach().clone()
    NewtonCG([w], damping=0.3, cg_tolerance=1e-12).step(distance)
    by_primitives = lambda w: ((x[:, None] - w).square().sum(-1) ** 1.5).mean()  # noqa: E731
    H = hodiff.hessian_matrix(by_primitives, at) + 0.3 * torch.eye(6)
    expected = at.reshape(-1) - torch.linalg.solve(H, torch.func.grad(by_primitives)(at).reshape(-1))
    torch.testing.assert_close(w.detach().reshape(-1), expected)


def test_sam_rejects_base_that_needs_closures():
    with pytest.raises(
        hodiff.InputError, match="SAM: base: expected an optimizer that steps without a closure, got LBFGS"
    ):
        hodiff.optim.SAM([torch.ones(2, requires_grad=True)], torch.optim.LBFGS)


def polynomial(x, steps):
    for _ in range(steps):
        x = 3.4445 * x - 4.7750 * x**3 + 2.0315 * x**5
    return x


@pytest.mark.parametrize("shape", [(4, 3), (2, 5), (2, 3, 2)])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("scaling", ["rms", "shape"])
def test_muon_matches_singular_values(shape, nesterov, scaling):
    """Steps of matrices have the gradients' singular vectors, and singular values by the scalar polynomial."""
    lr, mu, decay, steps = 0.1, 0.8, 0.02, 4
    rng = np.random.default_rng(0)
    start, target = rng.normal(size=shape), rng.normal(size=shape)
    w = torch.from_numpy(start.copy()).requires_grad_()
    options = {"nesterov": nesterov, "scaling": scaling, "iterations": steps}
    optimizer = hodiff.optim.Muon([w], lr=lr, momentum=mu, weight_decay=decay, **options)
    x, average = start.copy(), 0.0
    p, q = shape[0], int(np.prod(shape[1:]))
    scale = 0.2 * max(p, q) ** 0.5 if scaling == "rms" else max(1, p / q) ** 0.5
    for _ in range(3):
        g = (x - target) ** 3
        average = mu * average + (1 - mu) * g
        mean = (1 - mu) * g + mu * average if nesterov else average
        U, sigma, V = np.linalg.svd(mean.reshape(p, q), full_matrices=False)
        turned = U @ np.diag(polynomial(sigma / np.sqrt((sigma**2).sum()), steps)) @ V
        x = (1 - lr * decay) * x - lr * scale * turned.reshape(shape)
        optimizer.zero_grad()
        ((w - torch.from_numpy(target)) ** 4 / 4).sum().backward()
        optimizer.step()
    np.testing.assert_allclose(w.detach().numpy(), x, rtol=1e-9)


def test_muon_matches_torch():
    """Torch's Muon rounds to bfloat16."""
    torch.manual_seed(0)
    w, target = torch.randn(6, 4), torch.randn(6, 4)
    ours, theirs = w.clone().requires_grad_(), w.clone().requires_grad_()
    for p, optimizer in (
        (ours, hodiff.optim.Muon([ours], lr=0.1, weight_decay=0.1, scaling="shape")),
        (theirs, torch.optim.Muon([theirs], lr=0.1, weight_decay=0.1)),
    ):
        for _ in range(4):
            optimizer.zero_grad()
            (p - target).square().sum().backward()
            optimizer.step()
    assert (ours - theirs).norm() < 0.02 * (ours - w).norm()


def test_muon_takes_adams_steps_for_vectors_and_chosen_groups():
    torch.manual_seed(0)
    b, E = torch.randn(4, dtype=D), torch.randn(3, 4, dtype=D)
    ours, theirs = ([each.clone().requires_grad_() for each in (b, E)] for _ in range(2))
    groups = [{"params": ours[:1]}, {"params": ours[1:], "orthogonalize": False}]
    for (p, q), optimizer in (
        (ours, hodiff.optim.Muon(groups, lr=0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1)),
        (theirs, torch.optim.AdamW(theirs, lr=0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1)),
    ):
        for _ in range(4):
            optimizer.zero_grad()
            ((p**4).sum() + (q**2).sum()).backward()
            optimizer.step()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)
