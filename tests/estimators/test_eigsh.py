"""Eigenpairs at either end of the spectrum against NumPy, and errors and warnings if they cannot be resolved."""

import warnings

import numpy as np
import pytest
import torch
from estimators.matrices import Wrapped, decaying, linspace_spectrum, symmetric

from hodiff import HodiffWarning, InputError
from hodiff.estimators import ConvergenceError, condition_number, eigsh, sharpness
from hodiff.operators import MatrixOperator

N = 120
SPECTRA = {
    "indefinite": linspace_spectrum(N, -0.705, 1),
    "decaying": decaying(N),
    "negative": -decaying(N),
    "outliers": torch.cat([torch.tensor([-40.0, 30.0, 20.0]), linspace_spectrum(N - 3, -1, 1)]),
    "many zeros": torch.cat([torch.zeros(N - 20), linspace_spectrum(20)]),
}
OFFERED = [
    *[("arpack", which) for which in ("LM", "SM", "LA", "SA")],
    *[("lanczos", which) for which in ("LM", "LA", "SA")],
    *[("lobpcg", which) for which in ("LA", "SA")],
    *[("dense", which) for which in ("LM", "SM", "LA", "SA")],
]


def expected(A, k, which):
    values = np.linalg.eigvalsh(A.double().numpy())
    key = {"LM": -np.abs(values), "SM": np.abs(values), "LA": -values, "SA": values}[which]
    return torch.from_numpy(np.sort(values[np.argsort(key)[:k]]))


@pytest.mark.one_in(6)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize(("method", "which"), OFFERED)
def test_eigenvalues_match_numpy(method, which, spectrum, dtype):
    A = symmetric(SPECTRA[spectrum]).to(dtype)
    operator = Wrapped(A)
    if method in {"lanczos", "lobpcg"} and spectrum in {"decaying", "negative"} and which != "LM":
        # The default iteration limits suffice at the end of the spectrum where eigenvalues are far apart.
        far_apart = {"decaying": "LA", "negative": "SA"}[spectrum]
        which = far_apart
    pairs = eigsh(operator, 3, which=which, method=method, tol=None if dtype == torch.float64 else 1e-3)
    largest = SPECTRA[spectrum].abs().max()
    tolerance = 1e-7 if dtype == torch.float64 else 3e-3
    assert pairs.eigenvalues.dtype == pairs.eigenvectors.dtype == dtype
    torch.testing.assert_close(pairs.eigenvalues.double(), expected(A, 3, which), rtol=0, atol=tolerance * largest)
    gram = pairs.eigenvectors.T @ pairs.eigenvectors
    torch.testing.assert_close(gram, torch.eye(3, dtype=dtype), rtol=0, atol=100 * torch.finfo(dtype).eps * 3)
    residual = torch.linalg.vector_norm(A @ pairs.eigenvectors - pairs.eigenvectors * pairs.eigenvalues, dim=0)
    torch.testing.assert_close(pairs.residual, residual, rtol=1e-2, atol=1e-6 * float(largest))
    assert pairs.converged
    assert pairs.products == operator.products
    assert pairs.value is pairs.eigenvalues


def scattered(seed):
    """A matrix whose eigenvalues -1 and 1 are the same to float32's default tolerance."""
    return symmetric(torch.cat([-torch.ones(1), torch.linspace(1, 1e4, 199)]).double(), seed).float()


@pytest.mark.one_in(6)
@pytest.mark.parametrize("k", [1, 2, 6])
@pytest.mark.parametrize("method", ["arpack", "lanczos", "lobpcg", "dense"])
def test_small_eigenvalue_in_float32_is_right_or_unresolved(method, k):
    """An eigenvalue is right to 5% or not resolved: a mixture of -1 and 1 has a small residual, too."""
    for seed in range(4):
        A = scattered(seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", HodiffWarning)
            pairs = eigsh(A, k, which="SA", method=method, throw=False)
        exact = expected(A, k, "SA")
        right = (pairs.eigenvalues.double() - exact).abs() <= 0.05 * exact.abs()
        assert pairs.resolved.shape == (k,)
        assert bool((right | ~pairs.resolved).all())
        # SciPy's LOBPCG sometimes fails in float32.
        assert method == "lobpcg" or (pairs.converged and bool(pairs.resolved.all()))


def test_eigenvalues_below_the_tolerance_are_unresolved():
    A = scattered(0)
    loose = eigsh(A, 2, which="SA", tol=1e-3)
    assert loose.converged
    assert not bool(loose.resolved.all())
    singular = eigsh(symmetric(torch.cat([torch.zeros(40), linspace_spectrum(60)])), 2, which="SA")
    assert singular.converged
    assert not bool(singular.resolved.any())
    operator = Wrapped(symmetric(torch.cat([torch.zeros(40), linspace_spectrum(60)])).float())
    first = eigsh(operator, 2, which="SA", tol=1e-4).products
    assert eigsh(operator, 2, which="SA").products <= 3 * first


@pytest.mark.parametrize("method", ["arpack", "lanczos", "lobpcg"])
def test_repeated_eigenvalues_are_found(method):
    A = symmetric(torch.cat([torch.full((4,), 2.0), torch.ones(N - 4)]).double())
    pairs = eigsh(A, 3, which="LA", method=method)
    torch.testing.assert_close(pairs.eigenvalues, torch.full((3,), 2.0, dtype=torch.float64))
    A = torch.eye(N, dtype=torch.float64)
    pairs = eigsh(A, 3, which="SA", method=method)
    torch.testing.assert_close(pairs.eigenvalues, torch.ones(3, dtype=torch.float64))


@pytest.mark.parametrize("method", ["arpack", "lanczos", "lobpcg", "dense"])
def test_zero_operator_has_zero_eigenvalues(method):
    pairs = eigsh(torch.zeros(N, N), 2, which="LA", method=method)
    assert pairs.eigenvalues.tolist() == [0, 0]
    assert pairs.converged


@pytest.mark.parametrize("k", [59, 60, 119, 120])
@pytest.mark.parametrize("method", ["arpack", "lanczos", "lobpcg"])
def test_dense_method_computes_most_eigenvalues(method, k):
    A = symmetric(SPECTRA["indefinite"])
    pairs = eigsh(A, k, which="SA", method=method)
    torch.testing.assert_close(pairs.eigenvalues, SPECTRA["indefinite"][:k], rtol=0, atol=1e-8)
    assert k < 60 or pairs.method == "dense"


@pytest.mark.slow
def test_smallest_magnitude_eigenvalues_of_a_large_operator():
    n = 1200
    values = torch.cat([torch.tensor([0.0, 0.01]), linspace_spectrum(n - 2, 0.5, 1)])
    for sign in (1, -1):
        operator = Wrapped(torch.diag(sign * values))
        pairs = eigsh(operator, 2, which="SM")
        torch.testing.assert_close(pairs.eigenvalues, (sign * values[:2]).sort().values, rtol=0, atol=1e-8)
        assert operator.products < n
    with pytest.raises(InputError, match="eigsh: which: 'SM' needs a factorization if eigenvalues have both signs"):
        eigsh(torch.diag(values - 0.7), 2, which="SM")


@pytest.mark.parametrize("method", ["arpack", "lanczos", "lobpcg"])
def test_warm_start_takes_fewer_products(method):
    A = symmetric(linspace_spectrum(400))
    cold = eigsh(A, 2, which="LA", method=method, tol=1e-6)
    start = cold.eigenvectors if method == "lobpcg" else cold.eigenvectors.sum(1)
    warm = eigsh(1.001 * A, 2, which="LA", method=method, start=start, tol=1e-6)
    assert warm.converged
    torch.testing.assert_close(warm.eigenvalues, 1.001 * linspace_spectrum(400)[-2:])
    assert warm.products < cold.products / 2


@pytest.mark.parametrize("method", ["arpack", "lanczos", "lobpcg"])
@pytest.mark.parametrize("others", [[149], [1], [9, 19, 29], list(range(2, 150, 5))])
def test_start_within_the_span_of_other_eigenvectors_is_left(method, others):
    A = torch.diag(torch.arange(1.0, 151.0, dtype=torch.float64))
    start = torch.zeros(150, dtype=torch.float64)
    start[others] = 1.0
    options = {"restart": 20} if method == "lanczos" else {}
    found = eigsh(A, 1, which="SA", method=method, start=start, tol=1e-7, **options)
    assert found.eigenvalues.item() == pytest.approx(1.0, abs=1e-6)


def test_start_is_left_also_with_few_vectors_and_iterations():
    A = torch.diag(torch.arange(1.0, 151.0, dtype=torch.float64))
    options = {"which": "SA", "method": "lanczos", "tol": 1e-4}
    found = eigsh(A, 1, **options, start=A[149], restart=4, max_iterations=400)
    assert found.eigenvalues.item() == pytest.approx(1.0, abs=1e-3)
    with pytest.raises(ConvergenceError, match="in 20 iterations"):
        eigsh(A, 1, **options, start=A[149], max_iterations=1)
    assert eigsh(A, 1, **options, start=A[0]).eigenvalues.item() == pytest.approx(1.0)


@pytest.mark.parametrize(("method", "iterations"), [("arpack", 1), ("lanczos", 5), ("lobpcg", 2)])
def test_unconverged_eigsh_raises_with_its_result(method, iterations):
    A = symmetric(linspace_spectrum(400, -1))
    with pytest.raises(ConvergenceError, match=rf"eigsh: {method} found \d of 4 eigenvalues .* residuals:") as caught:
        eigsh(A, 4, which="LA", method=method, max_iterations=iterations)
    assert not caught.value.result.converged
    with pytest.warns(HodiffWarning, match=f"eigsh: {method} found") as record:
        result = eigsh(A, 4, which="LA", method=method, max_iterations=iterations, throw=False)
    assert record[0].filename == __file__
    assert not result.converged
    assert result.products > 0


@pytest.mark.one_in(2)
@pytest.mark.parametrize("method", ["arpack", "lanczos", "lobpcg", "dense"])
def test_rejects_asymmetric_operator(method):
    skewed = symmetric(decaying(N)) + torch.triu(torch.ones(N, N), 1) / 10
    with pytest.raises((InputError, ConvergenceError), match="symmetric"):
        eigsh(skewed, 3, which="LA", method=method)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 0}, "eigsh: k: expected an int of 1 or more, got 0"),
        ({"k": 31}, "eigsh: k: expected at most n = 30 eigenvalues, got 31"),
        ({"which": "BE"}, "eigsh: which: expected one of"),
        ({"method": "power"}, "eigsh: method: expected one of"),
        ({"method": "lanczos", "which": "SM"}, "eigsh: which: method='lanczos' does not offer 'SM'"),
        ({"method": "lobpcg", "which": "LM"}, "eigsh: which: method='lobpcg' does not offer 'LM'"),
        ({"tol": -1.0}, "eigsh: tol: expected a nonnegative finite number"),
        ({"max_iterations": 0}, "eigsh: max_iterations: expected an int of 1"),
        ({"start": torch.ones(29)}, r"eigsh: start: expected a floating-point tensor \(30,\), got \(29,\)"),
        ({"start": torch.ones(30, 2)}, "eigsh: start: expected a floating-point tensor"),
        ({"start": np.ones(30)}, "eigsh: start: expected a floating-point tensor"),
        ({"start": torch.zeros(30)}, "eigsh: start: expected finite columns that are not zero"),
        ({"start": torch.ones(30, 5), "method": "lobpcg", "which": "LA", "k": 3}, r"start: expected .* \(30, 3\)"),
    ],
)
def test_eigsh_rejects_bad_arguments(options, message):
    with pytest.raises(InputError, match=message):
        eigsh(torch.eye(30), **options)


@pytest.mark.parametrize("method", ["lanczos", "power"])
@pytest.mark.parametrize("spectrum", ["indefinite", "decaying", "negative", "outliers"])
def test_sharpness_matches_largest_eigenvalue(spectrum, method):
    A = symmetric(SPECTRA[spectrum])
    result = sharpness(A, method=method, max_iterations=3000)
    assert result.converged
    largest = SPECTRA[spectrum].abs().max()
    assert abs(result.value - SPECTRA[spectrum].max()) < 3e-3 * largest
    residual = (A @ result.vector - result.value * result.vector).norm()
    assert result.residual == pytest.approx(residual.item(), rel=1e-6)
    assert result.vector.norm().item() == pytest.approx(1)
    assert result.products == result.iterations + 1


@pytest.mark.parametrize("method", ["lanczos", "power"])
def test_sharpness_with_warm_start_takes_fewer_iterations(method):
    A = symmetric(decaying(400))
    first = sharpness(A, method=method)
    again = sharpness(1.01 * A, method=method, start=first.vector)
    assert again.value == pytest.approx(1.01, rel=1e-4)
    assert again.iterations < first.iterations


def test_sharpness_leaves_a_start_that_is_no_longer_the_largest():
    values = torch.cat([torch.tensor([1.0, 1.2]), linspace_spectrum(1998, 0, 0.5)])
    start = torch.zeros(2000, dtype=torch.float64)
    start[0] = 1
    assert sharpness(torch.diag(values), start=start).value == pytest.approx(1.2, rel=1e-3)


@pytest.mark.parametrize("method", ["lanczos", "power"])
def test_unconverged_sharpness_raises_with_its_result(method):
    A = symmetric(linspace_spectrum(400, -1))
    with pytest.raises(ConvergenceError, match=f"sharpness: {method} reached max_iterations=3 with residual") as caught:
        sharpness(A, method=method, max_iterations=3)
    assert not caught.value.result.converged
    with pytest.warns(HodiffWarning, match="sharpness"):
        assert not sharpness(A, method=method, max_iterations=3, throw=False).converged


def test_sharpness_calls_the_callback_every_iteration():
    seen = []
    result = sharpness(symmetric(decaying(60)), callback=lambda iteration, value: seen.append((iteration, value)))
    assert [iteration for iteration, _ in seen] == list(range(1, result.iterations + 1))
    assert seen[-1][1] == result.value


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "arnoldi"}, "sharpness: method: expected one of"),
        ({"tol": 0.0}, "sharpness: tol: expected a positive"),
        ({"max_iterations": 0}, "sharpness: max_iterations: expected"),
        ({"start": torch.ones(3)}, "sharpness: start: expected"),
    ],
)
def test_sharpness_rejects_bad_arguments(options, message):
    with pytest.raises(InputError, match=message):
        sharpness(torch.eye(30), **options)


@pytest.mark.parametrize("sign", [1, -1])
def test_condition_number_by_lanczos_matches(sign):
    values = sign * torch.cat([torch.tensor([0.02]), linspace_spectrum(398, 0.1, 1), torch.tensor([4.0])])
    operator = Wrapped(torch.diag(values))
    result = condition_number(operator, max_iterations=200)
    assert (result.method, result.converged) == ("lanczos", True)
    assert result.value == pytest.approx(200, rel=2e-3)
    assert result.products == operator.products < 200
    assert (result.smallest, result.largest) == pytest.approx((sign * 0.02, sign * 4.0), rel=1e-3)
    damped = condition_number(Wrapped(torch.diag(values.abs())), damping=0.5, max_iterations=200)
    assert damped.value == pytest.approx(4.5 / 0.52, rel=2e-3)


def test_condition_number_tolerance_is_relative_to_the_smallest_eigenvalue():
    A = torch.diag(torch.cat([torch.tensor([0.02]), linspace_spectrum(398, 0.021, 1), torch.tensor([4.0])]))
    assert condition_number(A, max_iterations=350, tol=0.01).smallest == pytest.approx(0.02, rel=0.01)


def test_condition_number_of_indefinite_and_singular_operators_matches_numpy():
    A = symmetric(SPECTRA["indefinite"] + 1e-3)
    assert condition_number(A).value == pytest.approx(np.linalg.cond(A.numpy()), rel=1e-6)
    assert condition_number(A, damping=0.804).value == pytest.approx(1.805 / 0.1, rel=1e-6)
    assert condition_number(symmetric(SPECTRA["many zeros"])).value == np.inf
    with pytest.raises(InputError, match="condition_number: A: expected eigenvalues of one sign"):
        condition_number(A, max_iterations=30)


def test_unconverged_condition_number_raises_with_its_result():
    A = symmetric(torch.logspace(0, -6, N, dtype=torch.float64))
    with pytest.raises(
        ConvergenceError, match=r"condition_number: lanczos reached max_iterations=20: .* or more"
    ) as caught:
        condition_number(A, max_iterations=20)
    assert 10 < caught.value.result.value < 1e6
    with pytest.warns(HodiffWarning, match="condition_number"):
        condition_number(A, max_iterations=20, throw=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "svd"}, "condition_number: method: expected one of"),
        ({"damping": -1}, "condition_number: damping: expected a nonnegative"),
        ({"tol": 0}, "condition_number: tol: expected a positive"),
        ({"max_iterations": 0}, "condition_number: max_iterations: expected an int"),
    ],
)
def test_condition_number_rejects_bad_arguments(options, message):
    with pytest.raises(InputError, match=message):
        condition_number(torch.eye(30), **options)


@pytest.mark.parametrize("size", [1e-30, 1e-12, 1e30])
@pytest.mark.parametrize("which", ["LM", "LA", "SA"])
def test_eigenvalues_scale_with_the_operator(which, size):
    M = torch.randn(30, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    M = M + M.T
    expected = eigsh(MatrixOperator(M), 2, which=which).eigenvalues
    found = eigsh(MatrixOperator(size * M), 2, which=which).eigenvalues / size
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=0)


@pytest.mark.parametrize("method", ["arpack", "lobpcg", "lanczos"])
@pytest.mark.parametrize("size", [1e-25, 1e25])
def test_sizes_whose_squares_leave_the_range_of_float32(method, size):
    matrix = size * torch.diag(torch.arange(1.0, 101.0))
    found = eigsh(MatrixOperator(matrix), 2, which="LA", method=method).eigenvalues / size
    torch.testing.assert_close(found, torch.tensor([99.0, 100.0]), rtol=1e-4, atol=0)


@pytest.mark.parametrize("method", ["auto", "lanczos"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("k", [1, 3, 5])
def test_more_eigenvalues_than_the_rank(method, dtype, k):
    """Products in the complement of the range are rounding, which is not symmetric."""
    factor = torch.randn(60, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    matrix = (factor @ factor.T).to(dtype)
    matrix = (matrix + matrix.T) / 2
    found = eigsh(matrix, k, which="LA", method=method).eigenvalues
    expected = torch.linalg.eigvalsh(matrix.double())[-k:]
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4 if dtype == torch.float32 else 1e-9)
