"""Derivatives of constrained minimisers with respect to a hyperparameter, compared with closed forms.

    python examples/constrained.py

Each problem has one hyperparameter and a solution x(t), which a solver finds. Derivatives are with respect to the
logarithm t of the hyperparameter:

- ridge regression on the diabetes data, with its penalty: `argmin`;
- the lasso on the same data, with its penalty: `proximal_argmin`;
- the dual of a linear support vector machine, with the size of its box: `projected_argmin` with `project_box_plane`.
  The dual is a quadratic program in a box, cut by a hyperplane. The last entry of x is the bias, computed from its
  margin vectors;
- a portfolio with short selling, with the risk aversion: `equality_argmin`. It is a quadratic program whose weights sum
  to one;
- a portfolio without short selling, the same program in the simplex: `projected_argmin` with `project_simplex`.

The implicit function theorem gives dx/dt, and the first and second derivative of a loss on held-out data, from the
conditions at the solution. The solvers' steps are not differentiated. For the closed form, the coordinates that lie on
a bound or at a kink are fixed. The other coordinates then solve one linear system in x and lambda = exp(t),

    (A0 + lambda A1) x = b0 + lambda b1,

the normal equations for ridge, and the Karush-Kuhn-Tucker conditions on the active set for the other problems. It is
differentiated by hand. If the two results differ by more than 1e-6, relatively, the script ends with exit status 1.

Sources: S. Gould et al., "On differentiating parameterized argmin and argmax problems with application to bi-level
optimization", 2016, sections 2 and 3; M. Blondel et al., "Efficient and modular implicit differentiation", NeurIPS
2022, section 2.2.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from sklearn.datasets import load_diabetes
from sklearn.model_selection import train_test_split
from torch import Tensor

import hodiff
from hodiff.checks import along_directions
from hodiff.functions import project_simplex, soft_threshold
from hodiff.implicit import (
    anderson,
    argmin,
    equality_argmin,
    newton,
    project_box_plane,
    projected_argmin,
    proximal_argmin,
    stationary,
)

AGREES_TO = 1e-6
TARGET_RETURN = 0.1
ASSETS = 12
BOX = 0.05


@dataclass(frozen=True)
class Regression:
    """Linear regression of targets on rows of features."""

    features: Tensor
    targets: Tensor

    def loss(self, x: Tensor) -> Tensor:
        """Compute half the mean squared error."""
        return (self.features @ x - self.targets).square().mean() / 2

    def normal_equations(self) -> tuple[Tensor, Tensor]:
        """Return the matrix and the right-hand side of the normal equations."""
        return self.features.T @ self.features / len(self.targets), self.features.T @ self.targets / len(self.targets)


@dataclass(frozen=True)
class Pencil:
    """Linear system (A0 + lambda A1) x = b0 + lambda b1."""

    A0: Tensor
    A1: Tensor
    b0: Tensor
    b1: Tensor

    def solution(self, t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return x with its first and second derivative in t = log(lambda); lambda is its own derivative."""
        size = t.exp()
        A = self.A0 + size * self.A1
        x = torch.linalg.solve(A, self.b0 + size * self.b1)
        first = torch.linalg.solve(A, size * (self.b1 - self.A1 @ x))
        second = torch.linalg.solve(A, size * (self.b1 - self.A1 @ (x + 2 * first)))
        return x, first, second


@dataclass(frozen=True)
class Problem:
    """Solution as a function of the logarithm t of a hyperparameter, and the linear system on its active set."""

    name: str
    at: Tensor
    solve: Callable[[Tensor], Tensor]
    active: Callable[[Tensor, Tensor], Pencil]  # takes the solution and t
    held_out: Regression

    def loss(self, t: Tensor) -> Tensor:
        """Compute the held-out loss of the solution."""
        return self.held_out.loss(self.solve(t))


@dataclass(frozen=True)
class Row:
    """Quantity computed in both ways; vectors are shown by their norms, and the gap is that of the vectors."""

    problem: str
    quantity: str
    implicit: Tensor
    closed: Tensor

    @property
    def gap(self) -> float:
        """Distance relative to the closed form."""
        return ((self.implicit - self.closed).norm() / self.closed.norm()).item()

    def __str__(self) -> str:
        """Format a line of the table."""
        values = ((each if each.dim() == 0 else each.norm()).item() for each in (self.implicit, self.closed))
        numbers = "".join(f"{value:>18.10f}" for value in values)
        return f"{self.problem:22}{self.quantity:22}{numbers}{self.gap:>12.1e}"


def double(value: float) -> Tensor:
    """Return a scalar in float64."""
    return torch.tensor(value, dtype=torch.float64)


def keep_rows(rows: Tensor, matrix: Tensor) -> Tensor:
    """Return the matrix with all rows that are not chosen set to zero."""
    return torch.where(rows[:, None], matrix, 0.0)


def load_patients(seed: int) -> tuple[Regression, Regression]:
    """Return the diabetes data in two parts, centred and scaled by the mean and deviation of the first part."""
    features, targets = load_diabetes(return_X_y=True, scaled=False)
    split = train_test_split(features, targets, train_size=300, random_state=seed)
    first, second, first_targets, second_targets = (torch.from_numpy(part) for part in split)

    def scaled(part: Tensor, like: Tensor) -> Tensor:
        return (part - like.mean(dim=0)) / like.std(dim=0)

    return (
        Regression(scaled(first, first), scaled(first_targets, first_targets)),
        Regression(scaled(second, first), scaled(second_targets, first_targets)),
    )


def make_returns(periods: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return two halves of returns (periods, assets) with two common factors; the second half is held out."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    mean, exposure = 0.1 + 0.05 * draw(ASSETS), 0.2 * draw(2, ASSETS)
    past, future = (mean + draw(2 * periods, 2) @ exposure + 0.3 * draw(2 * periods, ASSETS)).chunk(2)
    return past, future


def ridge(training: Regression, held_out: Regression) -> Problem:
    """Return least squares with a squared penalty."""
    matrix, rhs = training.normal_equations()
    fit = argmin(lambda x, t: training.loss(x) + t.exp() / 2 * x.square().sum(), stationary(newton(symmetric=True)))
    identity, zero = torch.eye(len(rhs), dtype=rhs.dtype), torch.zeros_like(rhs)
    return Problem(
        "ridge regression",
        double(math.log(0.1)),
        lambda t: fit(zero, t),
        lambda x, t: Pencil(matrix, identity, rhs, zero),
        held_out,
    )


def lasso(training: Regression, held_out: Regression) -> Problem:
    """Return least squares with an absolute penalty; the solution is linear in it while its support stays the same."""
    matrix, rhs = training.normal_equations()
    fit = proximal_argmin(
        lambda x, t: training.loss(x),
        lambda x, step, t: soft_threshold(x, step * t.exp()),
        step_size=1 / torch.linalg.matrix_norm(matrix, 2).item(),
    )
    identity, zero = torch.eye(len(rhs), dtype=rhs.dtype), torch.zeros_like(rhs)

    def active(x: Tensor, t: Tensor) -> Pencil:
        on = x != 0
        system = torch.where(on[:, None], matrix, identity)
        return Pencil(system, torch.zeros_like(matrix), torch.where(on, rhs, 0.0), -x.sign())

    return Problem("lasso", double(math.log(0.05)), lambda t: fit(zero, t), active, held_out)


def support_vectors(training: Regression, held_out: Regression, count: int) -> Problem:
    """Return the dual for labels "worse than average": minimize x'Qx/2 - sum(x), 0 <= x <= C, labels @ x = 0."""
    points, labels = training.features[:count], training.targets[:count].sign()
    signed = labels[:, None] * points
    Q = signed @ signed.T
    fit = projected_argmin(
        lambda x, t: x @ Q @ x / 2 - x.sum(),
        lambda x, t: project_box_plane(x, labels, 0.0, 0.0, t.exp()),
        anderson(max_iterations=20_000, memory=20),
        # Q has only the rank of the features: flat directions need long steps, which Anderson's method allows.
        step_size=10 / torch.linalg.matrix_norm(Q, 2).item(),
    )
    identity, zero = torch.eye(count, dtype=Q.dtype), torch.zeros(count, dtype=Q.dtype)

    def solve(t: Tensor) -> Tensor:
        x = fit(zero, t)
        margin = ((x > 0) & (x < t.exp())).to(x)
        # The decision of a margin vector is its label. The mean averages out rounding errors.
        bias = margin @ (labels - points @ (signed.T @ x)) / margin.sum()
        return torch.cat([x, bias[None]])

    def active(solution: Tensor, t: Tensor) -> Pencil:
        # Unknowns are the weights and the bias, which is the multiplier of the hyperplane.
        x = solution[:-1]
        free, full = (x > 0) & (x < t.exp()), x == t.exp()
        A0 = torch.block_diag(torch.where(free[:, None], Q, identity), torch.zeros(1, 1, dtype=Q.dtype))
        A0[:-1, -1], A0[-1, :-1] = free * labels, labels
        b0, b1 = (torch.cat([each.to(x), zero[:1]]) for each in (free, full))
        return Pencil(A0, torch.zeros_like(A0), b0, b1)

    ones = torch.ones_like(held_out.targets)[:, None]
    decisions = Regression(torch.cat([held_out.features @ signed.T, ones], dim=1), held_out.targets.sign())
    return Problem("support vectors, dual", double(math.log(BOX)), solve, active, decisions)


def portfolios(past: Tensor, future: Tensor) -> list[Problem]:
    """Return the problems: minimize lambda x'Sx/2 - m'x with sum(x) = 1, for x of any sign and for x >= 0."""
    mean, covariance = past.mean(dim=0), past.T.cov()
    start, ones = torch.full_like(mean, 1 / len(mean)), torch.ones_like(mean)
    at = double(math.log(2.0))

    def objective(x: Tensor, t: Tensor) -> Tensor:
        return t.exp() / 2 * (x @ covariance @ x) - mean @ x

    def conditions(on: Tensor) -> Pencil:
        # Unknowns are the weights and the multiplier of their sum. Inactive weights are zero.
        A0 = torch.block_diag(torch.diag((~on).to(mean)), torch.zeros(1, 1, dtype=mean.dtype))
        A0[:-1, -1], A0[-1, :-1] = on.to(mean), ones
        A1 = torch.block_diag(keep_rows(on, covariance), torch.zeros(1, 1, dtype=mean.dtype))
        b0 = torch.cat([torch.where(on, mean, 0.0), ones[:1]])
        return Pencil(A0, A1, b0, torch.zeros_like(b0))

    short = equality_argmin(objective, lambda x, t: x.sum() - 1)
    step_size = 1 / (at.exp() * torch.linalg.matrix_norm(covariance, 2)).item()
    long = projected_argmin(objective, lambda x, t: project_simplex(x), step_size=step_size)
    later = Regression(future, torch.full_like(future[:, 0], TARGET_RETURN))
    return [
        Problem("portfolio, equality", at, lambda t: short(start, t)[0], lambda x, t: conditions(ones > 0), later),
        Problem("portfolio, simplex", at, lambda t: long(start, t), lambda x, t: conditions(x > 0), later),
    ]


def make_problems(count: int, seed: int) -> list[Problem]:
    """Return all five; `count` is the number of the support vector machine's points and of the portfolios' periods."""
    training, held_out = load_patients(seed)
    return [
        ridge(training, held_out),
        lasso(training, held_out),
        support_vectors(training, held_out, count),
        *portfolios(*make_returns(count, seed)),
    ]


def compare(problem: Problem) -> list[Row]:
    """Compute the solution, its derivative, and the slope and curvature of the held-out loss, in both ways."""
    t, held_out = problem.at, problem.held_out
    x = problem.solve(t)
    size = len(x)
    # The last unknown of a system may be a multiplier.
    closed, first, second = (each[:size] for each in problem.active(x, t).solution(t))
    matrix, rhs = held_out.normal_equations()
    gradient = matrix @ closed - rhs
    ways = {
        "solution": (x, closed),
        "its derivative": (torch.func.jacfwd(problem.solve)(t), first),
        "slope of the loss": (torch.func.grad(problem.loss)(t), gradient @ first),
        "curvature of the loss": (hodiff.hessian(problem.loss)(t), first @ matrix @ first + gradient @ second),
    }
    return [Row(problem.name, quantity, *values) for quantity, values in ways.items()]


def check_first(problems: Sequence[Problem]) -> str:
    """Run hodiff's check on the ridge regression's loss: all routes, gradgradcheck, SciPy's Hessian."""
    few = along_directions(problems[0].loss, problems[0].at, count=1, size=0.1)
    return hodiff.assert_differentiable(few, torch.zeros(1, dtype=torch.float64), vmap=False).summary


def check(rows: Sequence[Row]) -> None:
    """Raise if the two ways differ in any quantity."""
    worst = max(rows, key=lambda row: row.gap if math.isfinite(row.gap) else math.inf)
    if not worst.gap <= AGREES_TO:
        raise hodiff.CheckError(f"{worst.problem}, {worst.quantity}: a relative gap of {worst.gap:.1e}")


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Derivatives of constrained minimisers against closed forms.")
    parser.add_argument("--quick", action="store_true", help="use 40 points and periods")
    parser.add_argument(
        "--count", type=int, default=150, help="number of points (vector machine) and periods (portfolios)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the split and the returns")
    options = parser.parse_args(arguments)
    if options.quick:
        options.count = 40
    if not 20 <= options.count <= 300:
        parser.error("--count: expected 20 to 300")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare all problems, and print the table."""
    options = parse_options(arguments)
    torch.set_num_threads(1)  # the matrices are small: more threads would only wait for each other
    print(f"{'problem':22}{'quantity':22}{'implicit':>18}{'closed form':>18}{'gap':>12}")
    rows: list[Row] = []
    problems = make_problems(options.count, options.seed)
    for problem in problems:
        found = compare(problem)
        print(*found, sep="\n")
        rows += found
    check(rows)
    print(f"\n{check_first(problems)}")


if __name__ == "__main__":
    try:
        main()
    except hodiff.CheckError as disagreement:
        sys.exit(f"Derivatives disagree: {disagreement}")
