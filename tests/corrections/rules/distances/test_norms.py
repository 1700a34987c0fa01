"""Norms, standard deviations and their squares, also at 0: torch's values, closed forms, and every route."""

import gc
import itertools
import math
import operator

import pytest
import torch
import torch.nn.functional as F
from corrections.contract import Contract
from drawing import normals, seeded

import hodiff
from hodiff.corrections.rules.distances.lengths import LENGTHS

D = torch.float64
corrected = hodiff.corrected()

randn = normals(seeded())

X, Y = randn(3, 4), randn(3, 4)
NORMS = {
    "vector_norm": lambda x: torch.linalg.vector_norm(x, dim=-1),
    "vector_norm of all": torch.linalg.vector_norm,
    "norm": lambda x: torch.norm(x, dim=0),
    "method": lambda x: x.norm(2, dim=(0, 1), keepdim=True),
    "linalg.norm": lambda x: torch.linalg.norm(x),
    "linalg.norm of vectors": lambda x: torch.linalg.norm(x, 2, -1),
    "matrix_norm": torch.linalg.matrix_norm,
    "aten.norm": lambda x: torch.ops.aten.norm.Scalar(x, 2),
    "dist": lambda x: torch.dist(x, torch.zeros_like(x)),
    "pairwise_distance": lambda x: F.pairwise_distance(x, torch.zeros_like(x), eps=0.0),
    "std": lambda x: x.std(dim=1),
    "std of one": lambda x: torch.std(x.reshape(-1, 1), 1, correction=0) + x.sum() ** 2,
    "std_mean": lambda x: torch.std_mean(x, correction=0)[0],
    "cdist": lambda x: torch.cdist(x, torch.zeros_like(x[:1])),
    "pdist": F.pdist,
}
OTHERS = {
    "p = 3": lambda x: torch.linalg.vector_norm(x, 3, dim=1),
    "p = 1.5": lambda x: x.norm(1.5),
    "p = 4": lambda x: torch.linalg.norm(x, 4, dim=0, keepdim=True),
    "of complex numbers": lambda x: torch.linalg.vector_norm(torch.complex(x, x**2), dim=1),
    "p = 3 of complex numbers": lambda x: torch.complex(x, x**2).norm(3, dim=1),
    "of a number": lambda x: x[0, 0].norm(),
    "normalize": F.normalize,
    "normalize p = 3": lambda x: F.normalize(x, 3, dim=0, eps=0.1),
    "cosine_similarity": lambda x: F.cosine_similarity(x, x.flip(0) ** 2),
    "renorm": lambda x: x.renorm(2, 0, 0.7),
    "Gaussian kernel": lambda x: torch.exp(-((torch.cdist(x, x + 1) / 2) ** 2)),
}


ZERO = torch.zeros(3, 4, dtype=D)


def hessians(f, x):
    return [hodiff.hessian(f, route=route)(x) for route in hodiff.ROUTES]


@pytest.mark.parametrize("name", [name for name in NORMS if name != "std of one"])
def test_derivatives_at_zero_are_zero(name):
    def f(x):
        return NORMS[name](x).sum()

    for route in hodiff.ROUTES:
        assert not hodiff.hvp(f, ZERO, Y, route=route).any()
    with corrected:
        assert not torch.func.grad(f)(ZERO).any()


SQUARES = {
    "power": lambda n: n**2,
    "pow": lambda n: torch.pow(n, 2.0),
    "square": lambda n: n.square(),
    "product": lambda n: n * n,
    "minus": lambda n: -((-n) * n),
    "multiple": lambda n: ((3 * n / 2) ** 2) * 4 / 9,
    "by a tensor": lambda n: (n / torch.tensor(2.0, dtype=D)) ** 2 * 4,
    "parts": lambda n: n.unsqueeze(0).clone()[0].reshape(-1) ** 2,
    "in another power": lambda n: n**2 + n**4,
}


@pytest.mark.parametrize("size", [1e-25, 1e25])
@pytest.mark.parametrize("options", [{}, {"dim": 1}, {"dim": (1,), "keepdim": True}])
def test_std_gradient_survives_overflow_of_squares_in_float32(size, options):
    """The second row has the usual size; the reference is computed in float64."""
    x = torch.tensor([[1.0, 2, 4], [3, 3.5, 1]]) * torch.tensor([[size], [1.0]])
    expected = torch.func.grad(lambda x: x.std(**options).sum())(x.double()).float()
    with hodiff.corrected():
        gradient = torch.func.grad(lambda x: x.std(**options).sum())(x)
        value = x.clone().requires_grad_().std(**options).detach()
    torch.testing.assert_close(value, x.std(**options))
    torch.testing.assert_close(gradient, expected)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("square", SQUARES)
@pytest.mark.parametrize("name", ["vector_norm", "matrix_norm", "std", "cdist", "pdist"])
def test_squared_norms_at_zero_match_sums_of_squares(name, square):
    """Hessians equal those of sums of squares, in primitives that torch differentiates rightly."""
    by_hand = {
        "std": lambda x: x.var(dim=1),
        "pdist": lambda x: (x[[0, 0, 1]] - x[[1, 2, 2]]).square().sum(-1),
        "matrix_norm": lambda x: x.square().sum(),
    }.get(name, lambda x: x.square().sum(-1))

    def smooth(s):
        return (1 - torch.exp(-s)).sum()

    v = randn(3, 4)
    expected = hodiff.hvp(lambda x: smooth(by_hand(x)), ZERO, v, correct=False)
    for route in hodiff.ROUTES:
        got = hodiff.hvp(lambda x: smooth(SQUARES[square](NORMS[name](x))), ZERO, v, route=route)
        torch.testing.assert_close(got, expected, rtol=1e-13, atol=1e-15)


def test_gaussian_kernel_hessian_at_coincident_points_matches_closed_form():
    """The Hessian of exp(-|x - y|^2) by x at y is -2, and third derivatives vanish."""
    y = randn(4)

    def kernel(x):
        d = torch.linalg.norm(x - y)
        return torch.exp(-d * d)

    for got in hessians(kernel, y):
        torch.testing.assert_close(got, -2 * torch.eye(4, dtype=D))
    third = corrected(torch.func.jacfwd(torch.func.jacrev(torch.func.jacfwd(kernel))))(y)
    assert not third.any()


def test_norm_changed_in_place_is_not_taken_for_the_original():
    x = randn(3)

    def changed(x):
        n = x.norm() + 0
        n = n * 1
        length = x.norm()
        length.mul_(3)
        return length**2 + n

    def by_hand(x):
        s = x.square().sum()
        return 9 * s + s.sqrt()

    torch.testing.assert_close(hodiff.hvp(changed, x, x), hodiff.hvp(by_hand, x, x, correct=False))


@pytest.mark.slow
def test_remembered_norms_are_released_with_their_tensors():
    gc.collect()
    before = len(LENGTHS)
    x = randn(3).requires_grad_()
    with corrected:
        length = x.norm()
        assert len(LENGTHS) == before + 1
        with torch.no_grad():
            constant = x.norm()
        assert len(LENGTHS) == before + 1
    del length, constant
    gc.collect()
    assert len(LENGTHS) == before


@pytest.mark.parametrize("dtype", [D, torch.float32, torch.bfloat16, torch.complex64])
def test_values_and_gradients_match_torch(dtype):
    x, y = X.to(dtype).requires_grad_(), Y.to(dtype)
    real = not dtype.is_complex
    orders = (0, 0.5, 1, 1.5, 2, 3.0, math.inf, -math.inf, -1)
    calls = [lambda p=p: torch.linalg.vector_norm(x, p, dim=1) for p in orders if real or p not in (0, 0.5)]
    calls += [lambda p=p: torch.norm(x, p) for p in (None, "fro", 2, 3)]
    calls += [
        lambda: x.norm(dim=(0, 1), keepdim=True),
        lambda: x.norm(p=2, dim=0, dtype=torch.complex128 if dtype.is_complex else D),
        lambda: torch.linalg.norm(x),
        lambda: torch.linalg.norm(x[0], 3),
        lambda: torch.linalg.norm(x, 1),
        lambda: torch.linalg.matrix_norm(x.expand(2, 3, 4), dim=(0, 2), keepdim=True),
        lambda: x[0, 0].norm(),
        lambda: x[:, :0].norm(dim=1),
        lambda: torch.dist(x, y, 3),
    ]
    if dtype in (D, torch.float32):
        calls += [
            lambda: torch.linalg.norm(x, "nuc"),
            lambda: torch.linalg.matrix_norm(x, 2),
            lambda: F.pairwise_distance(x, y[0], p=3, keepdim=True),
            lambda: F.cosine_similarity(x, y[0], dim=-1),
            lambda: F.cosine_similarity(x, y * 1e-12),
            lambda: F.normalize(x, p=1, dim=0),
            lambda: F.normalize(x * 1e-13),
            lambda: x.renorm(2, 0, 1.0),
            lambda: torch.renorm(x, 1, 1, 0.5),
        ]
    if real:
        calls += [
            lambda: x.std(),
            lambda: torch.std(x, 1, False),
            lambda: x.std(dim=(0, 1), correction=0, keepdim=True),
            lambda: x[:1].std(0, correction=0),
            lambda: torch.std_mean(x, dim=1, unbiased=True)[0],
        ]
    for call in calls:
        expected = call()
        with corrected:
            got = call()
        tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {}
        torch.testing.assert_close(got, expected, equal_nan=True, **tolerance)
        if expected.requires_grad:
            weights = torch.ones_like(expected)
            (by_torch,) = torch.autograd.grad(expected, x, weights, materialize_grads=True)
            (ours,) = torch.autograd.grad(got, x, weights, materialize_grads=True)
            torch.testing.assert_close(ours, by_torch, equal_nan=True, **tolerance)


BAD = {
    "vector_norm dim": lambda x: torch.linalg.vector_norm(x, 2, dim=5),
    "vector_norm dtype": lambda x: torch.linalg.vector_norm(x, dtype=torch.int64),
    "vector_norm integers": lambda x: torch.linalg.vector_norm(x.to(torch.int64)),
    "vector_norm twice": lambda x: torch.linalg.vector_norm(x, 2, dim=(0, 0)),
    "norm order": lambda x: x.norm("two"),
    "linalg.norm of three": lambda x: torch.linalg.norm(x.expand(2, 3, 4), 2),
    "matrix_norm": lambda x: torch.linalg.matrix_norm(x[0]),
    "matrix_norm dim": lambda x: torch.linalg.matrix_norm(x, dim=(0, 0)),
    "dist": lambda x: torch.dist(x, x[:, :3]),
    "renorm": lambda x: x.renorm(2, 0, -1.0),
    "std": lambda x: x.std(3),
}


def matern_5_2(n):
    r = math.sqrt(5) * n / 1.5
    return (1 + r + r**2 / 3) * torch.exp(-r)


def row_norm(x):
    """Length of the only row."""
    return x.norm(dim=1)


def norms_beside_zero(x):
    """Lengths of two vectors, of which the first is 0."""
    return torch.cat([x, x + 1]).norm(dim=1)


def rows_with_one(n):
    """Rows of a number and 1."""
    return torch.stack([n, torch.ones_like(n)], 1)


def filled(x):
    y = torch.zeros(2, dtype=D)
    y[1] = x.norm()
    return y


TWO_ROWS, ONE_OF_TWO, COSH_1 = torch.tensor([[1.0], [2.0]], dtype=D), torch.tensor([1.0, 0.0], dtype=D), math.cosh(1)
# Functions of a length that are smooth at 0, by operation, and the factor of the identity in their Hessian
SMOOTH = {
    "Matern 5/2": (lambda x: matern_5_2(x.norm()), -5 / 3 / 1.5**2),
    "Matern 5/2 of distances": (lambda x: matern_5_2(torch.cdist(x, torch.zeros_like(x))).sum(), -5 / 3 / 1.5**2),
    "Matern 3/2": (lambda x: (1 + x.norm()) * torch.exp(-x.norm()), -1),
    "periodic": (lambda x: torch.exp(-2 * torch.sin(x.norm()) ** 2), -4),
    "Wendland": (lambda x: (1 - x.norm()).clamp(min=0) ** 4 * (4 * x.norm() + 1), -20),
    "cos": (lambda x: torch.cos(x.norm()), -1),
    "sinc": (lambda x: torch.sinc(x.norm()), -(math.pi**2) / 3),
    "quotient": (lambda x: 1 / (1 + x.norm()) + x.norm(), 2),
    "conjugates": (lambda x: (1 + x.norm()) * (1 - x.norm()), -2),
    "inner product": (lambda x: row_norm(x) @ row_norm(x), 2),
    "mse_loss": (lambda x: F.mse_loss(row_norm(x), torch.zeros(1, dtype=D)), 2),
    "addcmul": (lambda x: torch.addcmul(torch.zeros(1, dtype=D), row_norm(x), row_norm(x)).sum(), 2),
    "norm of norms": (lambda x: torch.linalg.norm(row_norm(x)) ** 2, 2),
    "stack": (lambda x: torch.stack([x.norm(), x.norm()]).square().sum(), 4),
    "where": (lambda x: torch.where(x.norm() < 1, x.norm(), 2) ** 2, 2),
    "sum of one": (lambda x: row_norm(x).sum() ** 2, 2),
    "in place": (lambda x: x.norm().add(0).mul_(3) ** 2, 18),
    "hypot": (lambda x: torch.hypot(torch.ones((), dtype=D), x.norm()), 1),
    "hypot squared": (lambda x: torch.hypot(x, 2 * x).square().sum(), 10),
    "std": (lambda x: torch.cosh(torch.cat([x, -x], 1).std(correction=0) * math.sqrt(6)), 2),
    "absolute values": (lambda x: x.abs().square().sum() + (x.abs() * torch.abs(x)).sum(), 4),
    "cosh of absolute values": (lambda x: torch.cosh(x.abs()).sum(), 1),
    "softplus by absolute values": (lambda x: (F.relu(x) + torch.log1p(torch.exp(-x.abs()))).sum(), 1 / 4),
    "complex absolute values": (lambda x: torch.complex(x, 2 * x).abs().square().sum(), 10),
    "power spectrum": (lambda x: torch.fft.fft(x).abs().square().sum(), 6),
    "l1_loss": (lambda x: F.l1_loss(x, torch.zeros_like(x), reduction="none").square().sum(), 2),
    "l1_loss of one": (lambda x: F.l1_loss(x.norm(), torch.zeros((), dtype=D)) ** 2, 2),
    "sqrt": (lambda x: torch.sqrt((x * x).sum()) ** 2, 2),
    "einsum": (
        lambda x: (torch.einsum("ij,ij->i", x.abs(), x.abs()) + torch.einsum("i,i->", row_norm(x), row_norm(x))).sum(),
        4,
    ),
    "einsum of transposed": (lambda x: (n := x.abs()).shape and torch.einsum("ij,ij->ji", n, n).sum(), 2),
    "vecdot": (
        lambda x: torch.linalg.vecdot(x.abs(), x.abs()).sum() + torch.linalg.vecdot(row_norm(x), row_norm(x), dim=0),
        4,
    ),
    "exponent that is a tensor": (lambda x: (x.abs() ** torch.tensor(2.0)).sum(), 2),
    "linear": (lambda x: torch.cos(F.linear(row_norm(x), TWO_ROWS)).sum(), -5),
    "linear with a bias": (
        lambda x: torch.cosh(F.linear(row_norm(x), TWO_ROWS, torch.ones(2, dtype=D))).sum(),
        5 * COSH_1,
    ),
    "conv1d": (lambda x: F.conv1d(row_norm(x)[:, None], TWO_ROWS[:, :, None]).square().sum(), 10),
    "einsum with a constant": (lambda x: torch.einsum("i,ki->k", row_norm(x), TWO_ROWS).square().sum(), 10),
    "linear of absolute values": (lambda x: torch.linalg.multi_dot([TWO_ROWS, x.abs()]).square().sum(), 10),
    "sort": (lambda x: norms_beside_zero(x).sort()[0].cosh()[0], 1),
    "topk": (lambda x: norms_beside_zero(x).topk(1, largest=False)[0].cosh().sum(), 1),
    "least": (
        lambda x: (
            norms_beside_zero(x).amin() ** 2 + norms_beside_zero(x).min(0)[0] ** 2 + norms_beside_zero(x).min() ** 2
        ),
        6,
    ),
    "cumsum": (lambda x: row_norm(x).cumsum(0).square().sum(), 2),
    "index_add": (lambda x: torch.zeros(1, dtype=D).index_add(0, torch.tensor([0]), row_norm(x)).square().sum(), 2),
    "written to an element": (lambda x: filled(x).square().sum(), 2),
    "written": (lambda x: torch.ones(1, dtype=D).copy_(row_norm(x)).square().sum(), 2),
    "scatter_add_": (
        lambda x: torch.zeros(1, dtype=D).scatter_add_(0, torch.tensor([0]), row_norm(x)).square().sum(),
        2,
    ),
    "sum of multiples": (lambda x: (n := row_norm(x)).shape and torch.cat([n, 2 * n]).sum() ** 2, 18),
    "norm of multiples": (lambda x: (n := row_norm(x)).shape and torch.cat([n, 2 * n]).norm() ** 2, 10),
    "norm of a difference": (lambda x: (norms_beside_zero(x) * ONE_OF_TWO - 1 + ONE_OF_TWO).norm() ** 2, 2),
    "norms of rows": (lambda x: torch.cosh(norms_beside_zero(x)[None] * ONE_OF_TWO).norm(dim=1).square().sum(), 2),
    "even sum of norms": (
        lambda x: sum((row_norm(x) * s - 1).square().add(1).sqrt().sum() for s in (1, -1)),
        2 / 2**1.5,
    ),
    "even sum of norms of pairs": (
        lambda x: sum(rows_with_one(s * row_norm(x) - 1).norm(dim=1).sum() for s in (1, -1)),
        2 / 2**1.5,
    ),
    "by name": (lambda x: torch.sum(input=row_norm(x)).square() + F.dropout(input=x.norm(), training=False) ** 2, 4),
    "large factors": (lambda x: (F.linear(row_norm(x), 1e200 * TWO_ROWS) * 1e-200).square().sum(), 10),
    "small factors": (lambda x: (F.linear(row_norm(x), 1e-200 * TWO_ROWS) * 1e200).square().sum(), 10),
    "mean": (lambda x: (norms_beside_zero(x) * ONE_OF_TWO).mean().cos(), -1 / 4),
    "dropout in evaluation": (lambda x: F.dropout(x.norm(), 0.5, training=False) ** 2, 2),
    "arcsinh": (lambda x: torch.arcsinh(x.norm()) ** 2, 2),
    "erfinv": (lambda x: torch.special.erfinv(x.norm()) ** 2, math.pi / 2),
    "logit": (lambda x: torch.logit(0.5 + x.norm()) ** 2, 32),
    "log_ndtr": (lambda x: torch.special.log_ndtr(x.norm()) + torch.special.log_ndtr(-x.norm()), -4 / math.pi),
    "matmul": (lambda x: torch.linalg.matmul(row_norm(x), row_norm(x)), 2),
    "flipud": (lambda x: torch.flipud(norms_beside_zero(x)).cosh()[1], 1),
    "column_stack": (lambda x: torch.column_stack([row_norm(x), 2 * row_norm(x)]).square().sum(), 10),
    "select_scatter": (lambda x: torch.zeros(2, dtype=D).select_scatter(row_norm(x)[0], 0, 1).square().sum(), 2),
    "index_copy": (lambda x: torch.ones(1, dtype=D).index_copy(0, torch.tensor([0]), row_norm(x)).square().sum(), 2),
    "into vmap": (lambda x: torch.vmap(lambda n: 2 * n)(row_norm(x)).square().sum(), 8),
    "out of vmap": (lambda x: torch.vmap(lambda row: torch.cosh(3 * row.norm()).sqrt().log())(x).sum(), 4.5),
    "length out of vmap": (lambda x: torch.vmap(lambda row: row.norm())(x).square().sum(), 2),
}


@pytest.mark.one_in(3)
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", SMOOTH)
def test_smooth_functions_of_a_zero_norm_match_closed_form(name):
    f, factor = SMOOTH[name]
    x, v = torch.zeros(1, 3, dtype=D), torch.tensor([[0.5, -1.0, 2.0]], dtype=D)
    for route in hodiff.ROUTES:
        torch.testing.assert_close(hodiff.hvp(f, x, v, route=route), factor * v, rtol=1e-12, atol=1e-12)
    if name not in ("sqrt", "in place"):
        assert hodiff.laplacian(f)(x).item() == pytest.approx(3 * factor, rel=1e-12)
        along = hodiff.directional_derivatives(f, x, v, order=2)
        assert along[1].item() == pytest.approx(0, abs=1e-12)
        assert along[2].item() == pytest.approx(factor * v.square().sum().item(), rel=1e-12)


# An in-place operation on y, and the same out of place
WRITTEN = {
    "mul_": (lambda y, n: y.mul_(n), lambda y, n: y * n),
    "*=": (operator.imul, lambda y, n: y * n),
    "div_": (lambda y, n: y.div_(n), lambda y, n: y / n),
    "add_": (lambda y, n: y.add_(n, alpha=2), lambda y, n: y + 2 * n),
    "sub_ and mul_": (lambda y, n: y.sub_(n).mul_(n), lambda y, n: (y - n) * n),
    "mul_ by itself": (lambda y, n: y.mul_(n).mul_(y), lambda y, n: (y * n) ** 2),
    "a length": (lambda y, n: y * (n * 1).mul_(n), lambda y, n: y * n**2),
    "pow_": (lambda y, n: y * (n * 1).pow_(3), lambda y, n: y * n**3),
    "a constant": (lambda y, n: torch.ones_like(y).mul_(n) * y, lambda y, n: n * y),
}
LENGTHS_OF = {
    "norm": torch.linalg.vector_norm,
    "abs": torch.abs,
    "std": torch.std,
    "sqrt": lambda x: (x * x).sum().sqrt(),
    "dist": lambda x: torch.dist(x, torch.ones_like(x)),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("length", LENGTHS_OF.values(), ids=LENGTHS_OF)
@pytest.mark.parametrize("name", WRITTEN)
def test_in_place_operators_on_norms_match_formula(name, length):
    """Values that are overwritten in place stay factors in the derivatives."""
    in_place, formula = WRITTEN[name]
    x, v = torch.tensor([2.0, 3.0, -1.5], dtype=D), torch.tensor([0.5, -1.0, 2.0], dtype=D)

    def written(x):
        return in_place(x.clone(), length(x)) ** 2

    def plain(x):
        return formula(x, length(x)) ** 2

    expected = torch.autograd.functional.jacobian(plain, x)
    with corrected:
        torch.testing.assert_close(torch.func.vmap(written)(x[None])[0], plain(x))
        torch.testing.assert_close(torch.func.jvp(written, (x,), (v,)), (plain(x), expected @ v))
    for mode in ("forward", "reverse"):
        torch.testing.assert_close(hodiff.jacobian(written, mode=mode)(x), expected)
    product = torch.autograd.functional.hvp(lambda x: plain(x).sum(), x, v)[1]
    for route in hodiff.ROUTES:
        torch.testing.assert_close(hodiff.hvp(lambda x: written(x).sum(), x, v, route=route), product)


def test_taylor_mode_gives_zero_derivatives_of_a_norm_at_zero():
    """Derivatives of a length at 0 are zero, as they are by the routes."""
    x, v = torch.zeros(3, dtype=D), torch.tensor([0.5, -1.0, 2.0], dtype=D)
    for each in hodiff.directional_derivatives(lambda x: x.norm(), x, v, order=4)[1:]:
        assert not each.any()
    assert not hodiff.laplacian(lambda x: (x * x.abs()).sum())(x).any()
    # Only the fourth derivatives of |x|^2 - |x|^4 / 3 count: -(8 n (n + 2)) / 3.
    fourth = hodiff.bilaplacian(lambda x: x.norm() ** 2 - x.norm() ** 4 / 3)(x)
    assert fourth.item() == pytest.approx(-40)


def test_taylor_mode_of_a_norm_along_a_curve_from_zero_matches_closed_form():
    """The square of |x(t)| with x(t) = (t^2, t^3) is t^4 + t^6."""
    x = torch.zeros(2, dtype=D)
    series = tuple(torch.tensor(each, dtype=D) for each in ([0.0, 0.0], [2.0, 0.0], [0.0, 6.0], [0.0, 0.0]))
    _, found = hodiff.taylor.jet(lambda x: torch.cos(x.norm()), (x,), (series,))
    assert [each.item() for each in found] == pytest.approx([0, 0, 0, -12])


def test_third_to_fifth_derivatives_of_radial_function_at_zero():
    """An even function of the radius has, along a line, the derivatives of the function itself."""
    t = torch.zeros((), dtype=D)
    f = derivative = lambda t: torch.cos((t * torch.tensor([0.6, 0.8], dtype=D)).norm()) * torch.exp(t)
    with corrected:
        for _ in range(5):
            derivative = (lambda g: lambda t: torch.func.jvp(g, (t,), (torch.ones_like(t),))[1])(derivative)
        assert derivative(t).item() == pytest.approx(-4)  # the real part of (1 + i)^5
        g = torch.func.grad(torch.func.grad(torch.func.grad(torch.func.grad(f))))
        assert g(t).item() == pytest.approx(-4)


def test_matern_kernel_hessian_at_zero_is_differentiable_by_its_length_scale():
    """The Hessian -5 / (3 l^2) v^2 at coincident points is differentiated by the length scale."""

    def f(p):
        x, scale = p
        r = math.sqrt(5) * x.norm() / scale
        return (1 + r + r**2 / 3) * torch.exp(-r)

    v, scale = torch.tensor([0.6, 0.8], dtype=D), torch.tensor(1.5, dtype=D)

    def curvature(scale):
        zero = torch.zeros(2, dtype=D)
        return torch.func.jvp(lambda x: torch.func.jvp(lambda x: f((x, scale)), (x,), (v,))[1], (zero,), (v,))[1]

    with corrected:
        assert torch.func.grad(curvature)(scale).item() == pytest.approx(10 / 3 / 1.5**3)


@pytest.mark.parametrize(
    "f",
    [
        lambda n: torch.softmax(torch.cat([n, 0 * n.detach()]), 0)[0],
        lambda n: F.huber_loss(n, torch.zeros(1, dtype=D)),
        lambda n: torch.kron(n, n)[0],
        lambda n: ((n[0] * torch.eye(2, dtype=D)) @ (n[0] * torch.eye(2, dtype=D))).trace(),
        lambda n: torch.einsum("i,j->", n, n),
        lambda n: torch.fft.fft(n).abs().sum(),
        lambda n: (torch.tensor([[1j]], dtype=torch.complex128) @ n.to(torch.complex128)).abs().square().sum(),
        lambda n: torch.linalg.norm(torch.stack([torch.cat([n, n + 1]), torch.cat([n + 1, n])]), 2),
        lambda n: torch.manual_seed(0) and F.dropout(torch.cat([n, n + 1])).square().sum(),
        lambda n: torch.complex(n, n).abs().square().sum(),
    ],
)
def test_unknown_functions_of_a_zero_norm_give_nan_and_warn(f):
    """Second derivatives are NaN instead of a wrong number; first derivatives are unchanged."""
    x, v = torch.zeros(1, 3, dtype=D), torch.ones(1, 3, dtype=D)
    for route in hodiff.ROUTES:
        with pytest.warns(hodiff.HodiffWarning, match="0 somewhere, where it has a kink"):
            assert hodiff.hvp(lambda x: f(row_norm(x)), x, v, route=route).isnan().all()
    with pytest.warns(hodiff.HodiffWarning), corrected:
        assert not torch.func.grad(lambda x: f(row_norm(x)))(x).any()


def test_sums_of_two_zero_norms_give_nan_and_warn():
    """Two lengths may be equal, and the square of their sum smooth."""
    x, v = torch.zeros(3, dtype=D), torch.ones(3, dtype=D)
    for route in hodiff.ROUTES:
        with pytest.warns(hodiff.HodiffWarning, match="Two of them are 0 at once"):
            assert hodiff.hvp(lambda x: ((1 * x).norm() + (2 * x).norm()) ** 2, x, v, route=route).isnan().all()


@pytest.mark.filterwarnings("error")
def test_distances_to_nearest_centers_at_a_center():
    """Sums over nearest points are quadratic where a point is a center, and at other points as well."""
    centers = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 2.0]], dtype=D)
    points = torch.tensor([[0.0, 0.0], [0.9, 0.2], [0.0, 2.0]], dtype=D)
    for nearest in (lambda d: d.min(1)[0], lambda d: d.amin(1), lambda d: d.sort(1)[0][:, 0]):
        for route in hodiff.ROUTES:
            found = hodiff.hessian_matrix(
                lambda x: nearest(torch.cdist(x, centers)).square().sum(), points, route=route
            )
            torch.testing.assert_close(found, 2 * torch.eye(6, dtype=D))


@pytest.mark.filterwarnings("error")
def test_constant_zero_norms_do_not_affect_derivatives():
    """Distances of points to themselves are 0 near the point, too, so that functions of their sum are smooth."""
    x = torch.tensor([[0.3, -1.0], [2.0, 0.5], [-0.7, 1.1]], dtype=D)

    def f(x, eps):
        return ((x[:, None] - x[None]).square().sum(-1) + eps).sqrt().mean().log()

    def g(x):
        return torch.log((x[:, None] - x[None]).norm(dim=-1).mean())

    torch.testing.assert_close(
        hodiff.hessian_matrix(g, x), hodiff.hessian_matrix(lambda x: f(x, 1e-28), x), rtol=1e-6, atol=1e-6
    )


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("route", hodiff.ROUTES)
@pytest.mark.parametrize(
    "nothing",
    [
        lambda x: torch.linalg.norm(x[:0]),
        lambda x: x[:0].norm(),
        lambda x: torch.linalg.vector_norm(x.reshape(3, 1)[:, :0], dim=1).sum(),
        lambda x: F.pairwise_distance(x[:0], x[:0]).sum(),
        lambda x: torch.cdist(x.reshape(3, 1)[:0], x[:1, None]).sum(),
        lambda x: torch.cdist(x.reshape(1, 3), x.reshape(1, 3)[:0]).sum(),
        lambda x: torch.cdist(x.reshape(3, 1)[:, :0], x.reshape(3, 1)[:, :0]).sum(),
        lambda x: F.pdist(x.reshape(3, 1)[:, :0]).sum(),
    ],
)
def test_norms_of_no_numbers_are_constants(nothing, route):
    x, v = torch.tensor([0.3, 0.5, 1.2], dtype=D), torch.ones(3, dtype=D)

    def f(x, constant):
        shares = (constant(x.sin()) + x.prod()).sin().expand(3) / x.exp()
        return shares.sum() * (1 + shares.mean())

    found = hodiff.hvp(lambda x: f(x, nothing), x, v, route=route)
    torch.testing.assert_close(found, hodiff.hvp(lambda x: f(x, lambda x: 0), x, v))


def test_third_derivatives_of_complex_absolute_values_are_0_at_0():
    """Elsewhere |t (3 + 4 i)|³ is 125 t³."""

    def cubes(t):
        z = torch.stack([torch.complex(3 * t, 4 * t), torch.complex(0 * t, 0 * t)])
        return z.abs().pow(3).sum()

    t = torch.tensor(0.7, dtype=D)
    for modes in ("rrr", "rfr", "fff"):
        f = corrected(cubes)
        for mode in modes:
            f = torch.func.grad(f) if mode == "r" else lambda t, f=f: torch.func.jvp(f, (t,), (torch.ones_like(t),))[1]
        assert f(t).item() == pytest.approx(750)


def test_preflight_remarks_on_zero_norms():
    for f, said in (
        (lambda x: torch.cos(x.norm()), "torch.Tensor.norm is 0 somewhere"),
        (lambda x: x.abs().square(), "torch.Tensor.abs is 0 somewhere"),
        (lambda x: torch.sqrt(x) ** 2, "no finite derivative"),
    ):
        assert any(said in each for each in hodiff.preflight(f, torch.zeros(3)).remarks)
        assert not hodiff.preflight(f, torch.ones(3)).remarks


@pytest.mark.parametrize("route", list(itertools.product("rf", repeat=3)))
def test_third_derivative_of_the_norm_matches_closed_form(route):
    """The norm along a line at the distance h from 0 is (h^2 + t^2)^(1/2), with the third derivative -3 h^2 t / n^5."""
    h, t = 0.5, torch.tensor(0.7, dtype=D)

    def along(t):
        return torch.stack([torch.full_like(t, h), t]).norm()

    f = along
    for mode in route:
        f = torch.func.grad(f) if mode == "r" else lambda t, f=f: torch.func.jvp(f, (t,), (torch.ones_like(t),))[1]
    expected = -3 * h**2 * 0.7 / (h**2 + 0.49) ** 2.5
    assert corrected(f)(t).item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("p", [1.5, 3, 4])
@pytest.mark.parametrize(("dtype", "size"), [(torch.float64, 1e150), (torch.float64, 1e-150), (torch.float32, 1e-10)])
@pytest.mark.parametrize(
    "length",
    [
        lambda x, p: torch.linalg.vector_norm(x, p),
        lambda x, p: torch.cdist(x[None], torch.zeros_like(x)[None], p).sum(),
    ],
)
def test_p_norms_of_huge_and_tiny_vectors_match_scaled_hessian(length, dtype, size, p):
    """Second derivatives of homogeneous functions fall with the size, here a power of two."""
    size = 2.0 ** round(math.log2(size))
    x = torch.tensor([1.0, -2.0, 0.5], dtype=dtype)
    expected = hodiff.hessian_matrix(lambda x: (x.abs() ** p).sum() ** (1 / p), x.double()).to(dtype)
    for route in ("reverse-over-reverse", "forward-over-reverse"):
        found = hodiff.hessian(lambda x: length(x, p), route=route)(x * size)
        torch.testing.assert_close(found * size, expected)


def test_compiled_code_is_not_retraced_for_remembered_norms():
    """The table of remembered lengths changes between calls, without a new graph."""
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    x = randn(3).requires_grad_()
    f = torch.compile(corrected(lambda x: F.softplus(x.sin())), backend=backend, fullgraph=True)
    with hodiff.corrected():
        held = [torch.linalg.vector_norm(x)]
    assert LENGTHS
    f(x)
    held.append(corrected(torch.linalg.vector_norm)(2 * x))
    f(x)
    held.clear()
    f(x)
    assert len(graphs) == 1


@pytest.mark.parametrize(
    ("name", "scale"),
    [
        *itertools.product(["norm", "normalize", "cosine_similarity", "renorm"], [1e12, 1e15, 1e18]),
        *(("norm", 1e-20), ("norm", 1e-12), ("normalize", 1e-12), ("cosine_similarity", 1e-12)),
    ],
)
def test_second_derivatives_in_float32_far_from_one(name, scale):
    """The second derivative of a root of squares has the third power of the length."""
    f = {
        "norm": lambda x: x.norm(),
        "normalize": lambda x: F.normalize(x, dim=0, eps=0.0)[0],
        "cosine_similarity": lambda x: F.cosine_similarity(x, torch.tensor([1.0, 2.0, 3.0]).to(x), 0, 0.0),
        "renorm": lambda x: torch.renorm(x[None], 2, 0, 1.0)[0, 0],
    }[name]
    x, v = torch.tensor([1.3, -0.7, 0.4]) * scale, torch.tensor([1.0, 0.3, 0.2]) * scale
    expected = torch.func.hessian(lambda x: f(x))(x.double()) @ v.double()
    for route in hodiff.ROUTES:
        found = hodiff.hvp(f, x, v, route=route).double()
        assert float((found - expected).abs().max() / expected.abs().max()) < 1e-5, route


CASES = {name: (f, (X,)) for name, f in (NORMS | OTHERS).items()}


class TestContract(Contract):
    cases = CASES
    quick, one_in = tuple(CASES)[::2], 9
    not_compiled = (
        *(each for each in OTHERS if "complex" in each),
        # Dynamo of torch 2.11 and 2.12 raises for several dimensions of a matrix norm.
        *(("method", "matrix_norm") if torch.__version__ < "2.13" else ()),
    )
    wrong, failures, order_of_failures = ("vector_norm", "normalize", "p = 3"), {"raises"}, 3
    errors, error_inputs = BAD, (X,)
