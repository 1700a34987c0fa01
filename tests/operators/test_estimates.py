"""Tests of estimators as methods: solutions and eigenvectors as pytrees, arrays and sparse matrices."""

import inspect
from typing import Any

import numpy as np
import pytest
import torch
from cases import ravel
from operators.cases import close
from scipy import sparse
from torch import Tensor

import hodiff
from hodiff import InputError, estimators
from hodiff.operators import DiagonalOperator, MatrixOperator
from hodiff.operators.linear.estimates import Estimates

GENERATOR = torch.Generator().manual_seed(0)
ROOT = torch.randn(7, 7, generator=GENERATOR, dtype=torch.float64)
M = ROOT @ ROOT.T + torch.eye(7).double()
X = {"w": torch.ones(2, 3).double(), "b": torch.zeros(()).double()}
B = {"w": torch.arange(6.0).double().reshape(2, 3), "b": torch.tensor(-1.0).double()}


def quadratic(x: dict[str, Tensor]) -> Tensor:
    flat = torch.cat([x["w"].reshape(-1), x["b"].reshape(-1)])
    return flat @ M @ flat / 2


A = hodiff.HessianOperator(quadratic, X)
METHODS = [name for name, value in vars(Estimates).items() if inspect.isfunction(value) and name[0] != "_"]


@pytest.mark.parametrize("name", METHODS)
def test_methods_match_functions_and_dense_matrix(name: str) -> None:
    """Methods have the signatures of the functions, and their results match the dense matrix."""
    method, function = getattr(A, name), getattr(estimators, name)
    positional = {"solve": (torch.ones(7).double(),), "eigsh": (2,)}.get(name, ())
    result = method(*positional)
    assert type(result) is type(function(A, *positional))
    dense = M.double()
    expected: dict[str, Any] = {
        "trace": dense.trace(),
        "diagonal": dense.diagonal(),
        "logdet": torch.logdet(dense),
        "eigsh": torch.linalg.eigvalsh(dense)[-2:],
        "solve": torch.linalg.solve(dense, torch.ones(7).double()),
    }
    close(torch.as_tensor(result.value).double(), expected[name], 1e-6)
    (_, *shown), (_, *taken) = (
        inspect.signature(vars(Estimates)[name]).parameters,
        inspect.signature(function).parameters,
    )
    assert shown == [*taken, *{"diagonal": ["exact"]}.get(name, [])]


def test_methods_forward_options() -> None:
    assert A.trace(method="hutchinson", products=3).method == "hutchinson"
    assert A.eigsh(1, which="SA", method="dense").method == "dense"
    close(torch.tensor(A.logdet(damping=2.0).value), torch.logdet(M + 2 * torch.eye(7)).float(), 1e-6)
    close(
        A.solve(torch.ones(7).double(), damping=1.0, method="dense").value,
        torch.linalg.solve(M + torch.eye(7), torch.ones(7).double()),
    )
    with pytest.raises(TypeError, match="unexpected keyword argument 'metod'"):
        A.trace(metod="hutchinson")
    # An operator with a known diagonal has the method, too.
    close(DiagonalOperator(torch.tensor([1.0, 2.0])).diagonal().value, torch.tensor([1.0, 2.0]))


@pytest.mark.parametrize("method", ["cg", "minres", "gmres", "lsmr", "dense"])
def test_solve_accepts_pytrees(method: str) -> None:
    expected = torch.linalg.solve(M, ravel(B))
    solution = A.solve(B, method=method, tol=1e-10)
    assert solution.value["w"].shape == (2, 3)
    assert solution.value["b"].shape == ()
    close(ravel(solution.value), expected, 1e-7)
    assert solution.residual.shape == ()
    product = A @ solution.value
    close(product["w"], B["w"], 1e-7)
    if method != "dense":
        again = estimators.solve(A, B, method=method, x0=solution.value)
        assert again.iterations <= 1


def test_solve_accepts_single_leaves_and_other_spaces() -> None:
    """A leaf (2, 3) is one right-hand side; rectangular operators accept right-hand sides like their outputs."""
    D = DiagonalOperator(torch.arange(1.0, 7.0).reshape(2, 3))
    close(D.solve(torch.ones(2, 3)).value, 1 / torch.arange(1.0, 7.0).reshape(2, 3), 1e-3)
    assert D.solve(torch.ones(6, 2)).value.shape == (6, 2)
    J = hodiff.JacobianOperator(
        lambda x: {"y": torch.stack([x["a"].sum(), 2 * x["b"], x["b"]])}, {"a": torch.ones(1), "b": torch.ones(())}
    )
    solution = J.solve({"y": torch.tensor([3.0, 4.0, 2.0])}, method="lsmr")
    close(solution.value["a"], torch.tensor([3.0]), 1e-3)
    close(solution.value["b"], torch.tensor(2.0), 1e-3)
    with pytest.raises(InputError, match="solve: b: v does not have the structure"):
        A.solve({"w": torch.ones(2, 3)})
    with pytest.raises(InputError, match="solve: b: expected finite"):
        A.solve({"w": torch.full((2, 3), torch.nan).double(), "b": torch.ones(()).double()})


def test_eigenvectors_convert_to_pytrees() -> None:
    pairs = A.eigsh(2)
    trees = A.to_tree(pairs.eigenvectors)
    for value, tree in zip(pairs.eigenvalues, trees, strict=True):
        close((A @ tree)["w"], value * tree["w"], 1e-8)
    close(A.to_tree(pairs.eigenvectors[:, 0])["b"], trees[0]["b"], 0)
    warm = estimators.sharpness(A, start=trees[-1])
    assert warm.value == pytest.approx(pairs.eigenvalues[-1].item())
    for wrong in (torch.ones(6), torch.ones(7, 1, 1), X):
        with pytest.raises(InputError, match="to_tree: vectors: expected"):
            A.to_tree(wrong)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, ">f8"])
def test_numpy_arrays_give_numpy_arrays(dtype: Any) -> None:
    block = np.arange(14.0).reshape(7, 2).astype(dtype)
    twice = A + A
    for operator in (A, A.T, twice, MatrixOperator(M)):
        matrix = M.numpy() * (2 if operator is twice else 1)
        product = operator @ block
        assert isinstance(product, np.ndarray)
        assert product.dtype == np.float64
        np.testing.assert_allclose(product, matrix @ block.astype(float), rtol=1e-6)
        np.testing.assert_allclose(operator @ block[::-1, 0], matrix @ block[::-1, 0].astype(float), rtol=1e-6)


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_rejects_objects_that_are_no_vectors() -> None:
    for wrong, message in (
        (np.arange(7), "got dtype int64; convert it"),
        (np.ones(7, complex), "got dtype complex128"),
        (np.ones(6), r"expected a floating-point tensor \(7,\)"),
        (torch.eye(7).double().to_sparse_csr(), r"pass v.to_dense\(\)"),
        (torch.eye(7).double().to_sparse(), r"pass v.to_dense\(\)"),
        (sparse.eye_array(7), "v does not have the structure"),
    ):
        with pytest.raises(InputError, match=message):
            A @ wrong
    factor = torch.tensor(2.0).double().requires_grad_()
    with pytest.raises(InputError, match=r"differentiable .* pass torch.from_numpy"):
        (factor * A) @ np.ones(7)
    with pytest.raises(InputError, match="differentiable"):
        torch.func.grad(lambda c: torch.from_numpy((c * A) @ np.ones(7)).sum())(factor.detach())


@pytest.mark.parametrize("make", [np.asarray, sparse.csr_array, sparse.csc_matrix, sparse.coo_array])
def test_matrix_operator_accepts_numpy_and_scipy(make: Any) -> None:
    matrix = np.triu(ROOT.numpy())[:, :5].copy()
    operator = MatrixOperator(make(matrix))
    vector = torch.linspace(-1, 1, 5).double()
    close(operator @ vector, torch.from_numpy(matrix) @ vector)
    close(operator.T @ torch.ones(7).double(), torch.from_numpy(matrix).T @ torch.ones(7).double())
    close(operator.to_dense(), torch.from_numpy(matrix))
    with pytest.raises(InputError, match="MatrixOperator: matrix: expected"):
        MatrixOperator(make(matrix.astype(int)))
