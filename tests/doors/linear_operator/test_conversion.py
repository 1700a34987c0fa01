"""Operators of hodiff inside linear_operator, against dense matrices and hodiff's own estimators."""

import linear_operator
import pytest
import torch
from linear_operator import settings
from linear_operator.operators import AddedDiagLinearOperator, DenseLinearOperator, KroneckerProductLinearOperator

import hodiff
from hodiff.doors.linear_operator import Products, to_linear_operator

D = torch.float64
N = 8


def close(a, b, rtol=1e-9):
    torch.testing.assert_close(a, b, rtol=rtol, atol=rtol * b.abs().max().item())


def random(*shape, seed=0):
    return torch.randn(*shape, dtype=D, generator=torch.Generator().manual_seed(seed))


X = random(N, seed=1)
M = random(N, N, seed=2)


def f(x):
    return (M @ x).square().sum() / 2 + x.cosh().sum()


def hessian(x):
    return M.T @ M + x.cosh().diag()


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 2).double()

    def forward(self, x):
        return self.layer(x).tanh()


MODEL, INPUTS, TARGETS = Model(), random(6, 3), random(6, 2)
POINT = {name: p.detach() for name, p in MODEL.named_parameters()}
LOSS = torch.nn.MSELoss()

OPERATORS = {
    "Hessian": lambda: hodiff.HessianOperator(f, X),
    "Hessian over data": lambda: hodiff.HessianOperator(lambda x, b: b * f(x), X, data=[random(1)[0] ** 2 + 1] * 2,
                                                       batch_size=lambda _: 1),
    "Gauss-Newton": lambda: hodiff.GaussNewtonOperator(MODEL, LOSS, POINT, INPUTS, TARGETS),
    "Fisher": lambda: hodiff.FisherOperator(MODEL, LOSS, POINT, INPUTS, TARGETS),
    "Jacobian": lambda: hodiff.JacobianOperator(lambda x: (M[:3] @ x).tanh(), X),
    "K-FAC": lambda: hodiff.KFACOperator(MODEL, LOSS, POINT, INPUTS, TARGETS),
    "EK-FAC": lambda: hodiff.EKFACOperator(MODEL, LOSS, POINT, INPUTS, TARGETS),
    "Gram": lambda: hodiff.GramOperator(MODEL, POINT, INPUTS),
    "matrix": lambda: hodiff.operators.MatrixOperator(M),
    "sparse matrix": lambda: hodiff.operators.MatrixOperator(M.to_sparse()),
    "diagonal": lambda: hodiff.operators.DiagonalOperator(X),
    "identity": lambda: hodiff.operators.IdentityOperator(X),
    "block": lambda: hodiff.GaussNewtonOperator(MODEL, LOSS, POINT, INPUTS, TARGETS).block("layer.bias"),
    "inverse": lambda: hodiff.HessianOperator(f, X).inverse("dense"),
    "sum": lambda: hodiff.HessianOperator(f, X) + 2 * hodiff.operators.MatrixOperator(M),
    "sum with a diagonal": lambda: hodiff.operators.DiagonalOperator(X) + hodiff.HessianOperator(f, X),
    "damped": lambda: hodiff.HessianOperator(f, X).damped(0.5),
    "product": lambda: hodiff.JacobianOperator(lambda x: (M[:3] @ x).tanh(), X) @ hodiff.HessianOperator(f, X),
    "transpose": lambda: hodiff.JacobianOperator(lambda x: (M[:3] @ x).tanh(), X).T,
    "negative": lambda: -hodiff.HessianOperator(f, X),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("name", OPERATORS)
def test_every_operator(name):
    A = OPERATORS[name]()
    dense, converted = A.to_dense(), to_linear_operator(A)
    assert isinstance(converted, linear_operator.LinearOperator)
    assert tuple(converted.shape) == A.shape
    assert converted.dtype == A.dtype
    m, n = A.shape
    close(converted.to_dense(), dense)
    close(converted @ X[:1].expand(n), dense @ X[:1].expand(n))
    close(converted @ random(4, n, 2), dense @ random(4, n, 2))
    close(random(2, m) @ converted, random(2, m) @ dense)
    close(converted.mT.to_dense(), dense.T)
    close((converted + converted * 2).to_dense(), 3 * dense)
    close((converted @ converted.mT).to_dense(), dense @ dense.T)
    close(converted.expand(2, m, n).sum(0).to_dense(), 2 * dense)
    close(converted[1:, :2].to_dense(), dense[1:, :2])
    close(KroneckerProductLinearOperator(converted, DenseLinearOperator(M)).to_dense(), torch.kron(dense, M))
    if m == n:
        close(converted.diagonal(), dense.diagonal())


@pytest.mark.parametrize("iterative", [False, True])
@pytest.mark.parametrize("damped", [False, True])
def test_solutions_and_determinants(iterative, damped):
    A = hodiff.HessianOperator(f, X)
    A, dense = (A.damped(2.0), hessian(X) + 2 * torch.eye(N, dtype=D)) if damped else (A, hessian(X))
    converted, b = to_linear_operator(A), random(N, 3)
    assert isinstance(converted, AddedDiagLinearOperator) is damped
    tight = settings.cg_tolerance(1e-7), settings.num_trace_samples(2000)
    with (
        settings.max_cholesky_size(1 if iterative else 800),
        settings.min_preconditioning_size(1),
        settings.max_preconditioner_size(4),
        tight[0],
        tight[1],
    ):
        torch.manual_seed(0)
        quadratic, logdet = converted.inv_quad_logdet(b, logdet=True)
        close(converted.solve(b), torch.linalg.solve(dense, b), rtol=1e-6)
        close(converted.solve(b), A.solve(b, tol=1e-12).value, rtol=1e-6)
        close(quadratic, (b * torch.linalg.solve(dense, b)).sum(), rtol=1e-6)
        close(logdet, dense.logdet(), rtol=0.05 if iterative else 1e-9)
        close(logdet, torch.tensor(A.logdet(method="exact").value, dtype=D), rtol=0.05 if iterative else 1e-9)


def test_eigenvalues():
    A = hodiff.HessianOperator(f, X)
    exact = torch.linalg.eigvalsh(hessian(X))
    for method in ("symeig", "lanczos"):
        values, vectors = to_linear_operator(A).diagonalization(method=method)
        close(values.sort().values, exact, rtol=1e-6)
        close(vectors.to_dense() @ values.diag() @ vectors.to_dense().T, hessian(X), rtol=1e-6)
    close(to_linear_operator(A).eigvalsh()[-2:], A.eigsh(2, which="LA").eigenvalues.sort().values, rtol=1e-9)


def test_negative_eigenvalues_are_not_set_to_zero():
    converted = to_linear_operator(hodiff.HessianOperator(lambda x: -f(x), X))
    close(converted.eigvalsh(), torch.linalg.eigvalsh(-hessian(X)))
    with pytest.raises(hodiff.InputError, match="symmetric"):
        to_linear_operator(hodiff.JacobianOperator(lambda x: M @ x.tanh(), X)).eigvalsh()


def test_eigenvalues_of_an_inverse():
    K = hessian(X)
    with pytest.raises(hodiff.InputError, match=r"MatrixOperator\(matrix, symmetric=True\)"):
        to_linear_operator(hodiff.operators.MatrixOperator(K).inverse("dense")).eigvalsh()
    inverse = hodiff.operators.MatrixOperator(K, symmetric=True).inverse("dense")
    close(to_linear_operator(inverse).eigvalsh(), torch.linalg.eigvalsh(torch.linalg.inv(K)))


@pytest.mark.parametrize("iterative", [False, True])
@pytest.mark.parametrize("shape", ["alone", "sum", "batch"])
def test_gradients(iterative, shape):
    """Gradients with respect to the point and a factor equal torch's gradients of the dense matrix."""
    x, scale, b = X.clone().requires_grad_(), torch.tensor(2.0, dtype=D, requires_grad=True), random(N)[:, None]

    def value(operator, dense):
        if shape == "sum":
            operator, dense = operator + DenseLinearOperator(M @ M.T), dense + M @ M.T
        if shape == "batch":
            operator, dense = operator.expand(2, N, N), dense.expand(2, N, N)
        ours = (b * operator.solve(b)).sum() + (random(2, N, 1) * (operator @ random(1, N, 1))).sum()
        theirs = (b * torch.linalg.solve(dense, b)).sum() + (random(2, N, 1) * (dense @ random(1, N, 1))).sum()
        if not iterative:
            ours, theirs = ours + operator.logdet().sum(), theirs + torch.logdet(dense).sum()
        return ours, theirs

    with settings.max_cholesky_size(1 if iterative else 800), settings.cg_tolerance(1e-12):
        A = scale * hodiff.HessianOperator(f, x)
        ours, theirs = value(to_linear_operator(A, x=x), scale * hessian(x))
        close(ours, theirs, rtol=1e-6)
        for found, expected in zip(*(torch.autograd.grad(each, (x, scale)) for each in (ours, theirs)), strict=True):
            close(found, expected, rtol=1e-5)


def test_gradients_by_further_arguments():
    def g(x, c):
        return (c["width"] * x).cosh().sum()

    width = torch.tensor(0.5, dtype=D, requires_grad=True)
    found = to_linear_operator(hodiff.HessianOperator(g, X, {"width": width})).logdet()
    expected = (width**2 * (width * X).cosh()).log().sum()
    close(*(torch.autograd.grad(each, width)[0] for each in (found, expected)))


def test_second_derivatives_of_products():
    x = X.clone().requires_grad_()
    u, v = random(N, 2, seed=3), random(N, 2, seed=4)
    found, expected = (
        torch.autograd.grad((u * (H @ v)).sum(), x, create_graph=True)[0]
        for H in (to_linear_operator(hodiff.HessianOperator(f, x), x=x), hessian(x))
    )
    close(found, expected)
    close(*(torch.autograd.grad(each.square().sum(), x)[0] for each in (found, expected)))


SHIFT = torch.nn.Parameter(torch.eye(N, dtype=D))
# Functions of an operator or its dense matrix. A gradient by the point goes through vectors, too.
OF_THE_POINT = {
    "square of a product": lambda H, x: (H @ x).square().sum(),
    "two products": lambda H, x: X @ (H @ (H @ X)),
    "square of the matrix": lambda H, x: ((H @ H.mT) @ X).square().sum(),
    "entries": lambda H, x: (H @ torch.eye(N, dtype=D)).pow(3).sum(),
    "sum with a parameter": lambda H, x: ((H + SHIFT) @ X).square().sum(),
    "logdet": lambda H, x: H.logdet(),
}


@pytest.mark.parametrize("name", OF_THE_POINT)
def test_gradients_with_a_graph(name):
    """A gradient with create_graph=True equals that without, and has a derivative."""
    value, x = OF_THE_POINT[name], X.clone().requires_grad_()

    def gradient(H):
        return torch.autograd.grad(value(H, x), x, create_graph=True)[0]

    found, expected = gradient(to_linear_operator(hodiff.HessianOperator(f, x), x=x)), gradient(hessian(x))
    close(found, expected)
    close(*(torch.autograd.grad(each @ X, x)[0] for each in (found, expected)))


@pytest.mark.parametrize("name", ["two products", "sum with a parameter", "logdet"])
def test_hessians_of_functions_of_an_operator(name):
    def of(x):
        return OF_THE_POINT[name](to_linear_operator(hodiff.HessianOperator(f, x), x=x), x)

    close(hodiff.hessian_matrix(of, X), hodiff.hessian_matrix(lambda x: OF_THE_POINT[name](hessian(x), x), X))


LOST = {
    "Gauss-Newton": lambda x: hodiff.GaussNewtonOperator(lambda x, a: (M @ x * a).tanh(), LOSS, x, X, X),
    "Jacobian": lambda x: hodiff.JacobianOperator(lambda x: M @ x.tanh(), x),
    "Hessian over data": lambda x: hodiff.HessianOperator(lambda x, b: b[0] * f(x), x, data=[random(1)]),
    "one draw": lambda x: hodiff.HessianOperator(lambda x: f(torch.nn.functional.dropout(x)), x, randomness="fixed"),
    "inverse": lambda x: hodiff.HessianOperator(f, x).inverse("dense"),
    "inverse of a sum": lambda x: hodiff.HessianOperator(f, x).damped(1.0).inverse("dense"),
}


@pytest.mark.parametrize("name", LOST)
def test_gradients_that_would_be_lost_are_refused(name):
    x = X.clone().requires_grad_()
    A = LOST[name](x)
    converted = to_linear_operator(A, x=x)
    product = converted @ torch.ones(A.shape[1], dtype=D)
    close(product.detach(), A.to_dense().sum(1))
    with pytest.raises(hodiff.InputError, match="expected a HessianOperator"):
        product.sum().backward()
    # Without x, points are constants.
    assert not to_linear_operator(A).requires_grad


def test_gradients_by_arguments_are_refused():
    a = X.clone().requires_grad_()
    A = hodiff.JacobianOperator(lambda x, a: (a * x).tanh(), X, a).damped(1.0)
    with pytest.raises(hodiff.InputError, match="expected a HessianOperator"):
        (to_linear_operator(A) @ X).sum().backward()


def test_constant_terms_beside_a_moving_point():
    x = X.clone().requires_grad_()
    A = hodiff.HessianOperator(f, x) + hodiff.operators.MatrixOperator((M @ M.T).to_sparse(), symmetric=True)
    found, expected = to_linear_operator(A, x=x).logdet(), torch.logdet(hessian(x) + M @ M.T)
    close(*(torch.autograd.grad(each, x)[0] for each in (found, expected)))


def test_gradients_by_vectors():
    v = random(N, 2).requires_grad_()
    for A in (hodiff.HessianOperator(f, X), hodiff.JacobianOperator(lambda x: M @ x.tanh(), X)):
        (slope,) = torch.autograd.grad((to_linear_operator(A) @ v).square().sum(), v)
        close(slope, 2 * A.to_dense().T @ (A.to_dense() @ v.detach()))


def test_other_dtypes():
    converted = to_linear_operator(hodiff.HessianOperator(lambda x: x.cosh().sum(), X))
    assert isinstance(converted, Products)
    assert converted.double() is converted
    single = converted.float()
    assert single.dtype == (single @ X.float()).dtype == torch.float32
    close(single.to_dense(), X.float().cosh().diag(), rtol=1e-6)
    x = X.clone().requires_grad_()
    with pytest.raises(hodiff.InputError, match="expected a constant"):
        to_linear_operator(hodiff.HessianOperator(f, x), x=x).float()


def test_errors():
    with pytest.raises(hodiff.InputError, match="to_linear_operator: A: expected a hodiff LinearOperator"):
        to_linear_operator(M)
    for x in (2 * X, {"x": X}):
        with pytest.raises(hodiff.InputError, match="x: expected the point of"):
            to_linear_operator(hodiff.HessianOperator(f, X), x=x)
