"""Roots of equations as differentiable functions of their parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hodiff.common.options import require_callable
from hodiff.implicit.implicit_solution import Settings, implicit_function


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
