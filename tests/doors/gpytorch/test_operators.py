"""Operators of hodiff in linear_operator, inside the context, against dense matrices."""

import gpytorch
import pytest
import torch
from doors.pages import run_example
from linear_operator.operators import DenseLinearOperator, KroneckerProductLinearOperator

import hodiff
from hodiff.doors.gpytorch import higher_order
from hodiff.doors.linear_operator import to_linear_operator

D = torch.float64
N = 4
GENERATOR = torch.Generator().manual_seed(0)
X, B = (torch.randn(*shape, dtype=D, generator=GENERATOR) for shape in ((N,), (N, 2)))
M = torch.randn(N, N, dtype=D, generator=GENERATOR)
NOISE = torch.nn.Parameter(torch.eye(N, dtype=D))


def close(a, b, rtol=1e-8):
    torch.testing.assert_close(a, b, rtol=rtol, atol=rtol * b.abs().max().item())


def f(x, scale=1.0):
    return (M @ x).square().sum() / 2 + (scale * x.cosh()).sum()


def hessian(x, scale=1.0):
    return M.T @ M + scale * x.cosh().diag()


def inverse_form(A):
    return (B * torch.linalg.solve(A, B)).sum()


# A function of an operator, and of its dense matrix.
FORMS = {
    "product": (lambda H: (H @ B).square().sum(),) * 2,
    "solve": (lambda H: (B * H.solve(B)).sum(), inverse_form),
    "inv_quad": (lambda H: H.inv_quad(B), inverse_form),
    "inv_quad_logdet": (
        lambda H: sum(H.inv_quad_logdet(B, logdet=True)),
        lambda A: inverse_form(A) + torch.logdet(A),
    ),
    "sum with a parameter": (
        lambda H: (B * (H + DenseLinearOperator(NOISE)).solve(B)).sum(),
        lambda A: inverse_form(A + NOISE),
    ),
    "Kronecker product": (
        lambda H: (KroneckerProductLinearOperator(H, DenseLinearOperator(NOISE)) @ M.view(-1)).square().sum(),
        lambda A: (torch.kron(A, NOISE) @ M.view(-1)).square().sum(),
    ),
    "diagonal": (lambda H: H.diagonal().square().sum(), lambda A: A.diagonal().square().sum()),
}


@pytest.mark.parametrize("iterative", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_derivatives_by_the_point(name, iterative):
    ours, theirs = FORMS[name]

    def of(x):
        return ours(to_linear_operator(hodiff.HessianOperator(f, x), x=x))

    x = X.clone().requires_grad_()
    with gpytorch.settings.max_cholesky_size(1 if iterative else 800), higher_order():
        (slope,) = torch.autograd.grad(of(x), x)
        H = hodiff.hessian_matrix(of, X)
    close(slope, torch.func.grad(lambda x: theirs(hessian(x)))(X))
    close(H, hodiff.hessian_matrix(lambda x: theirs(hessian(x)), X))


def test_derivatives_by_arguments():
    def of(scale):
        return to_linear_operator(hodiff.HessianOperator(f, X, scale)).inv_quad(B)

    scale = torch.tensor(0.7, dtype=D)
    with higher_order():
        close(hodiff.hessian(of)(scale), torch.func.hessian(lambda scale: inverse_form(hessian(X, scale)))(scale))


def test_lost_derivatives_are_refused():
    x = X.clone().requires_grad_()
    H = to_linear_operator(hodiff.HessianOperator(f, x).inverse("dense"), x=x)
    with higher_order(), pytest.raises(hodiff.InputError, match="expected a HessianOperator"):
        H @ B


def test_outside_the_context_the_package_loses_a_graph():
    """Kronecker products of linear_operator detach their factors in the backward pass."""
    with pytest.raises(hodiff.RouteError, match=r"higher_order\(\)"):
        hodiff.hessian_matrix(
            lambda x: FORMS["Kronecker product"][0](to_linear_operator(hodiff.HessianOperator(f, x), x=x)), X
        )


def test_examples_of_the_page():
    page = "guides/gaussian_processes.md"
    names = run_example(page, "class Evidence")
    assert names["found"].success
    assert names["H"].shape == (4, 4)
    run_example(page, "damped(0.1)", hodiff=hodiff, torch=torch)
    known = {"hodiff": hodiff, "torch": torch, "to_linear_operator": to_linear_operator, "higher_order": higher_order}
    x = X.clone().requires_grad_()
    slope = run_example(page, "slope", f=f, x=x, **known)["slope"]
    close(slope, torch.func.grad(lambda x: torch.logdet(hessian(x)))(X))
    run_example(page, "inv_quad(b)", f=f, x=x, b=B, **known)
