"""Roots, fixed points and minimisers as differentiable functions of their parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from hodiff.common.options import require_callable
from hodiff.common.trees import PyTree
from hodiff.implicit.implicit_solution import Settings, implicit_function
from hodiff.implicit.solver_call import Ravel
from hodiff.implicit.sparse_matrices import Gradient


def root(
    residual: Callable[..., Any],
    solver: Callable[..., Any],
    *,
    linear_solver: str | Callable[..., Any] = "auto",
    symmetric: bool = False,
    tol: float | None = None,
    max_iterations: int | None = None,
    residual_tol: float | None = None,
    has_aux: bool = False,
    check: bool = True,
    throw: bool = False,
    correct: bool = True,
) -> Callable[..., Any]:
    r"""Make the root that a solver finds a differentiable function of the equation's parameters.

    Where $r(x(p), p) = 0$ and $J = \partial_x r$ is regular, the implicit function theorem gives

    $$ \dot x = -J^{-1} \, \partial_p r \, \dot p, \qquad \bar p = -\partial_p r^\top J^{-\top} \bar x, $$

    and higher derivatives are those of this rule. The solver runs once for a value, whatever is differentiated. It is a
    black box on plain tensors: a loop until convergence, SciPy, a `torch.optim` optimizer. Under `torch.func.vmap` it
    runs once for each element.

    Args:
        residual: `residual(x, *params)`, with as many equations as unknowns: a pytree of the structure, shapes and
            dtypes of `x`. With `has_aux`, `(residual, aux)`. Tensors that need a derivative must be in `params`.
        solver: `solver(residual, x0, *params) -> x`, for example `hodiff.implicit.newton()`.
        linear_solver: Solver of systems with $J$ and $J^\top$: "dense" (LU), "cg" (symmetric positive definite),
            "minres" (symmetric), "gmres", "lsmr" (all by SciPy, on the CPU), "neumann" (if $I - J$ contracts),
            "sparse", or a function `(matvec, rhs) -> x` of trees like `x`. "sparse" factorises the sparse matrix that
            `hodiff.sparse` computes of $J$: by CHOLMOD if scikit-sparse is installed and $J$ symmetric and positive
            definite, else by SciPy's SuperLU. "auto" is "dense" up to 1024 unknowns, else "gmres", or "minres" if
            `symmetric`.
        symmetric: Whether $J$ is symmetric.
        tol: Relative residual of the linear solver; by default $\varepsilon^{2/3}$ of the dtype.
        max_iterations: Maximum iterations of the linear solver; by default ten times the unknowns, and 1000 for
            "neumann".
        residual_tol: Largest norm of the residual at a root, relative to $\max(1, \lVert x \rVert) \, \lVert J \rVert_F
            / \sqrt n$ (estimated; $J = \partial_x r$, n unknowns); by default $\sqrt\varepsilon$ of the dtype.
        has_aux: Whether `residual` returns a pair, whose second part at the root is returned, too.
        check: Whether to report if the result is no root, the Jacobian is singular, or the linear solver fails.
        throw: Whether a report is a `ConvergenceError` instead of a `HodiffWarning`.
        correct: Whether hodiff's rules replace torch's wrong and missing ones.

    Returns:
        The function `(x0, *params) -> x`, or `(x, aux)`. It is differentiable in all floating-point tensors of `params`
        (pytrees, which may hold constants) by every route to every order. The derivative in the start `x0` is zero.

    Raises:
        InputError: If an option is invalid. The returned function raises it for an invalid `x0`, for a solver or
            residual that returns another structure than that of `x0`, and for a tensor with a derivative that
            `residual` closes over.

    Example:
        >>> import torch
        >>> from hodiff.implicit import newton, root
        >>> square_root = root(lambda x, p: x * x - p, newton())
        >>> p = torch.tensor(4.0, dtype=torch.float64)
        >>> square_root(torch.ones_like(p), p)
        tensor(2.0000, dtype=torch.float64)
        >>> derivative = torch.func.grad(lambda p: square_root(torch.ones_like(p), p))
        >>> derivative(p), torch.func.grad(derivative)(p)
        (tensor(0.2500, dtype=torch.float64), tensor(-0.0312, dtype=torch.float64))

    Source: M. Blondel et al., "Efficient and modular implicit differentiation", NeurIPS 2022, section 2.1.
    """
    require_callable("root", residual=residual, solver=solver)
    settings = Settings(linear_solver, tol, max_iterations, residual_tol, has_aux, check, throw, correct)
    return implicit_function("root", residual, solver, lambda f: f, settings, symmetric=symmetric)


def fixed_point(
    step: Callable[..., Any],
    solver: Callable[..., Any],
    *,
    linear_solver: str | Callable[..., Any] = "auto",
    tol: float | None = None,
    max_iterations: int | None = None,
    residual_tol: float | None = None,
    has_aux: bool = False,
    check: bool = True,
    throw: bool = False,
    correct: bool = True,
) -> Callable[..., Any]:
    r"""Make the fixed point that a solver finds a differentiable function of the iteration's parameters.

    The fixed point is a root of $x - s(x, p)$, so with $S = \partial_x s$

    $$ \dot x = (I - S)^{-1} \, \partial_p s \, \dot p, \qquad \bar p = \partial_p s^\top (I - S)^{-\top} \bar x. $$

    No step is stored for backward, however many there are. `linear_solver="neumann"` sums $\sum_k (S^\top)^k \bar x$;
    its first `max_iterations` terms equal the derivative of as many last steps of the iteration.

    Args:
        step: `step(x, *params)`, of the structure, shapes and dtypes of `x`; with `has_aux`, `(x, aux)`. Tensors
            that need a derivative must be in `params`.
        solver: `solver(step, x0, *params) -> x`, for example `hodiff.implicit.picard()`.
        linear_solver: As for `hodiff.implicit.root`, with $J = I - S$.
        tol: As for `root`.
        max_iterations: As for `root`.
        residual_tol: Largest norm of $x - s(x, p)$ at a fixed point, relative to $\max(1, \lVert x \rVert) \, \lVert J
            \rVert_F / \sqrt n$ (estimated; $J = I - \partial_x s$, n unknowns); by default $\sqrt\varepsilon$ of the
            dtype.
        has_aux: As for `root`.
        check: As for `root`. Switch it off for a series that is truncated on purpose.
        throw: As for `root`.
        correct: As for `root`.

    Returns:
        The function `(x0, *params) -> x`, or `(x, aux)`, differentiable in `params`; see `root`.

    Raises:
        InputError: As for `root`.

    Example:
        >>> import torch
        >>> from hodiff.implicit import fixed_point, picard
        >>> square_root = fixed_point(lambda x, p: (x + p / x) / 2, picard())
        >>> torch.func.grad(lambda p: square_root(torch.ones_like(p), p))(torch.tensor(4.0))
        tensor(0.2500)

    Source: M. Blondel et al., "Efficient and modular implicit differentiation", NeurIPS 2022, equation 3; the series:
    R. Grazzi et al., "On the iteration complexity of hypergradient computation", ICML 2020, section 2.
    """
    require_callable("fixed_point", step=step, solver=solver)
    settings = Settings(linear_solver, tol, max_iterations, residual_tol, has_aux, check, throw, correct)
    return implicit_function("fixed_point", step, solver, distance_of_step, settings)


def distance_of_step(step: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Return the residual of a fixed point, x minus the step from x."""

    def residual(x: PyTree, *params: Any) -> PyTree:
        following = step(x, *params)
        Ravel(x).require_same(following, "fixed_point: step: result", "return the structure, shapes and dtypes of x")
        return pytree.tree_map(torch.sub, x, following)

    return residual


def argmin(
    objective: Callable[..., Any],
    solver: Callable[..., Any],
    *,
    linear_solver: str | Callable[..., Any] = "auto",
    tol: float | None = None,
    max_iterations: int | None = None,
    residual_tol: float | None = None,
    has_aux: bool = False,
    check: bool = True,
    throw: bool = False,
    correct: bool = True,
) -> Callable[..., Any]:
    r"""Make the minimiser that a solver finds a differentiable function of the objective's parameters.

    The minimiser is a root of $\nabla_x f(x, p)$, so with the Hessian $H = \nabla^2_x f$

    $$ \dot x = -H^{-1} \, \partial_p \nabla_x f \, \dot p, \qquad
       \bar p = -(\partial_p \nabla_x f)^\top H^{-1} \bar x. $$

    The rule holds at any stationary point with a regular $H$; whether it is a minimum depends on the solver.

    Args:
        objective: `objective(x, *params)`, a tensor of shape `()`; with `has_aux`, `(value, aux)`. Tensors that
            need a derivative must be in `params`.
        solver: `solver(objective, x0, *params) -> x`, or a SciPy result with such an `x`; for example
            `hodiff.optimize.minimize`, `functools.partial(hodiff.optimize.minimize, method="bfgs")` or
            `hodiff.implicit.torch_optimizer(torch.optim.Adam, steps=1000, lr=0.1)`. `hodiff.implicit.stationary`
            converts a solver for roots.
        linear_solver: As for `hodiff.implicit.root`, with $J = H$; "cg" suits minima, and "sparse" uses the sparse
            Hessian. "auto" is "minres" beyond 1024 unknowns.
        tol: As for `root`.
        max_iterations: As for `root`.
        residual_tol: Largest norm of the gradient at a stationary point, relative to $\max(1, \lVert x \rVert) \,
            \lVert J \rVert_F / \sqrt n$ (estimated; $J$ is the Hessian, n unknowns); by default $\sqrt\varepsilon$ of
            the dtype.
        has_aux: As for `root`.
        check: As for `root`.
        throw: As for `root`.
        correct: As for `root`.

    Returns:
        The function `(x0, *params) -> x`, or `(x, aux)`, differentiable in `params`; see `root`.

    Raises:
        InputError: As for `root`, or if the objective does not return one number.

    Example:
        >>> import torch
        >>> from hodiff.implicit import argmin, scipy_minimize
        >>> ridge = argmin(lambda x, p: ((x - 3) ** 2 + p * x**2).sum(), scipy_minimize())
        >>> p = torch.tensor(2.0, dtype=torch.float64)
        >>> x, slope = torch.func.vjp(lambda p: ridge(torch.zeros_like(p), p), p)
        >>> x, slope(torch.ones_like(x))[0]
        (tensor(1.0000, dtype=torch.float64), tensor(-0.3333, dtype=torch.float64))

    Source: M. Blondel et al., "Efficient and modular implicit differentiation", NeurIPS 2022, equation 2.
    """
    require_callable("argmin", objective=objective, solver=solver)
    settings = Settings(linear_solver, tol, max_iterations, residual_tol, has_aux, check, throw, correct)
    return implicit_function("argmin", objective, solver, lambda f: Gradient("argmin", f), settings, symmetric=True)


def stationary(solver: Callable[..., Any]) -> Callable[..., Any]:
    r"""Convert a solver for roots to a solver for `argmin`; it solves $\nabla_x f = 0$.

    Args:
        solver: `solver(residual, x0, *params) -> x`.

    Returns:
        Solver `(objective, x0, *params) -> x`.

    Example:
        >>> import torch
        >>> from hodiff.implicit import argmin, newton, stationary
        >>> argmin(lambda x, p: (x - p) ** 4 / 4 + x * x, stationary(newton()))(torch.zeros(()), torch.tensor(3.0))
        tensor(1.5438)
    """
    require_callable("stationary", solver=solver)

    def solve(objective: Callable[..., Any], x0: PyTree, *params: Any) -> PyTree:
        return solver(Gradient("stationary", objective), x0, *params)

    return solve
