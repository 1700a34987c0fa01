"""Every kind of operator gives the same results, products are counted, and other objects are refused."""

import numpy as np
import pytest
import torch
from estimators.matrices import KINDS, MatrixOperator, Wrapped, decaying, symmetric
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse.linalg import LinearOperator

from hodiff import InputError
from hodiff.estimators import (
    condition_number,
    diagonal,
    effective_dimension,
    eigsh,
    frobenius_norm,
    jacobi_preconditioner,
    logdet,
    nystrom_preconditioner,
    schatten_norm,
    sharpness,
    solve,
    spectral_density,
    trace,
    trace_of,
)

B = torch.ones(40, dtype=torch.float64)
# To test another estimator, add a line here.
EACH = {
    "trace": lambda A: trace(A, products=12),
    "trace, xtrace": lambda A: trace(A, products=12, method="xtrace"),
    "diagonal": lambda A: diagonal(A, products=12),
    "frobenius_norm": lambda A: frobenius_norm(A, products=12),
    "eigsh": lambda A: eigsh(A, 2),
    "spectral_density": lambda A: spectral_density(A, samples=2, steps=5),
    "logdet": lambda A: logdet(A, damping=0.1, samples=2, steps=15),
    "effective_dimension": lambda A: effective_dimension(A, 0.1, samples=2, steps=15),
    "schatten_norm": lambda A: schatten_norm(A, samples=2, steps=15),
    "trace_of": lambda A: trace_of(A, torch.cos, samples=2, steps=15),
    "solve": lambda A: solve(A, B[: A.shape[0]], damping=0.1),
    "solve, minres": lambda A: solve(A, B[: A.shape[0]], damping=0.1, method="minres"),
    "condition_number": lambda A: condition_number(A, damping=0.1),
    "sharpness": lambda A: sharpness(A),
    "jacobi_preconditioner": lambda A: jacobi_preconditioner(A, products=12),
    "nystrom_preconditioner": lambda A: nystrom_preconditioner(A, 5, 0.1),
}
RECTANGULAR = {"frobenius_norm"}
MATRIX = symmetric(decaying(40))


def numbers(result):
    """Return an estimator's result as a tensor; a preconditioner's result is its product with B."""
    if isinstance(result, torch.Tensor):
        return result
    if callable(result):
        return result(B)
    return torch.as_tensor(
        next(getattr(result, name) for name in ("value", "eigenvalues", "mean") if hasattr(result, name))
    )


# torch warns when a process makes its first compressed matrix.
@pytest.mark.one_in(2)
@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "tensor"])
def test_every_kind_of_operator_gives_equal_results(name, kind):
    expected, got = numbers(EACH[name](MATRIX)), numbers(EACH[name](KINDS[kind](MATRIX)))
    assert not got.requires_grad
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", EACH)
def test_products_are_counted(name):
    A = Wrapped(MATRIX)
    result = EACH[name](A)
    assert A.products > 0
    # A diagonal is a plain tensor.
    assert isinstance(result, torch.Tensor) or result.products == A.products


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("wrap", [lambda matrix: matrix, Wrapped])
def test_low_precision_operators_match_float64(dtype, wrap):
    A = wrap(MATRIX.to(dtype))
    # The tolerance covers rounding of the matrix, and of products that the operator computes in its own dtype.
    rounded = MATRIX.to(dtype).double()
    tolerance = 30 * torch.finfo(dtype).eps
    assert trace(A, method="exact").value == pytest.approx(rounded.trace().item(), rel=tolerance)
    assert sharpness(A, tol=max(1e-3, 6 * torch.finfo(dtype).eps)).value == pytest.approx(1, rel=tolerance)
    top = eigsh(A, 1).eigenvalues
    assert top.dtype == torch.float32
    assert top.item() == pytest.approx(1, rel=tolerance)
    solution = solve(A, torch.ones(40), damping=1.0, tol=max(1e-6, 3 * torch.finfo(dtype).eps))
    assert solution.value.dtype == torch.float32
    exact = torch.linalg.solve(MATRIX + torch.eye(40, dtype=torch.float64), B)
    torch.testing.assert_close(solution.value.double(), exact, rtol=0, atol=tolerance)
    assert spectral_density(A, samples=3, steps=10).mean == pytest.approx(
        spectral_density(MATRIX, samples=3, steps=10).mean, rel=tolerance
    )
    assert trace(A, products=20).value == pytest.approx(trace(MATRIX, products=20).value, rel=tolerance)


def test_integer_matrices_are_converted_to_floating_point():
    assert trace(np.array([[1, 2], [3, 4]])).value == 5
    assert trace(torch.tensor([[1, 2], [3, 4]])).value == 5
    operator = LinearOperator((3, 3), matvec=lambda v: 0.5 * v)
    assert trace(operator).value == 1.5


def test_chunk_size_does_not_change_results():
    for method in ("hutch++", "xtrace", "exact"):
        values = [trace(MATRIX, method=method, products=12, chunk_size=size).value for size in (1, 5, None, "auto")]
        assert values == pytest.approx([values[0]] * 4, rel=1e-12)
    blocks = []

    class Watched(Wrapped):
        def __matmul__(self, v):
            blocks.append(v.shape[1])
            return super().__matmul__(v)

    trace(Watched(MATRIX), products=12, chunk_size=3)
    assert set(blocks) == {2}  # each third of the 12 products runs in two groups


def test_default_generator_is_seeded_and_global_state_unchanged():
    before = torch.get_rng_state()
    assert trace(MATRIX, products=12) == trace(MATRIX, products=12)
    other = trace(MATRIX, products=12, generator=torch.Generator().manual_seed(1))
    assert other.value != trace(MATRIX, products=12).value
    assert torch.equal(before, torch.get_rng_state())


@given(n=st.integers(1, 7), seed=st.integers(0, 100))
def test_small_sizes_match(n, seed):
    values = torch.rand(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.5
    A = symmetric(values, seed)
    assert trace(A).value == pytest.approx(values.sum().item())
    torch.testing.assert_close(diagonal(A).value, A.diagonal())
    assert frobenius_norm(A).value == pytest.approx(A.norm().item())
    torch.testing.assert_close(eigsh(A, n).eigenvalues, values.sort().values)
    assert logdet(A).value == pytest.approx(values.log().sum().item())
    assert spectral_density(A, samples=2).mean == pytest.approx(values.mean().item(), rel=1)
    assert sharpness(A, tol=1e-9).value == pytest.approx(values.max().item())
    assert condition_number(A).value == pytest.approx((values.max() / values.min()).item())
    b = torch.ones(n, dtype=torch.float64)
    for method in ("cg", "minres", "gmres", "lsmr", "dense", "neumann"):
        x = solve(A, b, method=method, tol=1e-9).value
        torch.testing.assert_close(x, torch.linalg.solve(A, b), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("A", "message"),
    [
        (torch.ones(0, 0), r"trace: A: expected a matrix with rows and columns, got shape \(0, 0\)"),
        (torch.ones(3), r"trace: A: expected a matrix .* got shape \(3,\)"),
        (torch.ones(2, 3), r"trace: A: expected a square operator, got shape \(2, 3\)"),
        (torch.ones(2, 2, dtype=torch.complex64), "trace: A: expected a real operator, got dtype torch.complex64"),
        (np.ones((2, 2), dtype=object), "trace: A: expected a real operator, got dtype object"),
        (lambda v: v, "trace: A: expected a matrix, a SciPy LinearOperator or an object"),
        (torch.full((2, 2), torch.nan), "trace: A: expected finite products, got inf or nan"),
    ],
)
def test_rejects_objects_that_are_no_operators(A, message):
    with pytest.raises(InputError, match=message):
        trace(A)


def test_rejects_products_of_the_wrong_shape():
    class Transposing(Wrapped):
        def __matmul__(self, v):
            return super().__matmul__(v).T

    with pytest.raises(InputError, match=r"trace: A: expected a product of shape \(40, 40\)|\(40, \d+\)"):
        trace(Transposing(MATRIX), products=12)


@pytest.mark.parametrize("name", [name for name in EACH if name not in RECTANGULAR])
def test_rejects_rectangular_operators(name):
    with pytest.raises(InputError, match=r"A: expected a square operator, got shape \(3, 2\)"):
        EACH[name](torch.ones(3, 2))


@pytest.mark.parametrize("chunk_size", [0, "all", 1.5])
def test_rejects_bad_chunk_size(chunk_size):
    with pytest.raises(InputError, match="trace: chunk_size: expected a positive int"):
        trace(MATRIX, chunk_size=chunk_size)


def test_progress_writes_to_stderr(capsys):
    trace(MATRIX, products=12, progress=True)
    assert "12/12" in capsys.readouterr().err


# Unit vectors do not tell the size of an operator, and their products are not squared.
BY_UNITS = {"condition_number", "frobenius_norm"}


@pytest.mark.parametrize(
    ("name", "size"), [(name, 1e200) for name in EACH] + [(n, 1e-200) for n in EACH if n not in BY_UNITS]
)
def test_rejects_operators_whose_squares_are_no_numbers(name, size):
    """Lanczos found eigenvalues of half their size, and Hutch++ a trace of zero."""
    with pytest.raises(InputError, match=r"A: expected products between 1e-140 and 1e\+140"):
        EACH[name](MatrixOperator(size * MATRIX))


def test_tiny_columns_of_a_moderate_operator():
    found = diagonal(torch.diag(torch.tensor([1.0, 1e-200], dtype=torch.float64)), method="exact")
    assert found.value.tolist() == [1.0, 1e-200]
