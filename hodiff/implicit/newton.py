"""Newton's method for roots."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hodiff.common.trees import PyTree
from hodiff.implicit.diagnostics import Reporter, rounding
from hodiff.implicit.implicit_function import solve
from hodiff.implicit.implicit_solution import linear_options, require_positive
from hodiff.implicit.linear_maps import jacobian_of
from hodiff.implicit.ravel import Ravel

# A shorter step makes no progress: the residual's norm has a minimum that is no root.
_SHORTEST = 2.0**-20


def newton(
    *,
    tol: float | None = None,
    max_iterations: int = 50,
    linear_solver: str | Callable[..., Any] = "auto",
    symmetric: bool = False,
) -> Callable[..., Any]:
    r"""Newton's method with backtracking, as a solver for roots.

    $$ x \leftarrow x - t J^{-1} r(x), \qquad t = 1, \tfrac12, \tfrac14, \dots $$

    A step is accepted as soon as $\lVert r \rVert$ falls by the fraction $10^{-4} t$.

    Args:
        tol: Norm of the residual, relative to $\max(1, \lVert x \rVert)$ and to the size of $J$ along the last step
            $s$, $\lVert J s \rVert / \lVert s \rVert$; by default $\varepsilon^{2/3}$ of the dtype. The method stops
            earlier if no step makes progress; `hodiff.implicit.root` reports if the result is no root.
        max_iterations: Maximum number of steps.
        linear_solver: Solver of systems with $J$; see `hodiff.implicit.root`.
        symmetric: Whether $J$ is symmetric.

    Returns:
        Solver `(residual, x0, *params) -> x` for `root`; `hodiff.implicit.stationary` converts it for `argmin`.

    Example:
        >>> import torch
        >>> newton()(lambda x, p: x**3 - p, torch.tensor(1.0), torch.tensor(8.0)).round(decimals=4)
        tensor(2.)

    Source: J. Nocedal & S. Wright, "Numerical optimization", 2nd ed., 2006, algorithm 11.4.
    """
    require_positive("newton", tol=tol, max_iterations=max_iterations)
    options = linear_options(
        "newton", "linear_solver", linear_solver, symmetric, None, None, Reporter("newton", False, False)
    )

    def run(residual: Callable[..., PyTree], x0: PyTree, *params: Any) -> PyTree:
        ravel = Ravel(x0)
        jacobian = jacobian_of(residual, symmetric)
        bound = rounding(ravel.dtype, 2 / 3) if tol is None else tol
        x = ravel.vector(x0)

        def at(x: Any) -> Any:
            return ravel.residual(residual(ravel.tree(x), *params), "newton").detach()

        r, scale = at(x), 0.0
        for _ in range(max_iterations):
            norm = r.norm()
            if not norm > bound * scale * max(1.0, x.norm().item()):
                break
            step = ravel.vector(solve(jacobian, options, ravel.tree(r), ravel.tree(x), *params)).detach()
            scale = (norm / step.norm()).item()
            length = 1.0
            trial = at(x - step)
            while not trial.norm() <= (1 - 1e-4 * length) * norm and length > _SHORTEST:
                length /= 2
                trial = at(x - length * step)
            if not trial.norm() < norm:
                break
            x, r = x - length * step, trial
        return ravel.tree(x)

    return run
