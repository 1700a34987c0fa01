"""Minimisers as differentiable functions of the objective's parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hodiff.common.options import require_callable
from hodiff.common.trees import PyTree
from hodiff.implicit.implicit_solution import Settings, implicit_function
from hodiff.implicit.sparse_matrices import Gradient


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
            `hodiff.optim.minimize`, `functools.partial(hodiff.optim.minimize, method="bfgs")` or
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
    return implicit_function("argmin", objective, solver, lambda f: gradient("argmin", f), settings, symmetric=True)


def gradient(caller: str, objective: Callable[..., Any]) -> Callable[..., PyTree]:
    """Return the gradient with respect to the first argument, of an objective that must return one number."""
    return Gradient(caller, objective)


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

    def solve(objective: Callable[..., Any], x0: PyTree, *params: Any) -> PyTree:
        return solver(gradient("stationary", objective), x0, *params)

    return solve
