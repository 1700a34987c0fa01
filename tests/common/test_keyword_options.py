"""Functions that forward keyword options reject unknown options at the call, with their own name in the message."""

import pytest
import torch

import hodiff
from hodiff.estimators import jacobi_preconditioner
from hodiff.implicit import equality_argmin, projected_argmin, proximal_argmin
from hodiff.operators import MatrixOperator


def objective(x):
    return (x * x).sum()


MISTYPED = {
    "InverseOperator": (lambda: MatrixOperator(torch.eye(2)).inverse("cg", max_iter=5), "max_iterations"),
    "jacobi_preconditioner": (lambda: jacobi_preconditioner(torch.eye(2), 0.1, product=6), "products"),
    "equality_argmin": (lambda: equality_argmin(objective, torch.sum, max_iteration=3), "max_iterations"),
    "proximal_argmin": (lambda: proximal_argmin(objective, lambda x, t: x, stepsize=3), "step_size"),
    "projected_argmin": (lambda: projected_argmin(objective, lambda x: x, thro=3), "throw"),
    "assert_differentiable": (lambda: hodiff.assert_differentiable(torch.sin, torch.ones(2), sead=3), "seed"),
}


@pytest.mark.parametrize("name", MISTYPED)
def test_unknown_option_raises_under_the_name_of_the_called_function(name):
    call, meant = MISTYPED[name]
    with pytest.raises(
        TypeError, match=rf"^{name}\(\) got an unexpected keyword argument '\w+'; did you mean '{meant}'"
    ):
        call()


def test_unknown_option_lists_all_options_if_none_is_similar():
    with pytest.raises(TypeError, match=r"'zzz'; it takes floor, method, .*products"):
        jacobi_preconditioner(torch.eye(2), zzz=1)
    with pytest.raises(TypeError, match=r"InverseOperator\(\) .*'tolerance'; it takes damping, tol, .*max_iterations"):
        MatrixOperator(torch.eye(2)).inverse("cg", tolerance=1)


def test_known_options_are_forwarded():
    A = MatrixOperator(torch.eye(2), symmetric=True)
    torch.testing.assert_close(A.inverse("cg", max_iterations=5, atol=0.0) @ torch.ones(2), torch.ones(2))
