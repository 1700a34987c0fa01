"""Fixed points of iterations as differentiable functions of their parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from hodiff.common.options import require_callable
from hodiff.common.trees import PyTree
from hodiff.implicit.implicit_solution import Settings, implicit_function
from hodiff.implicit.solver_call import Ravel


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
    return implicit_function("fixed_point", step, solver, _distance, settings)


def _distance(step: Callable[..., PyTree]) -> Callable[..., PyTree]:
    def residual(x: PyTree, *params: Any) -> PyTree:
        following = step(x, *params)
        Ravel(x).require_same(following, "fixed_point: step: result", "return the structure, shapes and dtypes of x")
        return pytree.tree_map(torch.sub, x, following)

    return residual
