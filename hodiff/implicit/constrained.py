"""Minimisers under constraints: equalities by multipliers, convex sets by projections."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hodiff.common.options import require_callable, require_number
from hodiff.common.trees import PyTree, flatten_primals
from hodiff.implicit.implicit_solution import Settings, implicit_function
from hodiff.implicit.implicit_solutions import distance_of_step
from hodiff.implicit.iteration import anderson, newton
from hodiff.implicit.sparse_matrices import Gradient


def equality_argmin(
    objective: Callable[..., Any],
    equality: Callable[..., Any],
    solver: Callable[..., Any] | None = None,
    *,
    linear_solver: str | Callable[..., Any] = "auto",
    tol: float | None = None,
    max_iterations: int | None = None,
    residual_tol: float | None = None,
    check: bool = True,
    throw: bool = False,
    correct: bool = True,
) -> Callable[..., Any]:
    r"""Make a minimiser under equality constraints, and its multipliers, differentiable functions of the parameters.

    The pair is a root of the Karush-Kuhn-Tucker conditions

    $$ \nabla_x f(x, p) + \partial_x h(x, p)^\top y = 0, \qquad h(x, p) = 0, $$

    a symmetric, indefinite system in $(x, y)$. The conditions hold at every stationary point; whether it is a minimum
    depends on the solver, or follows from convexity.

    Args:
        objective: `objective(x, *params)`, a tensor of shape `()`.
        equality: `equality(x, *params)`, a tensor or pytree of tensors of the dtype of `x` that vanishes where the
            constraints hold. The gradients of the constraints must be independent.
        solver: Solver for roots, which gets the conditions as a residual of the pair `(x, y)`; by default `newton()`,
            which needs one step for a quadratic program.
        linear_solver: As for `hodiff.implicit.root`.
        tol: As for `hodiff.implicit.root`.
        max_iterations: As for `hodiff.implicit.root`.
        residual_tol: As for `hodiff.implicit.root`.
        check: As for `hodiff.implicit.root`.
        throw: As for `hodiff.implicit.root`.
        correct: As for `hodiff.implicit.root`.

    Returns:
        The function `(x0, *params) -> (x, y)`, differentiable in `params`; see `root`. `y` has the structure of the
        result of `equality`.

    Raises:
        InputError: As for `root`.

    Example:
        >>> import torch
        >>> nearest = equality_argmin(lambda x, s: (x * x).sum() / 2, lambda x, s: x.sum() - s)
        >>> x, y = nearest(torch.zeros(4), torch.tensor(2.0))
        >>> x, y
        (tensor([0.5000, 0.5000, 0.5000, 0.5000]), tensor(-0.5000))

    Source: J. Nocedal & S. Wright, "Numerical optimization", 2nd ed., 2006, equation 18.3; its derivative: B. Amos &
    J. Kolter, "OptNet", 2017, section 3.1.
    """
    found = newton(symmetric=True) if solver is None else solver
    require_callable("equality_argmin", objective=objective, equality=equality, solver=found)

    def conditions(point: tuple[PyTree, PyTree], *params: Any) -> tuple[PyTree, PyTree]:
        x, y = point
        held, pullback = torch.func.vjp(lambda x: equality(x, *params), x)[:2]
        slope = Gradient("equality_argmin", objective)(x, *params)
        return pytree.tree_map(torch.add, slope, pullback(y)[0]), held

    settings = Settings(linear_solver, tol, max_iterations, residual_tol, False, check, throw, correct)
    solution = implicit_function("equality_argmin", conditions, found, lambda f: f, settings, symmetric=True)

    def solve(x0: PyTree, *params: Any) -> tuple[PyTree, PyTree]:
        flatten_primals(x0, "equality_argmin", "x0")
        # Constants, also where the parameters carry derivatives of their own, as in Taylor mode.
        multipliers = pytree.tree_map_only(
            Tensor, lambda held: torch.zeros(held.shape, dtype=held.dtype, device=held.device), equality(x0, *params)
        )
        flatten_primals(multipliers, "equality_argmin", "equality: result")
        return solution((x0, multipliers), *params)

    return solve


def proximal_argmin(
    objective: Callable[..., Any],
    proximal: Callable[..., Any],
    solver: Callable[..., Any] | None = None,
    *,
    step_size: float = 1.0,
    linear_solver: str | Callable[..., Any] = "auto",
    tol: float | None = None,
    max_iterations: int | None = None,
    residual_tol: float | None = None,
    has_aux: bool = False,
    check: bool = True,
    throw: bool = False,
    correct: bool = True,
) -> Callable[..., Any]:
    r"""Make the minimiser of a smooth plus a simple function, $f(x, p) + g(x, p)$, differentiable in the parameters.

    For any step size $t > 0$ the minimiser is a fixed point of the proximal gradient step

    $$ x = \operatorname{prox}_{t g}(x - t \nabla_x f(x, p)). $$

    Args:
        objective: The smooth function, `objective(x, *params)`, a tensor of shape `()`.
        proximal: `proximal(x, step_size, *params)`, the proximal map of $t g$; for the lasso
            `lambda x, t, lam: hodiff.functions.soft_threshold(x, t * lam)`.
        solver: Solver for fixed points; by default `anderson()`.
        step_size: $t$. The plain iteration converges for $t$ up to $1 / L$, with $L$ the largest eigenvalue of the
            Hessian.
        linear_solver: As for `hodiff.implicit.fixed_point`.
        tol: As for `hodiff.implicit.fixed_point`.
        max_iterations: As for `hodiff.implicit.fixed_point`.
        residual_tol: As for `hodiff.implicit.fixed_point`.
        has_aux: As for `hodiff.implicit.fixed_point`.
        check: As for `hodiff.implicit.fixed_point`.
        throw: As for `hodiff.implicit.fixed_point`.
        correct: As for `hodiff.implicit.fixed_point`.

    Returns:
        The function `(x0, *params) -> x`, differentiable in `params` where the proximal map is; see `root`.

    Raises:
        InputError: As for `fixed_point`.

    Example:
        >>> import torch
        >>> from hodiff.functions import soft_threshold
        >>> distance = lambda x, b, lam: ((x - b) ** 2).sum() / 2
        >>> lasso = proximal_argmin(distance, lambda x, t, b, lam: soft_threshold(x, t * lam))
        >>> lasso(torch.zeros(3), torch.tensor([3.0, -2.0, 0.5]), torch.tensor(1.0))
        tensor([ 2., -1.,  0.])

    Source: Q. Bertrand et al., "Implicit differentiation of lasso-type models", ICML 2020, section 3; M. Blondel et
    al., "Efficient and modular implicit differentiation", NeurIPS 2022, section 2.2.
    """
    require_callable("proximal_argmin", proximal=proximal)
    settings = Settings(linear_solver, tol, max_iterations, residual_tol, has_aux, check, throw, correct)
    return _by_proximal_steps("proximal_argmin", objective, proximal, solver, step_size, settings)


def projected_argmin(
    objective: Callable[..., Any],
    projection: Callable[..., Any],
    solver: Callable[..., Any] | None = None,
    *,
    step_size: float = 1.0,
    linear_solver: str | Callable[..., Any] = "auto",
    tol: float | None = None,
    max_iterations: int | None = None,
    residual_tol: float | None = None,
    has_aux: bool = False,
    check: bool = True,
    throw: bool = False,
    correct: bool = True,
) -> Callable[..., Any]:
    r"""Make a minimiser in a convex set, given by its projection $P$, differentiable in the parameters.

    $$ x = P(x - t \nabla_x f(x, p), p) $$

    Args:
        objective: `objective(x, *params)`, a tensor of shape `()`.
        projection: `projection(x, *params)`: a clamp for a box, `hodiff.functions.project_simplex` for a simplex,
            `hodiff.implicit.project_box_plane` for a box cut by a hyperplane. The set may depend on the parameters.
        solver: As for `proximal_argmin`.
        step_size: As for `proximal_argmin`.
        linear_solver: As for `proximal_argmin`.
        tol: As for `proximal_argmin`.
        max_iterations: As for `proximal_argmin`.
        residual_tol: As for `proximal_argmin`.
        has_aux: As for `proximal_argmin`.
        check: As for `proximal_argmin`.
        throw: As for `proximal_argmin`.
        correct: As for `proximal_argmin`.

    Returns:
        The function `(x0, *params) -> x`, differentiable in `params` where the projection is; see `root`.

    Raises:
        InputError: As for `fixed_point`.

    Example:
        >>> import torch
        >>> distance = lambda x, b: ((x - b) ** 2).sum() / 2
        >>> in_box = projected_argmin(distance, lambda x, b: x.clamp(0, 1))
        >>> in_box(torch.zeros(2), torch.tensor([0.5, 3.0]))
        tensor([0.5000, 1.0000])
        >>> torch.func.grad(lambda b: in_box(torch.zeros(2), b)[0])(torch.tensor([0.5, 3.0]))[0]
        tensor(1.)

    Source: M. Blondel et al., "Efficient and modular implicit differentiation", NeurIPS 2022, equation 9.
    """
    require_callable("projected_argmin", projection=projection)
    settings = Settings(linear_solver, tol, max_iterations, residual_tol, has_aux, check, throw, correct)
    project = lambda x, _, *params: projection(x, *params)  # noqa: E731 - the step size does not matter
    return _by_proximal_steps("projected_argmin", objective, project, solver, step_size, settings)


def _by_proximal_steps(
    caller: str,
    objective: Callable[..., Any],
    proximal: Callable[..., Any],
    solver: Callable[..., Any] | None,
    step_size: float,
    settings: Settings,
) -> Callable[..., Any]:
    """Return the fixed point of proximal gradient steps as a function of the parameters."""
    found = anderson() if solver is None else solver
    require_callable(caller, objective=objective, solver=found)
    require_number(caller, "step_size", step_size, positive=True)
    slope = Gradient(caller, objective)

    def step(x: PyTree, *params: Any) -> PyTree:
        return proximal(
            pytree.tree_map(lambda x, g: x - step_size * g, x, slope(x, *params)),
            step_size,
            *params,
        )

    def solve(step: Callable[..., PyTree], x0: PyTree, *params: Any) -> PyTree:
        # Solvers combine points; one more step sets zeros and bounds exactly.
        return step(found(step, x0, *params), *params)

    return implicit_function(caller, step, solve, distance_of_step, settings)
