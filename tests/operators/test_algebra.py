"""Tests of composed operators against the same expressions of dense matrices."""

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.sparse.linalg as spla
import torch
from cases import ravel
from hypothesis import given
from hypothesis import strategies as st
from operators.cases import close, problem
from torch import Tensor

import hodiff
from hodiff.operators import (
    DiagonalOperator,
    HessianOperator,
    IdentityOperator,
    JacobianOperator,
    LinearOperator,
    LowRankPlusDiagonalOperator,
    MatrixOperator,
    Space,
)

Pair = tuple[LinearOperator, Tensor]


def matrix(m: int, n: int, seed: int) -> Tensor:
    return torch.randn(m, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# Operators and their matrices from a random matrix (m, n); every entry here takes part in all expressions.
LEAVES: dict[str, Callable[[Tensor], Pair]] = {
    "matrix": lambda M: (MatrixOperator(M), M),
    "jacobian": lambda M: (JacobianOperator(lambda x: M @ x + (x**2).sum(), torch.ones_like(M[0])), M + 2),
}


def kronecker(M: Tensor) -> Pair:
    """Return K-FAC of a linear model with one output, which is its Hessian."""
    layer = torch.nn.Linear(len(M.T), 1, bias=False).double()
    loss = torch.nn.functional.mse_loss
    return hodiff.KFACOperator(layer, loss, dict(layer.named_parameters()), M, M[:, :1]), 2 * M.T @ M / len(M)


def low_rank_matrix(M: Tensor) -> Tensor:
    """Return the sum of a diagonal matrix and the products of a few columns."""
    U = M[:, :2]
    return torch.diag(M[0]) + (U * M[0, :2]) @ U.T


# Operators and their matrices from a square matrix.
SQUARE_LEAVES: dict[str, Callable[[Tensor], Pair]] = {
    "diagonal": lambda M: (DiagonalOperator(M[0]), torch.diag(M[0])),
    "low rank": lambda M: (LowRankPlusDiagonalOperator(M[0], M[:, :2], M[0, :2]), low_rank_matrix(M)),
    "identity": lambda M: (IdentityOperator(M[0]), torch.eye(len(M)).double()),
    "kfac": kronecker,
    "hessian": lambda M: (HessianOperator(lambda x: x @ M @ x, torch.ones_like(M[0])), M + M.T),
}


@st.composite
def expressions(draw: st.DrawFn, m: int = 3, n: int = 3, depth: int = 3) -> Pair:
    """Draw a random expression and its matrix."""
    kind = draw(
        st.sampled_from(
            ["leaf", "sum", "difference", "product", "scaled", "transposed", "damped", "inverse", "copied"]
            if depth
            else ["leaf"]
        )
    )
    if kind == "leaf":
        kinds = {**LEAVES, **SQUARE_LEAVES} if m == n else LEAVES
        return kinds[draw(st.sampled_from(sorted(kinds)))](matrix(m, n, draw(st.integers(0, 99))))
    if kind == "product":
        inner = draw(st.integers(1, 4))
        (A, a), (B, b) = draw(expressions(m, inner, depth - 1)), draw(expressions(inner, n, depth - 1))
        return A @ B, a @ b
    if kind == "transposed":
        A, a = draw(expressions(n, m, depth - 1))
        return A.T, a.T
    A, a = draw(expressions(m, n, depth - 1))
    if kind == "copied":
        return copy.deepcopy(A), a
    if kind == "inverse" and m == n:
        identity = torch.eye(n).double()
        return (A.T @ A).damped(1.0).inverse("dense"), torch.linalg.inv(a.T @ a + identity)
    if kind == "damped" and m == n:
        return A.damped(0.5), a + 0.5 * torch.eye(n).double()
    if kind in ("sum", "difference"):
        B, b = draw(expressions(m, n, depth - 1))
        return (A + B, a + b) if kind == "sum" else (A - B, a - b)
    factor = draw(st.sampled_from([2, -0.5, np.float32(0.25), torch.tensor(3.0)]))
    return draw(st.sampled_from([(factor * A, float(factor) * a), (A / factor, a / float(factor)), (-A, -a)]))


@given(expressions(), st.integers(0, 99))
def test_expressions_match_dense_matrices(pair: Pair, seed: int) -> None:
    A, a = pair
    assert A.shape == tuple(a.shape)
    V, U = matrix(3, 2, seed), matrix(3, 2, seed + 1)
    close(A @ V, a @ V, 1e-11)
    close(A.T @ U, a.T @ U, 1e-11)
    close(A @ V[:, 0], a @ V[:, 0], 1e-11)
    close(A.to_dense(chunk_size=2), a, 1e-11)
    if A.symmetric:
        close(a, a.T)


def test_low_precision_scalars_are_converted_exactly() -> None:
    """Scalars of low precision are converted exactly: 1/3 in float32 is wrong in the eighth digit."""
    third, A = torch.tensor(3.0), MatrixOperator(matrix(3, 3, 0))
    K, k = kronecker(matrix(3, 3, 0))
    close((K / third).to_dense(), k / 3)
    close((A / third).to_dense(), matrix(3, 3, 0) / 3)
    close((A / third / third).to_dense(), matrix(3, 3, 0) / 9)
    close((torch.tensor(0.1, dtype=torch.bfloat16) * A * third).to_dense(), matrix(3, 3, 0) * 0.10009765625 * 3)


@pytest.mark.parametrize("divisor", [0, 0.0, "a", torch.ones(2), 1j, torch.tensor(1j)])
def test_rejects_bad_divisors(divisor: Any) -> None:
    with pytest.raises(hodiff.InputError, match="A / c: c: expected"):
        MatrixOperator(matrix(3, 3, 0)) / divisor
    with pytest.raises(hodiff.InputError, match="A / c: c: expected"):
        kronecker(matrix(3, 3, 0))[0] / divisor


def test_expressions_keep_pytrees() -> None:
    p = problem("mlp")
    A = HessianOperator(p.objective(), p.x, (p.inputs, p.targets))
    H, d = A.to_dense(), torch.rand(A.shape[0]).double()
    expressions = {
        "A + 2 A - A": (A + 2 * A - A, 2 * H),
        "flat + A": (DiagonalOperator(d) + A, torch.diag(d) + H),
        "D A": (DiagonalOperator(A.domain.unflatten(d)) @ A, d[:, None] * H),
        "A.T @ A": (A.T @ A, H @ H),
        "damped": (A.damped(0.1), H + 0.1 * torch.eye(len(H)).double()),
    }
    for name, (B, b) in expressions.items():
        product = B @ p.x
        assert product.keys() == p.x.keys(), name
        close(ravel(product), b @ ravel(p.x))


def test_scalar_factors_multiply() -> None:
    A = 3 * (2.0 * MatrixOperator(torch.eye(2))) / torch.tensor(4.0)
    assert torch.equal(A @ torch.ones(2), torch.tensor([1.5, 1.5]))


def test_symmetry_is_propagated() -> None:
    S, M = MatrixOperator(torch.eye(2), symmetric=True), MatrixOperator(torch.eye(2))
    assert [A.symmetric for A in (S + S, 2 * S, S - 3 * S, S.damped(1.0), DiagonalOperator(torch.ones(2)))] == [
        True
    ] * 5
    assert [A.symmetric for A in (S + M, 2 * M, S @ M, M.T)] == [False] * 4
    assert S.T is S
    assert M.T.T is M


def test_expressions_that_equal_their_transposes_are_symmetric() -> None:
    x, eye = torch.linspace(0.5, 1.0, 4, dtype=torch.float64), torch.eye(4, dtype=torch.float64)
    J = JacobianOperator(lambda x: x.sin() * x.roll(1), x)
    H = HessianOperator(lambda x: (x**3 * x.roll(1)).sum(), x)
    M, c, P = MatrixOperator(matrix(4, 4, 1)), torch.tensor(0.3, dtype=torch.float64), J @ MatrixOperator(x.diag())
    sums = [0.5 * (J + J.T), c * J + c * J.T, M.T / 3 - 2 * H + M / 3, (M + J) + (M + J).T, P + P.T, M @ J.T + J @ M.T]
    products = [J.T @ J, J @ J.T, J.T @ H @ J, (2 * M).T @ H @ (2 * M), P.T @ P, H @ H, (J.T @ J).damped(0.1)]
    for A in [*sums, *products, *(each.at(x + 0.1) for each in sums + products)]:
        assert A.symmetric
        assert A.T is A
        close(A @ eye, (A @ eye).T, 1e-12)
    tree = HessianOperator(lambda p: (p["a"] ** 3 * p["b"]).sum(), {"a": x[:2], "b": x[2:]}) @ MatrixOperator(x.diag())
    A = tree + tree.T
    assert A.symmetric
    assert list(A @ {"a": x[:2], "b": x[2:]}) == ["a", "b"]
    close(A @ eye, tree @ eye + (tree @ eye).T, 1e-12)
    for A in (M + M, M - M.T, M + 2 * M.T, J + M.T, J.T @ M, J @ J, J.T @ M @ J, sums[0] + J, J.T @ J @ H):
        assert not A.symmetric
        close(A.T @ eye, (A @ eye).T, 1e-12)


@pytest.mark.parametrize("layout", [torch.strided, torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_matrices_of_all_layouts_match(layout: torch.layout) -> None:
    M = torch.tensor([[0.0, 2.0, 0.0], [1.0, 0.0, 3.0]])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse")
        A = MatrixOperator(M if layout == torch.strided else M.to_sparse(layout=layout))
    v, u = torch.randn(3), torch.randn(2)
    close(A @ v, M @ v, 1e-6)
    close(A.T @ u, M.T @ u, 1e-6)
    close(A @ torch.eye(3), M, 1e-6)
    close(A.to_dense(), M, 1e-6)


def test_half_precision_matrix_multiplies_in_its_own_dtype() -> None:
    M = torch.randn(3, 3).bfloat16()
    A = MatrixOperator(M)
    assert (A @ torch.ones(3)).dtype == torch.float32
    close(A @ torch.ones(3), M.float().sum(1), 2e-2)


def test_float32_vectors_are_promoted_by_float64_operators() -> None:
    A = DiagonalOperator(torch.ones(2).double() / 3)
    product = A @ torch.ones(2)
    assert product.dtype == torch.float64
    close(product, torch.ones(2).double() / 3)


def test_two_dimensional_leaf_is_told_from_a_block() -> None:
    """A vector in the shape of the single leaf is a vector; any other matrix is a block."""
    M = torch.arange(6.0).reshape(2, 3)
    A = DiagonalOperator(M)
    assert torch.equal(A @ torch.ones(2, 3), M)
    assert torch.equal(A @ torch.ones(6, 2), M.reshape(6, 1).expand(6, 2))
    assert torch.equal(A @ torch.ones(6), M.reshape(6))
    column = DiagonalOperator(torch.arange(3.0).reshape(3, 1))
    assert torch.equal(column @ torch.ones(3, 1), torch.arange(3.0).reshape(3, 1))


def test_blocks_without_columns_are_accepted() -> None:
    A, B = MatrixOperator(torch.ones(3, 2)), DiagonalOperator(torch.ones(2))
    assert (A @ torch.ones(2, 0)).shape == (3, 0)
    assert (A.T @ torch.ones(3, 0)).shape == (2, 0)
    assert ((A @ B + 2 * A) @ torch.ones(2, 0)).shape == (3, 0)
    J = JacobianOperator(lambda x: x**2, torch.ones(2))
    assert (J @ torch.ones(2, 0)).shape == (2, 0)


def test_to_dense_in_chunks_matches(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    M = torch.randn(4, 7)
    widths: list[int] = []

    class Counted(MatrixOperator):
        def multiply(self, block: Tensor) -> Tensor:
            widths.append(block.shape[1])
            return super().multiply(block)

    A = Counted(M)
    for chunk_size in (1, 3, 7, 100, None, "auto"):
        widths.clear()
        assert torch.equal(A.to_dense(chunk_size=chunk_size), M)
        assert sum(widths) == 7
        assert max(widths) <= (chunk_size if isinstance(chunk_size, int) else 7)
    A.to_dense(progress=True)
    assert "columns" in capsys.readouterr().err
    with pytest.raises(hodiff.InputError, match="to_dense: chunk_size"):
        A.to_dense(chunk_size=0)


def test_to_scipy_matches_and_works_with_scipy_solvers() -> None:
    p = problem("regression")
    A = HessianOperator(p.objective(), p.x, (p.inputs, p.targets))
    dense = A.to_dense().numpy()
    S = A.to_scipy()
    assert S.dtype == np.float64
    values = spla.eigsh(S, k=2, which="LA", return_eigenvectors=False)
    np.testing.assert_allclose(np.sort(values), np.linalg.eigvalsh(dense)[-2:], rtol=1e-9)
    damped = A.damped(5.0)
    b = np.ones(A.shape[0])
    x, info = spla.cg(damped.to_scipy(), b, rtol=1e-10)
    assert info == 0
    np.testing.assert_allclose(x, np.linalg.solve(dense + 5 * np.eye(len(b)), b), rtol=1e-7)
    np.testing.assert_allclose(S @ np.eye(len(b)), dense, atol=1e-12)
    np.testing.assert_allclose(S.T @ b, dense.T @ b, atol=1e-12)
    J = JacobianOperator(p.call, p.x, p.inputs)
    K = J.to_scipy()
    found = spla.lsmr(K, np.ones(K.shape[0]), atol=1e-14, btol=1e-14, maxiter=1000)[0]
    expected = np.linalg.lstsq(p.jacobian().numpy(), np.ones(K.shape[0]), rcond=None)[0]
    np.testing.assert_allclose(found, expected, atol=1e-6)
    np.testing.assert_allclose(K.T @ np.eye(K.shape[0]), p.jacobian().numpy().T, atol=1e-12)


def test_to_scipy_of_bfloat16_is_float32() -> None:
    S = DiagonalOperator(torch.ones(2, dtype=torch.bfloat16)).to_scipy()
    assert S.dtype == np.float32
    assert (S @ np.ones(2, np.float32)).dtype == np.float32


@functools.cache
def _operators() -> dict[str, LinearOperator]:
    M, x = torch.randn(3, 2).double(), torch.randn(2).double()
    return {
        "matrix": MatrixOperator(M),
        "jacobian": JacobianOperator(lambda x: (M @ x) ** 3, x),
        "hessian": HessianOperator(lambda x: (M @ x).pow(4).sum(), x),
        "identity": IdentityOperator(x),
        "expression": MatrixOperator(M).T @ MatrixOperator(M) + 2 * DiagonalOperator(x),
    }


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", ["matrix", "jacobian", "hessian", "identity", "expression"])
def test_products_are_differentiable_in_the_vector(name: str) -> None:
    A = _operators()[name]
    dense = A.to_dense()
    v, V = torch.randn(2).double(), torch.randn(2, 3).double()
    hodiff.assert_differentiable(lambda v: (A @ v).sin(), v, order=2, scipy=False)
    close(torch.func.jacfwd(lambda v: A @ v)(v), dense)
    close(torch.func.jacrev(lambda v: A @ v)(v), dense)
    close(torch.func.vmap(lambda v: A @ v, in_dims=1, out_dims=1)(V), dense @ V)
    batch = torch.randn(4, 2, 3).double()
    close(torch.func.vmap(lambda V: A @ V)(batch), dense @ batch)
    close(torch.func.hessian(lambda v: (A @ v).square().sum())(v), 2 * dense.T @ dense)
    assert not (A @ v).requires_grad
    (slope,) = torch.autograd.grad((A @ V.requires_grad_()).sum(), V)
    close(slope, dense.T @ torch.ones(dense.shape[0], 3).double())


def test_pytree_products_are_differentiable() -> None:
    p = problem("mlp")
    A = HessianOperator(p.objective(), p.x, (p.inputs, p.targets))
    v = {key: value.clone().requires_grad_() for key, value in p.x.items()}
    product = A @ v
    energy = sum((a * b).sum() for a, b in zip(product.values(), v.values(), strict=True))
    slopes = torch.autograd.grad(energy, list(v.values()))
    close(ravel(list(slopes)), 2 * p.hessian() @ ravel(p.x))


class NoTranspose(LinearOperator):
    def multiply(self, block: Tensor) -> Tensor:
        return 2 * block


def test_rejects_bad_arguments() -> None:
    A, B = MatrixOperator(torch.ones(3, 2)), MatrixOperator(torch.ones(2, 2))
    with pytest.raises(hodiff.InputError, match=r"A \+ B: expected operators between the same spaces"):
        A + B
    with pytest.raises(hodiff.InputError, match=r"A @ B: expected B to map"):
        A @ A
    with pytest.raises(hodiff.InputError, match=r"c \* A: c: expected a real number"):
        A * torch.ones(3)
    with pytest.raises(hodiff.InputError, match=r"c \* A: c: expected a real number"):
        A * 1j
    with pytest.raises(hodiff.InputError, match=r"c \* A: c: expected a real number"):
        A * B
    for wrong in (lambda: A + 1, lambda: A - 1, lambda: 1 + A):
        with pytest.raises(TypeError):
            wrong()
    with pytest.raises(hodiff.InputError, match="MatrixOperator: matrix: expected a floating-point tensor"):
        MatrixOperator(torch.ones(3))
    with pytest.raises(hodiff.InputError, match="MatrixOperator: matrix: expected a floating-point tensor"):
        MatrixOperator(torch.ones(2, 2, dtype=torch.int64))
    with pytest.raises(hodiff.InputError, match="MatrixOperator: matrix: expected a square one"):
        MatrixOperator(torch.ones(3, 2), symmetric=True)
    with pytest.raises(hodiff.InputError, match="products of the transpose are not defined"):
        NoTranspose(Space.flat(2, torch.float32)).T @ torch.ones(2)
    with pytest.raises(hodiff.InputError, match=r"v: expected a floating-point tensor \(2,\) or \(2, k\)"):
        A @ torch.ones(3)


@pytest.mark.parametrize("names", ["missing", ["a", "missing"], "0.weig"])
def test_block_rejects_unknown_names(names: Any) -> None:
    A = DiagonalOperator({"a": torch.ones(2), "0.weight": torch.ones(1)})
    with pytest.raises(
        hodiff.InputError, match=r"block: names: expected names of parameters .* got '(missing|0.weig)'"
    ):
        A.block(names)


@pytest.mark.parametrize("names", [[], 0, None, [0], ["a", 1]])
def test_block_rejects_values_that_are_no_names(names: Any) -> None:
    x = {"a": torch.ones(2), "b": torch.ones(1)}
    for A in (HessianOperator(lambda x: (x["a"] ** 2).sum() * x["b"].sum(), x), IdentityOperator(x)):
        with pytest.raises(
            hodiff.InputError, match=r"block: names: expected one or more names of parameters, from a, b"
        ):
            A.block(names)


def test_block_rejects_rectangular_operators() -> None:
    J = JacobianOperator(lambda x: x["a"] * x["b"].sum(), {"a": torch.ones(3), "b": torch.ones(2)})
    with pytest.raises(hodiff.InputError, match="block: expected an operator that maps a space to itself"):
        J.block("a")
    assert (J.T @ J).block("a").shape == (3, 3)


def test_block_names_follow_the_pytree() -> None:
    tree = {"layers": [{"w": torch.ones(1), "b": 2 * torch.ones(1)}, (3 * torch.ones(1),)], "a.b": 4 * torch.ones(1)}
    A = DiagonalOperator(tree)
    assert torch.equal(A.block("layers").to_dense().diagonal().sort().values, torch.tensor([1.0, 2.0, 3.0]))
    assert torch.equal(A.block("layers.0").to_dense().diagonal().sort().values, torch.tensor([1.0, 2.0]))
    assert torch.equal(A.block(["layers.1.0", "a"]).to_dense().diagonal(), torch.tensor([3.0, 4.0]))
    assert torch.equal(A.block(["a.b", "a.b"]).to_dense().diagonal(), torch.tensor([4.0]))
    named = A.block("layers.0").domain.names
    assert sorted(named) == ["['layers.0.b']", "['layers.0.w']"]
