"""Tests of the trust-region Newton-CG method: SciPy's iterates with fewer products, and options."""

import itertools

import numpy as np
import pytest
import scipy.optimize as so
import torch
from cases import rosenbrock

import hodiff
from hodiff.optimize import minimize
from hodiff.optimize.newton_krylov import SHRINKAGE, Segment, steihaug

D = torch.float64
START = torch.tensor([-1.2, 1.0, 0.8, 0.5, 2.0], dtype=D)


def without_repeated_points(points):
    """Remove points that repeat the previous point, as after rejected steps."""
    return [np.array(p) for p, _ in itertools.groupby(tuple(p) for p in points)]


@pytest.mark.parametrize("seed", range(4))
def test_iterates_match_scipy_with_fewer_products(seed):
    start = START + seed * torch.randn(5, dtype=D, generator=torch.Generator().manual_seed(seed))
    ours, theirs = [], []
    found = minimize(rosenbrock, start, method="newton-krylov", callback=lambda r: ours.append(r.x.tolist()))
    products = 0

    def product(x, v):
        nonlocal products
        products += 1
        return so.rosen_hess_prod(x, v)

    so.minimize(
        so.rosen,
        start.numpy(),
        jac=so.rosen_der,
        hessp=product,
        method="trust-ncg",
        callback=lambda x: theirs.append(x.tolist()),
    )
    ours, theirs = without_repeated_points(ours), without_repeated_points(theirs)
    assert abs(len(ours) - len(theirs)) <= 1
    for k, (one, other) in enumerate(zip(ours[:12], theirs[:12], strict=True)):
        np.testing.assert_allclose(one, other, rtol=1e-13 * 10 ** (k / 2))
    assert found.success
    assert found.nhvp < 0.8 * products
    assert found.njev <= found.nfev


def symmetric(n, seed, *, positive):
    g = torch.Generator().manual_seed(seed)
    q, _ = torch.linalg.qr(torch.randn(n, n, dtype=D, generator=g))
    values = torch.logspace(0, 2, n, dtype=D)
    return q @ torch.diag(values if positive else values - 3) @ q.T, torch.randn(n, dtype=D, generator=g)


@pytest.mark.parametrize("positive", [True, False])
@pytest.mark.parametrize("weighted", [True, False])
def test_smaller_radius_replays_the_path(positive, weighted):
    """The recorded path gives the step of conjugate gradients in a smaller ball without a new product."""
    A, g = symmetric(12, 1, positive=positive)
    weights = 1 / A.diag().abs() if weighted else torch.ones(12, dtype=D)
    precondition = (lambda v: weights * v) if weighted else None
    radius = 1.3 * float((weights.rsqrt() * torch.linalg.solve(A, g)).norm())
    path = steihaug(A.mv, g, 1e-8, radius, 100, precondition)
    for k in range(1, 12):
        small = radius * SHRINKAGE**k
        fresh = steihaug(A.mv, g, 1e-8, small, 100, precondition).step
        step = path.within(small)
        torch.testing.assert_close(step.z, fresh.z, rtol=1e-9, atol=0)
        # The norm is that of the preconditioner's inverse.
        assert abs(float((weights.rsqrt() * step.z).norm()) - small) < 1e-9 * small
        assert abs(step.change - float(g @ step.z + step.z @ A @ step.z / 2)) < 1e-9 * abs(step.change)


def test_negative_curvature_takes_the_lower_end():
    """The lower end may be behind: -0.1 t - 5 t^2 from 0.9, in a ball of radius 1, is lower at -1 than at 1."""
    z, d = torch.tensor([0.9], dtype=D), torch.ones(1, dtype=D)
    segment = Segment(z, d, value=0.0, slope=-0.1, curvature=-10.0, square=0.81, cross=0.9, length=1.0)
    step = segment.to(1.0)
    torch.testing.assert_close(step.z, -torch.ones(1, dtype=D))
    assert abs(step.change - (0.19 - 5 * 1.9**2)) < 1e-12


def test_few_pieces_of_the_path_are_kept():
    A, g = symmetric(60, 2, positive=True)
    path = steihaug(A.mv, g, 1e-10, 10.0, 1000, None)
    assert not path.step.bounded
    torch.testing.assert_close(path.step.z, -torch.linalg.solve(A, g), rtol=1e-7, atol=1e-9)
    assert len(path.pieces) < 6


@pytest.mark.parametrize("form", ["diagonal", "callable"])
def test_preconditioner_saves_products(form):
    n = 60
    scales = torch.logspace(0, 5, n, dtype=D)

    def f(x):
        return (scales * (x - 1) ** 2).sum() / 2 + 1e-3 * (x[1:] * x[:-1]).square().sum()

    given = 1 / scales if form == "diagonal" else lambda v: v / scales
    options = {"gtol": 1e-8, "initial_trust_radius": 100.0, "max_trust_radius": 1e5}
    plain = minimize(f, torch.zeros(n, dtype=D), method="newton-krylov", options=options)
    fast = minimize(f, torch.zeros(n, dtype=D), method="newton-krylov", options={**options, "preconditioner": given})
    assert plain.success
    assert fast.success
    torch.testing.assert_close(fast.x, plain.x, rtol=0, atol=1e-7)
    assert fast.nhvp < plain.nhvp / 5


def test_forcing_terms_do_not_depend_on_the_unit():
    """The terms do not depend on the unit of the function."""
    counts = {
        (name, unit): minimize(
            lambda x, unit=unit: unit * rosenbrock(x),
            START,
            method="newton-krylov",
            options={"forcing": name, "gtol": 1e-8 * unit},
        ).nhvp
        for name in ("superlinear", "eisenstat-walker")
        for unit in (1.0, 2.0**-20)
    }
    assert counts["eisenstat-walker", 1.0] == counts["eisenstat-walker", 2.0**-20]
    assert counts["superlinear", 1.0] != counts["superlinear", 2.0**-20]


def test_gradient_norm_reaches_rounding():
    """The method reaches a gradient norm that rounding allows, and reports a norm that it does not."""
    found = minimize(rosenbrock, START, method="newton-krylov", options={"gtol": 1e-12})
    assert found.success
    found = minimize(lambda x: rosenbrock(x) + 1e6, START, method="newton-krylov", options={"gtol": 0.0})
    # The value has lost ten digits, but the gradient none.
    assert found.nit < 200
    assert max(abs(found.jac.numpy())) < 1e-10


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"initial_trust_radius": 2000.0}, "less than max_trust_radius"),
        ({"forcing": "fast"}, "forcing'\\]: expected one of 'superlinear', 'eisenstat-walker'"),
        ({"preconditioner": 3}, "preconditioner'\\]: expected a callable"),
        ({"preconditioner": torch.ones(3)}, "expected 5 positive numbers, got 3"),
        ({"preconditioner": -torch.ones(5)}, "expected 5 positive numbers"),
        ({"radius": 3.0}, "'radius', which it does not have"),
        ({"eta": 2.0}, "eta'\\]: expected a number from 0.0 to 1.0"),
    ],
)
def test_rejects_bad_options(options, words):
    with pytest.raises(hodiff.InputError, match=words):
        minimize(rosenbrock, START, method="newton-krylov", options=options)
