"""Tests of self-scaled quasi-Newton methods: the papers' formulas, textbook BFGS, and SciPy's BFGS."""

import numpy as np
import pytest
import scipy.optimize as so
import torch
from cases import rosenbrock
from custom_functions import old_style

import hodiff
from hodiff.optimize import minimize
from hodiff.optimize.quasi_newton import InverseHessian, Quotients, ssbfgs, ssbroyden

D = torch.float64
METHODS = ["ssbfgs", "ssbroyden"]
CHOICES = {"ssbfgs": ssbfgs, "ssbroyden": ssbroyden}
START = torch.tensor([-1.2, 1.0, 0.8, 0.5, 2.0], dtype=D)


def positive(n, seed, condition=1e4):
    g = torch.Generator().manual_seed(seed)
    q, _ = torch.linalg.qr(torch.randn(n, n, dtype=D, generator=g))
    return q @ torch.diag(torch.logspace(0, np.log10(condition), n, dtype=D)) @ q.T


def pair(n, seed):
    """Return a step and a change of gradient with a positive inner product."""
    g = torch.Generator().manual_seed(seed)
    s, y = torch.randn(2, n, dtype=D, generator=g)
    return s, y if s @ y > 0 else -y


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("seed", range(4))
def test_update_satisfies_secant_equation_and_stays_positive_definite(method, seed):
    n = 7
    first = positive(n, seed, 100)
    inverse = InverseHessian(CHOICES[method], torch.zeros(n, dtype=D), first.clone())
    for k in range(5):
        s, _ = pair(n, 10 * seed + k)
        y = positive(n, 10 * seed + k, 100) @ s
        before = inverse.matrix.clone()
        assert inverse.learn(s, y, float(s @ torch.linalg.solve(before, s)))
        torch.testing.assert_close(inverse.matrix @ y, s, rtol=0, atol=1e-13 * float(inverse.matrix.norm() * y.norm()))
        assert torch.linalg.eigvalsh(inverse.matrix).min() > 0


@pytest.mark.parametrize("method", METHODS)
def test_update_matches_published_formula(method):
    n = 6
    for seed in range(6):
        H, (s, y) = positive(n, seed), pair(n, seed)
        bs, ys, hy = float(s @ torch.linalg.solve(H, s)), y @ s, H @ y
        yhy = y @ hy
        tau, phi = CHOICES[method](Quotients(bs / float(ys), float(yhy / ys), n))
        w = yhy.sqrt() * (s / ys - hy / yhy)
        expected = (H - torch.outer(hy, hy) / yhy + phi * torch.outer(w, w)) / tau + torch.outer(s, s) / ys
        inverse = InverseHessian(CHOICES[method], s, H.clone())
        inverse.learn(s, y, bs)
        torch.testing.assert_close(inverse.matrix, expected, rtol=1e-10, atol=1e-10)


def test_ssbfgs_matches_bfgs_at_scale_one():
    n, unscaled = 6, 0
    for seed in range(12):
        H, (s, y) = positive(n, seed), pair(n, seed)
        bs, rho = float(s @ torch.linalg.solve(H, s)), 1 / float(y @ s)
        left = torch.eye(n, dtype=D) - rho * torch.outer(s, y)
        # Textbook BFGS of the matrix with Oren-Luenberger scaling, if that enlarges it.
        scale = max(bs * rho, 1.0)
        unscaled += scale == 1
        expected = left @ (H * scale) @ left.T + rho * torch.outer(s, s)
        inverse = InverseHessian(ssbfgs, s, H.clone())
        inverse.learn(s, y, bs)
        torch.testing.assert_close(inverse.matrix, expected, rtol=1e-9, atol=1e-9)
    assert 0 < unscaled < 12


@pytest.mark.parametrize("b", [0.3, 0.9, 1.0, 1.5, 20.0])
@pytest.mark.parametrize("ah", [1.0, 1.01, 3.0, 1e3, 1e12])
def test_ssbroyden_parameters_stay_in_the_positive_range(b, ah):
    tau, phi = ssbroyden(Quotients(b, ah / b, 10))
    a = ah - 1
    assert 0 < tau < np.inf
    assert a == 0 or phi > -1 / a


@pytest.mark.parametrize("b", [0.05, 0.3, 0.9, 1.5, 20.0])
@pytest.mark.parametrize("h", [0.3, 1.3, 4.0, 50.0])
def test_ssbroyden_parameters_match_published_formulas(b, h):
    """The parameters match Al-Baali, Spedicato and Maggioni's formulas for n = 3."""
    a = b * h - 1
    if a <= 0:
        pytest.skip("by Cauchy and Schwarz there are no such vectors")
    c = (a / (1 + a)) ** 0.5
    rho = min(1, h * (1 - c))
    low, high, sr1 = (rho - 1) / a, 1 / rho, (1 - b) / b
    theta = sorted([low, sr1, high])[1] if low <= high else low
    sigma = 1 + theta * a
    scale = min(1, 1 / b)
    tau = min(scale / sigma**0.5, sigma) if theta <= 0 else scale * min(1 / sigma**0.5, 1 / theta)
    np.testing.assert_allclose(ssbroyden(Quotients(b, h, 3)), (tau, (1 - theta) / (1 + a * theta)), rtol=1e-10)


@pytest.mark.parametrize("choose", CHOICES.values(), ids=METHODS)
def test_quadratics_end_after_n_exact_line_searches(choose):
    """Broyden's family generates conjugate directions at any scale, so n exact line searches suffice."""
    n = 6
    A, x = positive(n, 3, 100), torch.ones(n, dtype=D)
    inverse = InverseHessian(choose, x)
    for _ in range(n):
        g = A @ x
        d = -inverse.times(g)
        t = float(-(d @ g) / (d @ A @ d))
        x = x + t * d
        inverse.learn(t * d, t * (A @ d), float(-(t**2) * (d @ g)))
    assert (A @ x).norm() < 1e-9


@pytest.mark.parametrize("method", METHODS)
def test_rosenbrock_minimum_matches_scipy_bfgs(method):
    found = minimize(rosenbrock, START, method=method, tol=1e-9)
    expected = so.minimize(so.rosen, START.numpy(), jac=so.rosen_der, method="bfgs", tol=1e-9)
    assert found.success
    np.testing.assert_allclose(found.x.numpy(), expected.x, rtol=1e-7)
    assert found.nit < 2 * expected.nit
    assert found.nfev == found.njev < 2 * found.nit
    # The inverse Hessian approximates the true inverse.
    torch.testing.assert_close(
        found.hess_inv, torch.linalg.inv(hodiff.hessian_matrix(rosenbrock, found.x)), rtol=0.3, atol=0.05
    )


def test_ill_conditioned_fit_is_more_accurate_than_scipy_bfgs():
    """The self-scaled methods fit a small network to a smooth function more accurately than BFGS."""
    t = torch.linspace(-1, 1, 40, dtype=D)[:, None]
    g = torch.Generator().manual_seed(0)
    start = {"w": torch.randn(1, 8, dtype=D, generator=g), "b": torch.zeros(8, dtype=D), "v": torch.ones(8, 1, dtype=D)}

    def loss(p):
        return (torch.tanh(t @ p["w"] + p["b"]) @ p["v"] - torch.sin(3 * t)).square().mean()

    values = {m: minimize(loss, start, method=m, options={"maxiter": 200, "gtol": 0.0}).fun for m in ("bfgs", *METHODS)}
    assert values["ssbroyden"] < values["bfgs"]
    assert values["ssbfgs"] < values["bfgs"]


def test_options_and_result_fields():
    found = minimize(rosenbrock, START, method="ssbroyden", options={"maxiter": 3})
    assert (found.nit, found.success) == (3, False)
    assert "aximum number of iterations" in found.message
    first = torch.linalg.inv(hodiff.hessian_matrix(rosenbrock, torch.ones(5, dtype=D)))
    kept = first.clone()
    near = torch.full((5,), 0.99, dtype=D)
    fast = minimize(rosenbrock, near, method="ssbfgs", options={"hess_inv0": first})
    assert fast.nit < minimize(rosenbrock, near, method="ssbfgs").nit
    torch.testing.assert_close(first, kept)
    assert minimize(rosenbrock, START, method="ssbfgs", options={"xrtol": 1e-3}).message.endswith("below xrtol.")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"maxitr": 3}, "'maxitr', which it does not have; did you mean 'maxiter'"),
        ({"zzz": 3}, "it takes maxiter, gtol"),
        ({"maxiter": -1}, "options\\['maxiter'\\]: expected an int of 0 or more"),
        ({"gtol": -1.0}, "options\\['gtol'\\]: expected a nonnegative number"),
        ({"c1": 0.9, "c2": 0.1}, "expected 0 < c1 < c2 < 1"),
        ({"hess_inv0": torch.eye(3)}, "hess_inv0'\\]: expected \\(5, 5\\)"),
        ({"hess_inv0": -torch.eye(5)}, "positive definite"),
        ({"hess_inv0": torch.ones(5)}, "symmetric matrix"),
    ],
)
def test_rejects_bad_options(options, words):
    with pytest.raises(hodiff.InputError, match=words):
        minimize(rosenbrock, START, method="ssbfgs", options=options)


@pytest.mark.parametrize("method", [*METHODS, "newton-krylov"])
def test_callbacks_interruption_and_nan_are_reported(method):
    seen = []

    def interrupt(found):
        seen.append(found.fun)
        if len(seen) == 3:
            raise KeyboardInterrupt

    found = minimize(rosenbrock, START, method=method, callback=interrupt)
    assert (found.nit, found.success) == (3, False)
    assert found.fun == min(seen)

    def stop(found):
        raise StopIteration

    found = minimize(rosenbrock, START, method=method, callback=stop)
    assert (found.nit, found.status, found.success) == (1, 99, False)
    found = minimize(lambda x: (x * float("nan")).sum(), START, method=method)
    assert not found.success
    assert "nan" in found.message
    # The method continues beside points at which the function is NaN.
    found = minimize(lambda x: (x - x.log()).sum(), torch.full((3,), 4.0, dtype=D), method=method)
    assert found.success
    torch.testing.assert_close(found.x, torch.ones(3, dtype=D), rtol=0, atol=1e-4)


@pytest.mark.parametrize("method", [*METHODS, "newton-krylov"])
def test_wrong_gradient_is_reported(method):
    Turned = old_style("Turned", lambda x: (x.square().sum(),), lambda ctx, g: -g * torch.ones(3, dtype=D))

    found = minimize(lambda x: Turned.apply(x) + 0 * x.pow(3).sum(), torch.ones(3, dtype=D), method=method)
    assert not found.success
    assert found.fun == 3


@pytest.mark.parametrize("method", [*METHODS, "newton-krylov"])
def test_pytrees_dtypes_and_progress_work(method, capsys):
    x0 = {"a": torch.tensor([1.0, 2.0]), "b": (torch.tensor(3.0, dtype=D), torch.tensor([1 + 1j], dtype=torch.cdouble))}
    found = minimize(
        lambda x, c: (x["a"] - c).square().sum() + x["b"][0] ** 4 + x["b"][1].abs().square().sum(),
        x0,
        torch.tensor(0.5),
        method=method,
        progress=True,
    )
    assert found.success
    torch.testing.assert_close(found.x["a"], torch.tensor([0.5, 0.5]), atol=1e-4, rtol=0)
    assert found.x["b"][1].abs() < 1e-4
    assert found.jac["b"][1].dtype is torch.cdouble
    assert "gradient=" in capsys.readouterr().err
