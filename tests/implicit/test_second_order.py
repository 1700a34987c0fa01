"""Tests of implicit functions with gradgradcheck and SciPy's Hessian; `test_derivatives.py` compares closed forms."""

import pytest
import torch
from implicit.problems import PROBLEMS
from second_order import Row, assert_listed, assert_second_order, parametrize_by_rows, public

import hodiff
from hodiff import implicit
from hodiff.implicit import odeint, project_box_plane

# The public names that each problem tests.
NAMES = {
    "sqrt of a number": ("root", "newton"),
    "sqrt by scipy": ("scipy_root",),
    "ridge by scipy": ("argmin", "scipy_minimize"),
    "ridge by newton and cg": ("stationary",),
    "ridge by sgd": ("torch_optimizer",),
    "affine by picard": ("fixed_point", "picard"),
    "affine by anderson": ("anderson",),
    "system by auto": ("linear_solve",),
    "equality": ("equality_argmin",),
    "lasso": ("proximal_argmin",),
    "simplex": ("projected_argmin",),
}
# A row checks all its names. SciPy needs hundreds of solutions, which take milliseconds each for these problems.
SLOW = {"ridge by scipy", "ridge by newton and cg", "ridge by sgd", "equality", "lasso", "simplex"}
OF_PROBLEMS = [
    Row(names[-1], problem.function, problem.inputs, problem.name, step=0.02, slow=problem.name in SLOW)
    for problem in PROBLEMS
    if (names := NAMES.get(problem.name))
]
BOX = torch.tensor([0.4, 0.9, -0.3, 0.6], dtype=torch.float64)


def squares_on_plane(x, level):
    return project_box_plane(x, torch.ones_like(x), level, 0.0, 1.0).square()


def pendulum_with_friction(y0, friction):
    """Angle and speed after two seconds."""
    times = torch.tensor([0.0, 2.0], dtype=torch.float64)
    return odeint(lambda t, y, k: torch.stack([y[1], -y[0].sin() - k * y[1]]), y0, times, friction, step_size=0.25)[-1]


SWING = (torch.tensor([0.7, -0.3], dtype=torch.float64), torch.tensor(0.2, dtype=torch.float64))
AT = (BOX, torch.tensor(1.5, dtype=torch.float64))
ROWS = [
    *OF_PROBLEMS,
    Row("odeint", pendulum_with_friction, SWING, step=0.02, slow=True),
    Row("project_box_plane", squares_on_plane, AT, step=0.02),
]


def test_every_public_name_has_a_row():
    assert set(NAMES) <= {problem.name for problem in PROBLEMS}
    solved = {name for names in NAMES.values() for name in names}
    assert_listed(public(implicit) - (solved - {row.name for row in ROWS}), ROWS, {})


@pytest.mark.one_in(6)
@parametrize_by_rows(ROWS)
def test_passes_gradgradcheck_and_scipy_hessian(row):
    assert_second_order(row)


def test_solution_in_the_jacobian_of_the_equation_is_differentiated() -> None:
    """The solution q = 1/p depends on the parameters, although its Function gets q as a constant."""
    p, v = torch.tensor([1.0, 4.0, 9.0], dtype=torch.float64), torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    one = torch.ones_like(p)

    def solved(p: torch.Tensor) -> torch.Tensor:
        return hodiff.implicit.linear_solve(lambda q, p: p * q, one, p).sum()

    for product in (lambda: hodiff.hvp(solved, p, v), lambda: hodiff.HessianOperator(solved, p) @ v):
        torch.testing.assert_close(product(), 2 * v / p**3)
