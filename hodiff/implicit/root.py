"""Roots of equations as differentiable functions of their parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hodiff.common.options import require_callable
from hodiff.implicit.solution import Settings, implicit_function


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

    and higher derivatives are those of this rule. The solver runs once for a value, whatever is differentiated; it is a
    black box on plain tensors: a loop until convergence, SciPy, a `torch.optim` optimizer. Under `torch.func.vmap` it
    runs once for each element.

    Args:
        residual: `residual(x, *params)`, with as many equations as unknowns: a pytree of the structure, shapes and
            dtypes of `x`. With `has_aux`, `(residual, aux)`. What is to be differentiated must be among `params`.
        solver: `solver(residual, x0, *params) -> x`, for example `hodiff.implicit.newton()`.
        linear_solver: How systems with $J$ and $J^\top$ are solved: "dense" (LU), "cg" (symmetric positive definite),
            "minres" (symmetric), "gmres", "lsmr" (all by SciPy, on the CPU), "neumann" (where $I - J$ contracts),
            "sparse" (factors of the sparse matrix that `hodiff.sparse` makes of $J$: by CHOLMOD where scikit-sparse is
            installed and $J$ symmetric and positive definite, else by SciPy's SuperLU), or a function
            `(matvec, rhs) -> x` of trees like `x`. "auto" is "dense" up to 1024 unknowns, else "gmres", or "minres"
            where `symmetric`.
        symmetric: Whether $J$ is symmetric.
        tol: Relative residual that the linear solver is to reach; by default $\varepsilon^{2/3}$ of the dtype.
        max_iterations: Most iterations of the linear solver; by default ten times the unknowns, and 1000 for "neumann".
        residual_tol: The norm of the residual above which the solver's result is no root, over $\max(1, \lVert x
            \rVert) \, \lVert J \rVert_F / \sqrt n$ (estimated; $J = \partial_x r$, n unknowns); by default
            $\sqrt\varepsilon$ of the dtype.
        has_aux: Whether `residual` returns a pair; its second part at the root is then returned, too.
        check: Whether to say when the result is no root, the Jacobian is singular, or the linear solver fails.
        throw: Whether that is an error, a `ConvergenceError`, instead of a `HodiffWarning`.
        correct: Whether hodiff's rules take the place of torch's where those are wrong or missing.

    Returns:
        The function `(x0, *params) -> x`, or `(x, aux)`. It is differentiable in all floating-point tensors of `params`
        (pytrees, which may hold constants) by every route to every order; by `x0`, where the solver starts, the
        derivative is zero.

    Raises:
        InputError: If an option is not what it should be; the function raises it for `x0`, for a solver or residual
            that returns another structure than `x0` has, and for a tensor with a derivative that `residual` closes
            over.

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
