"""Solves, determinants and factors: closed forms, and every route against differences of the gradient."""

import warnings

import pytest
import torch
from corrections.against_torch import FAILURES, route_statuses, same_value, unsigned
from corrections.contract import Contract
from drawing import normals
from torch.linalg import eigh

import hodiff
from hodiff.corrections import table
from hodiff.corrections.rules.linalg.factored_solves import FactoredSolve

# torch warns once that these are deprecated.
pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.(linalg.solve_triangular|cholesky|triangular_solve) .*:UserWarning"
)

D = torch.float64
GENERATOR = torch.Generator().manual_seed(0)
LINALG = torch.linalg
HAS_CHOLESKY = torch.__version__ < "2.14"

randn = normals(GENERATOR)


def regular(*shape):
    """Unsymmetric matrices far from singular."""
    return randn(*shape) / 2 + 2 * torch.eye(shape[-1], dtype=D)


def positive(matrix):
    return matrix @ matrix.mT + torch.eye(matrix.shape[-1], dtype=D)


def joined(real, imaginary):
    return torch.complex(real, imaginary)


SQUARE, OTHER, VECTOR = regular(3, 3), randn(3, 2), randn(3)
A, B = regular(2, 2), randn(2, 2)
BATCH = regular(2, 3, 3)
# Both have rank 3; the second determinant has a gradient of zero as well.
SINGULAR = randn(4, 3) @ randn(3, 4)
DEEPLY_SINGULAR = randn(5, 3) @ randn(3, 5)
DISTINCT = torch.diag(torch.tensor([1.0, 2.0, 4.0], dtype=D)) + randn(3, 3) / 4

CASES = {
    "solve": (LINALG.solve, (SQUARE, OTHER)),
    "solve a vector": (LINALG.solve, (SQUARE, VECTOR)),
    "solve from the right": (lambda a, b: LINALG.solve(a, b, left=False), (SQUARE, OTHER.mT.contiguous())),
    "solve broadcast": (LINALG.solve, (SQUARE, randn(2, 3, 2))),
    "solve many": (LINALG.solve, (BATCH, OTHER)),
    "solve complex": (lambda a, b, c, d: LINALG.solve(joined(a, b), joined(c, d)), (A, B, randn(2, 1), randn(2, 1))),
    "solve complex from the right": (
        lambda a, b, c, d: LINALG.solve(joined(a, b), joined(c, d), left=False),
        (A, B, randn(1, 2), randn(1, 2)),
    ),
    "solve_ex": (lambda a, b: LINALG.solve_ex(a, b)[0], (SQUARE, OTHER)),
    "tensorsolve": (LINALG.tensorsolve, (regular(4, 4).reshape(2, 2, 4), randn(2, 2))),
    "tensorsolve of some dims": (
        lambda a, b: LINALG.tensorsolve(a, b, dims=(0,)),
        (regular(4, 4).mT.reshape(4, 2, 2), randn(2, 2)),
    ),
    "det of two rows": (torch.det, (A,)),
    "det of three rows": (LINALG.det, (BATCH,)),
    "det": (torch.Tensor.det, (regular(4, 4),)),
    "det complex": (lambda a, b: torch.det(joined(a, b)), (regular(4, 4), randn(4, 4) / 2)),
    "slogdet": (lambda a: torch.slogdet(a)[1], (SQUARE,)),
    "slogdet many": (lambda a: LINALG.slogdet(a)[1], (BATCH,)),
    "slogdet complex": (lambda a, b: tuple(LINALG.slogdet(joined(a, b))), (A, B)),
    "logdet": (torch.logdet, (SQUARE,)),
    "logdet complex": (lambda a, b: torch.logdet(joined(a, b)), (A, B)),
    "triangular_solve": (lambda b, a: torch.triangular_solve(b, a)[0], (OTHER, SQUARE)),
    "triangular_solve transposed": (
        lambda b, a: torch.triangular_solve(b, a, upper=False, transpose=True, unitriangular=True)[0],
        (OTHER, SQUARE),
    ),
    "cholesky_solve": (torch.cholesky_solve, (OTHER, SQUARE)),
    "cholesky_solve many": (lambda b, a: b.cholesky_solve(a), (OTHER, BATCH)),
    "cholesky_solve upper": (lambda b, a: torch.cholesky_solve(b, a, upper=True), (randn(2, 3, 2), SQUARE)),
    "cholesky_solve complex": (
        lambda a, b, c, d: torch.cholesky_solve(joined(a, b), joined(c, d)),
        (B, A, A, B),
    ),
    "cholesky_inverse": (torch.cholesky_inverse, (SQUARE,)),
    "cholesky_inverse upper": (lambda a: torch.cholesky_inverse(a, upper=True), (SQUARE,)),
    **({"cholesky": (lambda a: torch.cholesky(positive(a)), (SQUARE,))} if HAS_CHOLESKY else {}),
    "householder_product": (LINALG.householder_product, (randn(4, 3), randn(2))),
    "orgqr with a zero": (torch.orgqr, (randn(3, 2), torch.tensor([0.0, 1.0], dtype=D))),
    "ormqr": (torch.ormqr, (randn(3, 2), randn(2), randn(3, 2))),
    "ormqr from the right": (
        lambda a, tau, b: torch.ormqr(a, tau, b, left=False, transpose=True),
        (randn(3, 2), randn(2), randn(2, 3)),
    ),
    "matrix_exp": (torch.matrix_exp, (SQUARE,)),
    "matrix_exp of many": (lambda a: LINALG.matrix_exp(a / 2), (BATCH,)),
    "matrix_exp complex": (lambda a, b: torch.matrix_exp(joined(a, b)), (A, B)),
    "eigh": (lambda a: unsigned(eigh(a + a.mT)[1]), (DISTINCT,)),
    "eigh values": (lambda a: eigh(a + a.mT, UPLO="U")[0], (DISTINCT,)),
    "eigvalsh": (lambda a: LINALG.eigvalsh(a + a.mT, UPLO="U"), (DISTINCT,)),
    "eigh complex": (lambda a, b: unsigned(eigh(joined(a + a.mT, b - b.mT))[1]), (DISTINCT[:2, :2], B)),
}
# Compiled code has no correct route for general eigenvectors, and cannot inspect values to detect singular matrices.
EAGER_CASES = {
    "det of rank n - 1": (torch.det, (SINGULAR,)),
    # Without the sum everything is zero to second order, and errors have no scale.
    "det of rank n - 2": (lambda a: torch.det(a) + a.sum(), (DEEPLY_SINGULAR,)),
    "det of zero": (torch.det, (torch.zeros(2, 2, dtype=D),)),
    "eig": (lambda a: unsigned(LINALG.eig(a)[1]), (DISTINCT,)),
    "eig values": (lambda a: LINALG.eig(a)[0], (DISTINCT,)),
    "eigvals": (LINALG.eigvals, (DISTINCT,)),
    "eig complex": (lambda a, b: unsigned(LINALG.eig(joined(a, b))[1]), (DISTINCT[:2, :2], B)),
}


ALL = CASES | EAGER_CASES


WRONG = (
    "solve",
    "solve_ex",
    "tensorsolve",
    "det",
    "slogdet",
    "logdet",
    "triangular_solve",
    "cholesky_solve",
    "cholesky_inverse",
    *(["cholesky"] if HAS_CHOLESKY else []),
    "householder_product",
    "ormqr",
    "eigh",
    "eig",
    "det of rank n - 1",
)


# The first version of torch that is correct here; for determinants, only far from singular matrices
RIGHT_SINCE = dict.fromkeys(("solve", "solve_ex", "tensorsolve", "det", "slogdet", "logdet"), "2.15")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", WRONG)
def test_torch_alone_is_wrong(name):
    """Torch alone fails exactly in those versions in which the rule is needed."""
    f, inputs = ALL[name]
    fails = bool(FAILURES & set(route_statuses(f, inputs, 2)))
    assert fails == (name not in RIGHT_SINCE or torch.__version__ < RIGHT_SINCE[name])


@pytest.mark.parametrize("route", hodiff.ROUTES)
def test_determinant_hessian_matches_closed_form(route):
    """The mixed derivatives of a d - b c are 1 by a and d, and -1 by b and c."""
    expected = torch.tensor([0.0, 0, 0, 1, 0, 0, -1, 0, 0, -1, 0, 0, 1, 0, 0, 0], dtype=D).reshape(4, 4)
    for matrix in (A, torch.zeros(2, 2, dtype=D)):
        got = hodiff.hessian_matrix(torch.det, matrix, route=route)
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-15)

    def sarrus(a):
        diagonals = [a[0, i] * a[1, (i + 1) % 3] * a[2, (i + 2) % 3] for i in range(3)]
        others = [a[0, i] * a[1, (i + 2) % 3] * a[2, (i + 1) % 3] for i in range(3)]
        return sum(diagonals) - sum(others)

    def bordered(a):
        return torch.block_diag(a, torch.eye(2, dtype=D))

    expected = torch.func.hessian(sarrus)(SQUARE).reshape(9, 9)
    for f in (torch.det, lambda a: torch.det(bordered(a)), lambda a: LINALG.slogdet(bordered(a))[1].exp()):
        got = hodiff.hessian_matrix(f, SQUARE, route=route)
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("route", hodiff.ROUTES)
def test_solve_matches_cramers_rule(route):
    """Solutions agree with Cramer's rule for two unknowns, in a weighted sum."""

    def cramer(a):
        b, divisor = B[:, 0], a[0, 0] * a[1, 1] - a[0, 1] * a[1, 0]
        first, second = b[0] * a[1, 1] - b[1] * a[0, 1], b[1] * a[0, 0] - b[0] * a[1, 0]
        return (first + 3 * second) / divisor

    def solved(a):
        return LINALG.solve(a, B[:, 0]) @ torch.tensor([1.0, 3.0], dtype=D)

    expected = torch.func.hessian(cramer)(A).reshape(4, 4)
    torch.testing.assert_close(hodiff.hessian_matrix(solved, A, route=route), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("route", hodiff.ROUTES)
def test_eigenvalue_and_eigenvector_derivatives_match_perturbation_theory(route):
    """Perturbation theory: l_i'' = 2 sum_j E_ij^2 / (l_i - l_j), <v_i, v_i>'' = -sum_j (E_ij / (l_i - l_j))^2."""
    values, change = torch.tensor([1.0, 2.0, 4.0], dtype=D), DISTINCT + DISTINCT.mT
    gaps = (values[:, None] - values).fill_diagonal_(torch.inf)
    zero, one = torch.zeros((), dtype=D), torch.ones((), dtype=D)
    for i in range(3):
        got = hodiff.hvp(lambda t: eigh(torch.diag(values) + t * change)[0][i], zero, one, route=route)
        torch.testing.assert_close(got, 2 * (change[i] ** 2 / gaps[i]).sum(), rtol=1e-12, atol=0)
        own = hodiff.hvp(lambda t: eigh(torch.diag(values) + t * change)[1][i, i].abs(), zero, one, route=route)
        torch.testing.assert_close(own, -((change[i] / gaps[i]) ** 2).sum(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("single", [False, True], ids=["float64", "float32"])
@pytest.mark.parametrize("route", hodiff.ROUTES)
def test_matrix_exp_products_keep_all_digits_at_every_scale(route, single):
    """Products have all digits at every scale of loss and vector; the reference is a series in float64."""
    eps = torch.finfo(torch.float32 if single else D).eps
    weights, v = randn(3, 3), randn(3, 3)

    def series(a):
        total = term = torch.eye(3, dtype=D)
        for k in range(1, 60):
            term = term @ a / k
            total = total + term
        return (total * weights).sum()

    expected = hodiff.hvp(series, SQUARE, v)
    a, direction, w = (each.to(torch.float32 if single else D) for each in (SQUARE, v, weights))
    for scale, size in ((2.0**16, 1.0), (1e20, 1.0), (1e-20, 1.0), (1.0, 1e15), (1.0, 1e-15)):
        got = hodiff.hvp(lambda a: scale * (a.matrix_exp() * w).sum(), a, direction * size, route=route)
        error = ((got.double() / scale / size - expected).norm() / expected.norm()).item()
        assert error < 20 * eps, (scale, size)


@pytest.mark.parametrize("dtype", [torch.float32, D, torch.complex64, torch.complex128])
def test_values_and_dtypes_match_torch(dtype):
    a, b = (
        torch.randn(2, 5, 5, generator=GENERATOR, dtype=dtype),
        torch.randn(2, 5, 3, generator=GENERATOR, dtype=dtype),
    )
    spd = a @ a.mH + torch.eye(5)
    tolerance = {"rtol": 1e-3, "atol": 1e-3} if a.real.dtype is torch.float32 else {"rtol": 1e-11, "atol": 1e-11}
    for f in (
        lambda: LINALG.solve(a, b),
        lambda: LINALG.solve(A=a, B=b.mT, left=False),
        lambda: LINALG.solve(a, b, out=torch.empty_like(b)),
        lambda: LINALG.solve(a, b[..., 0]),
        lambda: LINALG.solve(a[:1], b),
        lambda: LINALG.solve(a[:, None], b),
        lambda: LINALG.solve_ex(a, b, check_errors=True),
        lambda: a.det(),
        lambda: torch.det(a[:, :3, :3]),
        lambda: torch.det(a[:, :0, :0]),
        lambda: torch.det(torch.zeros(6, 6, dtype=dtype)),
        lambda: a.slogdet(),
        lambda: torch.slogdet(torch.zeros(2, 2, dtype=dtype)),
        lambda: LINALG.slogdet(a),
        lambda: a.logdet(),
        lambda: torch.triangular_solve(b, spd),
        lambda: b.triangular_solve(spd, upper=False, transpose=True),
        *([lambda: torch.cholesky(spd, upper=True)] if HAS_CHOLESKY else []),
        lambda: torch.cholesky_solve(b, LINALG.cholesky(spd)),
        lambda: b.cholesky_solve(LINALG.cholesky(spd[0], upper=True), upper=True),
        lambda: torch.cholesky_solve(b, spd, out=torch.empty_like(b)),
        lambda: torch.cholesky_inverse(LINALG.cholesky(spd)),
        lambda: LINALG.cholesky(spd, upper=True).cholesky_inverse(upper=True),
        lambda: LINALG.householder_product(a[..., :4] / 4, b[..., 0, :]),
        lambda: torch.ormqr(a[..., :3] / 4, b[..., 0, :], b, transpose=True),
        lambda: a[..., :3].ormqr(b[..., 0, :], b.mT, left=False),
        lambda: LINALG.eigh(spd, UPLO="U"),
        lambda: torch.matrix_exp(input=a),
        lambda: LINALG.eig(a),
    ):
        same_value(f, **tolerance, equal_nan=True)
    assert LINALG.solve_ex(a, b).info.dtype == torch.int32


def test_float32_hessian_of_slogdet_is_as_precise_as_the_primal():
    """The Hessian of log|det| in float32 is accurate for a matrix of condition about 10."""
    a = regular(4, 4)
    exact = hodiff.hessian_matrix(lambda a: LINALG.slogdet(a)[1], a)
    got = hodiff.hessian_matrix(lambda a: LINALG.slogdet(a)[1], a.float())
    torch.testing.assert_close(got.double(), exact, rtol=0, atol=1e-5 * float(exact.abs().max()))


def test_repeated_eigenvalue_gives_nan_only_through_eigenvectors():
    identity = torch.eye(3, dtype=D)
    with hodiff.corrected():
        gradient = torch.func.grad(lambda a: eigh(a)[0].square().sum())(identity)
        with pytest.warns(hodiff.HodiffWarning, match="eigenvalues"):
            by_vectors = torch.func.grad(lambda a: unsigned(eigh(a)[1])[0, 1])(identity)
    assert not by_vectors.isfinite().all()
    torch.testing.assert_close(gradient, 2 * identity)


@pytest.mark.parametrize("values", [LINALG.eigvalsh, lambda a: LINALG.eig(a)[0].real], ids=["symmetric", "general"])
@pytest.mark.parametrize("route", hodiff.ROUTES)
def test_nearly_equal_eigenvalues_warn_in_second_derivatives(values, route):
    near, apart = (torch.diag(torch.tensor([1.0, 1.0 + gap, 3.0], dtype=D)) for gap in (1e-10, 1e-3))

    def energy(a):
        return (values(a) ** 1.3).sum()

    with pytest.warns(hodiff.HodiffWarning, match="eigenvalues: .* differ by less than 1.5e-08"):
        hodiff.hvp(energy, near, torch.ones_like(near), route=route)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hodiff.hvp(energy, apart, torch.ones_like(apart), route=route)


def test_equal_eigenvalues_have_right_first_derivatives_without_warning():
    identity = torch.eye(3, dtype=D)
    with hodiff.corrected(), warnings.catch_warnings():
        warnings.simplefilter("error")
        a = identity.clone().requires_grad_()
        (by_autograd,) = torch.autograd.grad(LINALG.eigvalsh(a).pow(2).sum(), a)
        by_grad = torch.func.grad(lambda a: LINALG.eigvalsh(a).pow(2).sum())(identity)
        along = torch.func.jvp(lambda a: LINALG.eigvalsh(a).pow(2).sum(), (identity,), (identity,))[1]
    assert torch.equal(by_autograd, 2 * identity)
    assert torch.equal(by_grad, 2 * identity)
    assert along == 6


@pytest.mark.parametrize("f", [LINALG.eigh, LINALG.eig])
def test_losses_that_depend_on_eigenvector_phases_are_rejected(f):
    matrix = torch.complex(A + A.mT, B - B.mT).requires_grad_()
    with hodiff.corrected(), pytest.raises(hodiff.RouteError, match="phases of complex eigenvectors"):
        f(matrix)[1].imag.sum().backward()


def test_rounding_at_large_gradients_is_not_taken_for_a_phase():
    matrix = torch.complex(A, B).requires_grad_()
    with hodiff.corrected():
        vectors = LINALG.eig(matrix)[1]
        (gradient,) = torch.autograd.grad(vectors.abs().square().mul(B).sum(), matrix, retain_graph=True)
        (scaled,) = torch.autograd.grad(vectors.abs().square().mul(B).sum() * 1e20, matrix)
    torch.testing.assert_close(scaled / 1e20, gradient)


BAD = {
    "solve a singular one": lambda a: LINALG.solve(torch.zeros_like(a), a),
    "solve_ex a singular one": lambda a: LINALG.solve_ex(torch.zeros_like(a), a, check_errors=True),
    "solve shapes": lambda a: LINALG.solve(a, a[:1]),
    "solve dtypes": lambda a: LINALG.solve(a, a.float()),
    "solve a row from the right": lambda a: LINALG.solve(a, a[0], left=False),
    "tensorsolve": lambda a: LINALG.tensorsolve(a, a[0, :1]),
    "det": lambda a: torch.det(a[:1]),
    "slogdet": lambda a: LINALG.slogdet(a[0]),
    "householder_product": lambda a: LINALG.householder_product(a[:1], a[0]),
    "ormqr": lambda a: torch.ormqr(a, a[0], a[:1]),
    "cholesky_solve": lambda a: torch.cholesky_solve(a[:1], a),
    "cholesky_solve dtypes": lambda a: torch.cholesky_solve(a, a.float()),
    "eigh": lambda a: LINALG.eigh(a, "X"),
    "matrix_exp": lambda a: torch.matrix_exp(a[:1]),
    "cholesky": lambda a: torch.cholesky(-a @ a.mT),
}


def test_table_lists_the_corrections():
    rows = {row.name: row for row in table()}
    assert {"torch.linalg.solve", "torch.linalg.det", "torch.slogdet", "torch.linalg.eigh"} <= set(rows)
    assert rows["torch.ormqr"].kind == "missing"
    # Broadcasting solves in a vmap and determinants of singular matrices need hodiff's rules in every version.
    mended = {name for name, row in rows.items() if row.mended}
    assert {name for name in mended if ".linalg." in name} == {"torch.linalg.tensorsolve", "torch.linalg.slogdet"}
    assert mended >= {"torch.slogdet", "torch.logdet"}


@pytest.mark.parametrize("stride", [1, 3, 9])
def test_factors_with_single_element_dimensions_may_have_any_stride(stride):
    matrices, right = regular(2, 1, 1, 3, 3), randn(2, 1, 1, 3, 2)
    pair, pivots, _ = LINALG.lu_factor_ex(matrices)
    pair = pair.as_strided(pair.shape, (9, stride, stride, 1, 3), 0)
    found = FactoredSolve.call(matrices, right, pair, pivots, False)
    torch.testing.assert_close(matrices @ found, right)


def test_eig_directions_broadcast_through_a_batch_of_one():
    """Slopes agree with projections on eigenvectors, which are exact to first order."""
    matrix, directions = regular(1, 1, 4, 4), randn(3, 1, 1, 4, 4)
    values, vectors = LINALG.eig(matrix)
    exact = LINALG.solve(vectors, directions.to(vectors.dtype) @ vectors).diagonal(dim1=-2, dim2=-1)

    zero, one = torch.zeros((), dtype=D), torch.ones((), dtype=D)

    def derivative(direction):
        with hodiff.corrected():
            return torch.func.jvp(lambda t: LINALG.eigvals(matrix + t * direction), (zero,), (one,))

    found, slopes = torch.func.vmap(derivative)(directions)
    torch.testing.assert_close(found, values.expand(3, 1, 1, 4))
    torch.testing.assert_close(slopes, exact)


@pytest.mark.parametrize("route", hodiff.ROUTES)
@pytest.mark.parametrize("driver", ["gelsd", "gelss"])
def test_lstsq_singular_values_are_differentiated(driver, route):
    a, b, v = randn(4, 3), randn(4, 2), randn(4, 3)

    def f(a):
        return LINALG.lstsq(a, b, driver=driver).singular_values.pow(3).sum()

    def by_eigenvalues(a):
        return LINALG.eigvalsh(a.mT @ a).pow(1.5).sum()

    torch.testing.assert_close(hodiff.hvp(f, a, v, route=route), hodiff.hvp(by_eigenvalues, a, v))
    torch.testing.assert_close(
        hodiff.directional_derivatives(f, a, v, order=1), hodiff.directional_derivatives(by_eigenvalues, a, v, order=1)
    )


OF_SYMMETRIC = {
    "eigvalsh": LINALG.eigvalsh,
    "eigh": lambda a: unsigned(eigh(a, UPLO="U")[1]),
    "cholesky": LINALG.cholesky,
    "cholesky upper": lambda a: LINALG.cholesky(a, upper=True),
    "cholesky_ex": lambda a: LINALG.cholesky_ex(a).L,
    "pinv": lambda a: LINALG.pinv(a, hermitian=True),
}
UNSYMMETRIC = randn(3, 3)


@pytest.mark.parametrize("complex_too", [False, True], ids=["real", "complex"])
@pytest.mark.parametrize("name", OF_SYMMETRIC)
def test_unsymmetric_tangents_count_as_their_hermitian_part(name, complex_too):
    """Torch reads one triangle; its forward mode, for a tangent in one triangle, is no transpose of reverse mode."""
    a, v = positive(DISTINCT), UNSYMMETRIC
    if complex_too:
        a, v = a + 0.3j * (SQUARE - SQUARE.mT), v + 1j * BATCH[0]

    def f(a):
        return (OF_SYMMETRIC[name](a).abs().square().cumsum(0) * BATCH[1][0]).sin().sum()

    def along(a):
        gradient = torch.func.grad(f)(a)
        return (gradient + gradient.mH) / 2

    step = 1e-5 * (v + v.mH) / 2
    want = (along(a + step) - along(a - step)) / 2e-5
    for route in hodiff.ROUTES:
        torch.testing.assert_close(hodiff.hvp(f, a, v, route=route), want, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("number", [1e20, torch.inf, torch.nan])
def test_the_triangle_that_is_not_read_may_hold_anything(number):
    matrix = positive(DISTINCT)
    other = matrix.tril() + torch.full_like(matrix, number).triu(1)
    for f in (LINALG.cholesky, lambda a: LINALG.pinv(a, hermitian=True)):
        found, expected = (torch.func.jvp(hodiff.corrected(f), (a,), (UNSYMMETRIC,)) for a in (other, matrix))
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("route", hodiff.ROUTES)
def test_derivatives_of_pinv_read_the_triangle_that_the_value_reads(route):
    def f(a):
        return (LINALG.pinv(a, hermitian=True) * SQUARE).sin().sum()

    a, v = positive(DISTINCT), UNSYMMETRIC + UNSYMMETRIC.mT
    found = hodiff.hvp(f, a + UNSYMMETRIC.triu(1), v, route=route)
    torch.testing.assert_close(found, hodiff.hvp(f, a, v))


@pytest.mark.slow
@pytest.mark.parametrize("upper", [False, True])
def test_compiled_factors_read_one_triangle(upper):
    matrix = positive(DISTINCT) + UNSYMMETRIC.tril(-1) if upper else positive(DISTINCT) + UNSYMMETRIC.triu(1)
    for f in (lambda a: LINALG.eigvalsh(a, UPLO="LU"[upper]), lambda a: LINALG.cholesky(a, upper=upper)):
        torch.compiler.reset()
        compiled = torch.compile(hodiff.corrected(f), backend="aot_eager")
        torch.testing.assert_close(compiled(matrix.clone().requires_grad_()).detach(), f(matrix))


@pytest.mark.parametrize("route", hodiff.ROUTES)
def test_cholesky_ex_failure_affects_only_its_own_matrix(route):
    good, bad = positive(randn(3, 3)), -positive(randn(3, 3))
    pair, v = torch.stack([good, bad]), randn(2, 3, 3)

    def of_factors(A):
        return LINALG.cholesky_ex(A).L.pow(3).sum((-2, -1))

    product = hodiff.hvp(lambda A: of_factors(A).sum(), pair, v, route=route)
    assert product[1].isnan().any()
    if "reverse" in route:  # in forward mode alone, each number depends on both matrices
        alone = hodiff.hvp(lambda A: LINALG.cholesky(A).pow(3).sum(), good, v[0], route=route)
        torch.testing.assert_close(product[0], alone)
    with hodiff.corrected():
        first = torch.func.jacrev(of_factors)(pair)
        torch.testing.assert_close(of_factors(pair), torch.stack([of_factors(each) for each in pair]))
        infinite = torch.tensor([[torch.inf, 0.0], [0.0, -1.0]], dtype=D, requires_grad=True)
        torch.testing.assert_close(
            LINALG.cholesky_ex(infinite).L, LINALG.cholesky_ex(infinite.detach()).L, equal_nan=True
        )
    assert first[0, 0].isfinite().all()
    assert first[1, 1].isnan().any()


@pytest.mark.parametrize("call", [torch.corrcoef, torch.Tensor.corrcoef])
def test_clipped_correlations_have_the_derivatives_of_the_quotient(call):
    # Proportional rows, of which rounding makes a correlation above 1.
    x = torch.tensor([[-3.6, -0.1, -2.7], [-3.3, 0.2, -2.4]], dtype=torch.float64)

    def quotient(x):
        centered = x - x.mean(1, keepdim=True)
        return (centered[0] * centered[1]).sum() / (centered[0].norm() * centered[1].norm())

    expected = hodiff.hessian(quotient)(x)
    assert expected.abs().max() > 0.01
    for route in hodiff.ROUTES:
        found = hodiff.hessian(lambda x: call(x)[0, 1], route=route)(x)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)
    with hodiff.corrected():
        x.requires_grad_()
        assert torch.equal(call(x), call(x.detach()))
        for each in (x[0], x[:1], torch.complex(x, x.flip(1))):
            torch.testing.assert_close(call(each), call(each.detach()), rtol=0, atol=0)


class TestContract(Contract):
    cases = ALL
    # One case of each function; the other cases differ in arguments.
    quick, one_in = WRONG[::2], 9
    # Dynamo raises on the reshaped result of tensorsolve in a gradient of a tangent.
    not_compiled = (*EAGER_CASES, "tensorsolve", "tensorsolve of some dims")
    errors, error_inputs = BAD, (A,)
